"""The tables of a page, as cells that know where in `summary.json` their figure stands."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from harness.latency import Percentiles, Spread
from reports import words
from reports.arms import ArmSummary, OverLimit, RatePercentiles
from reports.summary import Summary
from reports.weights import SharedWeights

Say = Callable[[float | None], str]


class Figure(msgspec.Struct, frozen=True):
    """A printed figure; `key` is its path in `summary.json` (empty for words), `value` what stands there."""

    text: str
    key: str = ""
    value: float | None = None
    before: str = ""


class Cell(msgspec.Struct, frozen=True):
    """What stands in one cell: a figure, and lines of smaller print below it."""

    head: str
    main: Figure
    below: list[Figure] = []
    kind: str = ""
    """A class of the style sheet: cold, shadow, ratio, published."""


class Row(msgspec.Struct, frozen=True):
    """One line of a table. `emulated`: its figures hold emulated time."""

    title: str
    note: str
    cells: list[Cell]
    emulated: bool = False


def is_emulated(emulated: list[str], *parts: str) -> bool:
    """Whether any of `parts` ("compute time", "cold start", "detection", "promotion") was emulated."""
    return any(line.startswith(parts) for line in emulated)


def comparison_rows(summary: Summary) -> list[Row]:
    """Return the table of the published figures, ours and theirs."""
    durations = [
        ("Recovery", "fault → successor registered", "recovery_s", ("cold start", "detection", "promotion")),
        ("of it, detection", "fault → lock won (cold: after its start)", "detection_s", ("detection",)),
        ("of it, promotion", "lock won → registered", "promotion_s", ("promotion",)),
        ("Then, first service", "registered → first token of a user's request", "first_service_s", ("compute time",)),
    ]
    return [
        *[_duration_row(summary, *row) for row in durations],
        _ttft_row(summary),
        _decode_row(summary),
        _limit_row(summary, "ttft_over_limit", "Requests over the TTFT limit", words.duration),
        _limit_row(summary, "decode_under_limit", "Requests under the rate limit", words.rate),
        _count_row(summary),
    ]


def _duration_row(summary: Summary, title: str, note: str, name: str, parts: tuple[str, ...]) -> Row:
    published = summary.published
    cells = [_spread_cell(summary, arm, name) for arm in (summary.cold, summary.shadow)]
    ratio, below = Figure(words.NONE), []
    if name == "recovery_s":
        below = _ratio_range(summary)
        ratio = Figure(words.ratio(summary.ratio_recovery), "ratio_recovery", summary.ratio_recovery)
    theirs = [words.duration(getattr(arm, name, None)) for arm in (published.cold, published.shadow)]
    theirs_ratio = words.ratio(published.ratio_recovery) if name == "recovery_s" else words.NONE
    shown = [*cells, Cell("Ratio", ratio, below, kind="ratio"), *_published(*theirs, theirs_ratio)]
    return Row(title, note, shown, is_emulated(summary.emulated, *parts))


def _ratio_range(summary: Summary) -> list[Figure]:
    """Return the least and the largest ratio of single recoveries, where there were several."""
    least, most = summary.ratio_recovery_min, summary.ratio_recovery_max
    if least is None or most is None or summary.cold.recovery_s.n < 2:
        return []
    return [
        Figure(words.ratio(least), "ratio_recovery_min", least),
        Figure(words.ratio(most), "ratio_recovery_max", most, before="to"),
    ]


def _spread_cell(summary: Summary, arm: ArmSummary, name: str) -> Cell:
    value: Spread = getattr(arm, name)
    scaled: Spread = getattr(arm.at_full_scale, name)
    main = Figure(words.duration(value.median), f"{arm.arm}.{name}.median", value.median)
    below = []
    if value.n > 1:
        below = [
            Figure(words.duration(value.min), f"{arm.arm}.{name}.min", value.min),
            Figure(words.duration(value.max), f"{arm.arm}.{name}.max", value.max, before="to"),
        ]
    if summary.time_scale != 1 and scaled.median is not None:
        key = f"{arm.arm}.at_full_scale.{name}.median"
        below.append(Figure(words.duration(scaled.median), key, scaled.median, before="full scale"))
    return Cell(words.arm_title(arm.arm), main, below, arm.arm)


def _published(*texts: str) -> list[Cell]:
    """Return the three published cells: cold, shadow, ratio."""
    cold, shadow, ratio = map(words.given, texts)
    return [
        Cell("Published cold", Figure(cold), kind="published"),
        Cell("Published shadow", Figure(shadow), kind="published"),
        Cell("Published ratio", Figure(ratio), kind="published ratio"),
    ]


def _half_cell(summary: Summary, arm: ArmSummary, name: str, say: Say) -> Cell:
    value = getattr(arm, name).after_fault
    scaled = getattr(arm.at_full_scale, name).after_fault
    main = Figure(_or_censored(value, say), f"{arm.arm}.{name}.after_fault.p50", value.p50)
    below = []
    if summary.time_scale != 1 and scaled.p50 is not None:
        key = f"{arm.arm}.at_full_scale.{name}.after_fault.p50"
        below = [Figure(say(scaled.p50), key, scaled.p50, before="full scale")]
    return Cell(words.arm_title(arm.arm), main, below, arm.arm)


def _or_censored(value: Percentiles | RatePercentiles, say: Say) -> str:
    return "censored" if value.p50 is None and value.n else say(value.p50)


def _ttft_row(summary: Summary) -> Row:
    arms, published = (summary.cold, summary.shadow), summary.published
    cells = [_half_cell(summary, arm, "ttft_ms", words.milliseconds) for arm in arms]
    ratio = Figure(words.ratio(summary.ratio_ttft_p50), "ratio_ttft_p50", summary.ratio_ttft_p50)
    theirs = [words.milliseconds(arm.ttft_ms_p50) for arm in (published.cold, published.shadow)]
    shown = [*cells, Cell("Ratio", ratio, kind="ratio"), *_published(*theirs, words.ratio(published.ratio_ttft_p50))]
    return Row("TTFT p50", "after the first fault", shown, is_emulated(summary.emulated, "compute time"))


def _decode_row(summary: Summary) -> Row:
    arms, published = (summary.cold, summary.shadow), summary.published
    cells = [_half_cell(summary, arm, "decode_rate_tokens_s", words.rate) for arm in arms]
    value = summary.ratio_decode_rate_p50
    ratio = Cell("Ratio", Figure(words.ratio(value), "ratio_decode_rate_p50", value), kind="ratio")
    theirs = [words.rate(arm.decode_rate_tokens_s_p50) for arm in (published.cold, published.shadow)]
    shown = [*cells, ratio, *_published(*theirs, words.ratio(published.ratio_decode_rate_p50))]
    return Row("Decode rate p50", "of a request, after the first fault", shown,
               is_emulated(summary.emulated, "compute time"))  # fmt: skip


def _limit_row(summary: Summary, name: str, title: str, say: Say) -> Row:
    published = summary.published
    cells = [_over_cell(arm, name) for arm in (summary.cold, summary.shadow)]
    limit: OverLimit = getattr(summary.cold, name)
    theirs = [words.share(getattr(arm, name), arm.requests) for arm in (published.cold, published.shadow)]
    shown = [*cells, Cell("Ratio", Figure(words.NONE), kind="ratio"), *_published(*theirs, words.NONE)]
    note = f"limit {words.given(say(limit.limit))}" + ("" if summary.time_scale == 1 else " at this time scale")
    return Row(title, note, shown, is_emulated(summary.emulated, "compute time"))


def _over_cell(arm: ArmSummary, name: str) -> Cell:
    value: OverLimit = getattr(arm, name)
    main = Figure(words.share(value.over, value.n), f"{arm.arm}.{name}.over", value.over)
    below = [Figure(words.percent(value.over, value.n))]
    if value.undetermined:
        open_ = Figure(f"{value.undetermined:,}", f"{arm.arm}.{name}.undetermined", value.undetermined, "undetermined")
        below.append(open_)
    return Cell(words.arm_title(arm.arm), main, below, arm.arm)


def _count_row(summary: Summary) -> Row:
    cells = []
    for arm in (summary.cold, summary.shadow):
        main = Figure(words.share(arm.requests_failed, arm.requests), f"{arm.arm}.requests_failed", arm.requests_failed)
        below = [Figure(words.percent(arm.requests_failed, arm.requests))]
        cells.append(Cell(words.arm_title(arm.arm), main, below, arm.arm))
    blank = Cell("Ratio", Figure(words.NONE), kind="ratio")
    return Row("Requests failed", "in the whole run", [*cells, blank, *_published(words.NONE, words.NONE, words.NONE)])


def count_rows(arms: list[ArmSummary]) -> list[Row]:
    """Return what the client counted: outcomes, content, lateness."""
    counts = [
        ("Requests", "sent in the whole run", "requests"),
        ("Answered", "whole, with status 200", "requests_ok"),
        ("Failed", "the client saw an error", "requests_failed"),
        ("Unknown", "timed out, or still running at the end", "requests_unknown"),
        ("Wrong content", "tokens differ from the oracle's", "content_wrong"),
        ("Content unchecked", "no whole answer to compare", "content_unchecked"),
        ("Spoilt", "left out of latencies: the client was late", "spoilt_rows"),
    ]
    rows = [
        Row(title, note, [_plain(arm, name, f"{getattr(arm, name):,}") for arm in arms]) for title, note, name in counts
    ]
    lag = [_plain(arm, "schedule_lag_ms_p99", words.milliseconds(arm.schedule_lag_ms_p99)) for arm in arms]
    return [*rows, Row("Schedule lag p99", "send − intended start", lag)]


def _plain(arm: ArmSummary, name: str, text: str) -> Cell:
    return Cell(words.arm_title(arm.arm), Figure(text, f"{arm.arm}.{name}", getattr(arm, name)), kind=arm.arm)


def memory_rows(arms: list[ArmSummary]) -> list[Row]:
    """Return the peaks of memory."""
    peaks = [
        ("Weights", "on one device", "weights_bytes_max"),
        ("KV cache", "on one device", "kv_bytes_max"),
        ("All engines of a worker", "PSS together", "worker_pss_bytes_max"),
        ("One engine", "PSS", "engine_pss_bytes_max"),
    ]
    return [
        Row(title, note, [
            Cell(words.arm_title(arm.arm), Figure(words.size(getattr(arm.memory, name)), f"{arm.arm}.memory.{name}",
                 getattr(arm.memory, name)), kind=arm.arm) for arm in arms
        ]) for title, note, name in peaks
    ]  # fmt: skip


def weights_rows(shared: list[SharedWeights]) -> list[Row]:
    """Return a row for each way in which engines of one run hold their weights."""
    return [
        Row(", ".join(each.engines), " and ".join(each.roles), [
            Cell(head, Figure(words.plural(count, "byte"))) for head, count in (
                ("mapped and shared", each.bytes_mapped), ("of these, with a copy beside", each.bytes_duplicated),
                ("copied", each.bytes_copied),
            )
        ]) for each in shared
    ]  # fmt: skip


def latency_rows(arms: list[ArmSummary]) -> list[Row]:
    """Return percentiles before and after the first fault, with how many were censored."""
    rows = []
    for name, title, say in (
        ("ttft_ms", "TTFT", words.milliseconds), ("decode_rate_tokens_s", "Decode rate", words.rate),
    ):  # fmt: skip
        emulated = is_emulated([line for arm in arms for line in arm.emulated], "compute time")
        for half, note in (("baseline", "before the first fault"), ("after_fault", "after the first fault")):
            for arm in arms:
                value = getattr(getattr(arm, name), half)
                label = f"{title}, {words.arm_title(arm.arm).lower()}"
                rows.append(Row(label, note, _percentile_cells(arm, f"{name}.{half}", value, say), emulated))
    return rows


def _percentile_cells(arm: ArmSummary, path: str, value: Percentiles | RatePercentiles, say: Say) -> list[Cell]:
    key = f"{arm.arm}.{path}"
    worst = "max_measured" if isinstance(value, Percentiles) else "min_measured"
    cells = [
        Cell("n", Figure(f"{value.n:,}", f"{key}.n", value.n)),
        Cell("censored", Figure(f"{value.censored:,}", f"{key}.censored", value.censored)),
    ]
    for name in ("p50", "p90", "p99"):
        figure = getattr(value, name)
        text = "censored" if figure is None and value.n else say(figure)
        cells.append(Cell(name, Figure(text, f"{key}.{name}", figure)))
    return [*cells, Cell("worst measured", Figure(say(getattr(value, worst)), f"{key}.{worst}", getattr(value, worst)))]
