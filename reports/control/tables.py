"""The tables of the page; each figure knows where in `summary.json` it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from harness.latency import Percentiles
from reports import words
from reports.control.gauges import MILLISECONDS, Gauge, Reading
from reports.control.storms import WITH, WITHOUT
from reports.control.summary import ControlSummary
from reports.tables import Cell, Figure, Row

Say = Callable[[Any], str]
METHODS: Final = ("reserve", "pin", "unpin", "evict", "prepare_get", "start_migrate", "cancel_migrate")


class Table(msgspec.Struct, frozen=True):
    """Rows with a column a head."""

    heads: list[str]
    rows: list[Row]


def figure(summary: ControlSummary, path: str, say: Say = words.count, before: str = "") -> Figure:
    """Return the figure at a dotted path of the summary, as `say` prints it; one that is not there is a dash."""
    value: Any = summary
    for name in path.split("."):
        value = None if value is None else value.get(name) if isinstance(value, dict) else getattr(value, name)
    return Figure(words.NONE if value is None else say(value), path if value is not None else "", value, before)


def _table(heads: list[str], rows: list[tuple[str, str, list[Cell]]]) -> Table:
    return Table(heads, [Row(title, note, cells) for title, note, cells in rows])


def _cells(summary: ControlSummary, base: str, columns: list[tuple[str, str, Say]]) -> list[Cell]:
    return [Cell(head, figure(summary, f"{base}.{name}", say)) for head, name, say in columns]


def fate_table(summary: ControlSummary) -> Table:
    """Return what became of the operations that each kind of fault caught."""
    columns: list[tuple[str, str, Say]] = [
        ("Injected", "injected", words.count), ("Proved", "proved", words.count), ("Struck", "struck", words.count),
        ("Caught", "caught", words.count), ("Retried", "retried", words.count), ("Replayed", "replayed", words.count),
        ("Applied once", "applied_once", words.count), ("Refused", "refused", words.count),
        ("No effect", "nothing", words.count),
    ]  # fmt: skip
    rows = []
    for key, fate in summary.faults.items():
        base = f"faults.{key}"
        wrong = [figure(summary, f"{base}.wrong", lambda n: f"of {words.plural(n, 'operation')}")] if fate.wrong else []
        doubled = Cell("Double effects", figure(summary, f"{base}.double_effects"), wrong, "bad" if fate.wrong else "")
        rows.append((fate.title, fate.where, [*_cells(summary, base, columns), doubled]))
    return _table([*(head for head, _, _ in columns), "Double effects"], rows)


def method_table(summary: ControlSummary) -> Table:
    """Return each method's calls, latency and attempts."""
    columns: list[tuple[str, str, Say]] = [
        ("Calls", "invocations", words.count), ("Applied", "ok", words.count), ("Refused", "refused", words.count),
        ("Failed", "failed", words.count), ("Unknown", "unknown", words.count), ("p50", "ms.p50", words.milliseconds),
        ("p99", "ms.p99", words.milliseconds), ("Attempts a call", "attempts_mean", _two), ("at most", "attempts_max",
        words.count),
    ]  # fmt: skip
    names = [*(name for name in summary.methods if name != "all"), "all"]
    rows = [("all together" if n == "all" else n, "", _cells(summary, f"methods.{n}", columns)) for n in names]
    return _table([head for head, _, _ in columns], rows)


def _two(value: float) -> str:
    return f"{value:.2f}"


def user_table(summary: ControlSummary) -> Table:
    """Return what users of the engines saw: before the first fault, after it, and while a block service was away."""
    u = summary.users
    heads = ["Before the first fault", "After it", "Block service away"]
    ttft = [
        ("ttft_before_ms", u.ttft_before_ms),
        ("ttft_after_ms", u.ttft_after_ms),
        ("ttft_during_ms", u.ttft_during_ms),
    ]
    gap = [("gap_before_ms", u.gap_before_ms), ("gap_after_ms", u.gap_after_ms)]
    rows = [
        ("TTFT", "median, p99", [_latency(summary, h, *pair) for h, pair in zip(heads, ttft, strict=True)]),
        ("Mean decode gap", "median, p99",
         [*(_latency(summary, h, *pair) for h, pair in zip(heads[:2], gap, strict=True)), _none(heads[2])]),
    ]  # fmt: skip
    return _table(heads, rows)


def user_counts(summary: ControlSummary) -> Table:
    """Return the load's requests in counts: all, and those under way while a block service was away."""
    heads = ["Requests", "Answered", "Failed", "Unknown", "Wrong answers", "Unchecked"]
    every = ["requests", "ok", "failed", "unknown", "wrong", "unchecked"]
    away = ["during", "", "during_failed", "", "during_wrong", ""]

    def cells(names: list[str]) -> list[Cell]:
        return [
            Cell(h, figure(summary, f"users.{n}")) if n else _none(h) for h, n in zip(heads, names, strict=True)
        ]  # fmt: skip

    rows = [
        ("All", "wrong: tokens differ from the oracle's", cells(every)),
        ("Block service away", "of them, under way then", cells(away)),
    ]
    return _table(heads, rows)


def _latency(summary: ControlSummary, head: str, name: str, of: Percentiles) -> Cell:
    if not of.n:
        return _none(head)
    main, below = (_percentile(summary, f"users.{name}", of, rank) for rank in ("p50", "p99"))
    below = msgspec.structs.replace(below, before="p99")
    return Cell(head, main, [below, figure(summary, f"users.{name}.n", lambda n: words.plural(n, "request"))])


def _percentile(summary: ControlSummary, path: str, of: Percentiles, rank: str) -> Figure:
    if of.n and getattr(of, rank) is None:
        return Figure("censored")
    return figure(summary, f"{path}.{rank}", words.milliseconds)


def _none(head: str) -> Cell:
    return Cell(head, Figure(words.NONE))


def outage_table(summary: ControlSummary) -> Table:
    """Return how long crashes kept a block service away, in medians and ranges."""
    heads = ["Median", "Shortest", "Longest", "Crashes"]
    named = [
        ("Process started", "its end → its successor's start", "started_s"),
        ("Engine linked", "its end → an engine has told what it holds", "linked_s"),
        ("Applied again", "its end → the first operation applied at the node", "applied_s"),
    ]
    rows = [
        (title, note, [
            *(Cell(head, figure(summary, f"outages.{name}.{of}", words.duration))
              for head, of in zip(heads, ("median", "min", "max"), strict=False)),
            Cell(heads[3], figure(summary, f"outages.{name}.n")),
        ])
        for title, note, name in named
    ]  # fmt: skip
    return _table(heads, rows)


def move_tables(summary: ControlSummary) -> list[Table]:
    """Return the migrations in figures, and who owns what at the end."""
    m = summary.moves
    named: list[tuple[str, str, Say]] = [("Started", "started", words.count)]
    named += [(status, f"by_status.{status}", words.count) for status in sorted(m.by_status)]
    named += [("Asked again", "starts_repeated", words.count), ("Took, median", "seconds.p50", words.duration),
              ("longest", "seconds.max_measured", words.duration), ("Moved", "bytes_moved", words.size)]  # fmt: skip
    owners: list[tuple[str, str, Say]] = [("Known", "groups", words.count)]
    owners += [(f"Owned by {node}", f"owned.{node}", words.count) for node in m.owned]
    owners += [("Evicted", "evicted", words.count), ("Without an owner", "ownerless", words.count)]
    return [
        _table([head for head, _, _ in columns], [(title, note, _cells(summary, "moves", columns))])
        for title, note, columns in (
            ("Migrations", "asked again: attempts to start one that had been tried; took: until SUCCEEDED", named),
            ("Groups at the end", "without an owner: lost, or still on their way", owners),
        )
    ]


def storm_table(summary: ControlSummary) -> Table:
    """Return the storms side by side."""
    kinds = [kind for kind in (WITH, WITHOUT) if kind in summary.storms]
    heads = [{WITH: "With the budget", WITHOUT: "Without"}[kind] for kind in kinds]
    named: list[tuple[str, str, str, Say]] = [
        ("Calls", "an open loop: they do not ask how the server is", "calls", words.count),
        ("Attempts", "that reached the server", "attempts", words.count),
        ("Attempts a call", "of the whole storm", "amplification", _two),
        ("in the outage", "", "outage_amplification", _two),
        ("Succeeded", "", "succeeded", words.count), ("Unknown", "no answer in time", "unknown", words.count),
        ("Good after the outage", "share of calls that succeeded, while the load was high", "goodput_after", _percent),
        ("Goodput back", "end of the outage → 4 of 5 calls succeed, half a second long", "recovered_s", words.duration),
    ]  # fmt: skip
    rows = []
    for title, note, name, say in named:
        cells = []
        for kind, head in zip(kinds, heads, strict=True):
            shown = figure(summary, f"storms.{kind}.{name}", say)
            if name == "recovered_s" and not shown.key:
                shown = Figure("not in its time")
            cells.append(Cell(head, shown, [], "lease" if kind == WITH else "long"))
        rows.append((title, note, cells))
    return _table(heads, rows)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def metric_table(summary: ControlSummary, nodes: list[str]) -> Table:
    """Return every metric that the document names, of the clients and of each node."""
    heads = [name for name in ["clients", *nodes] if any(name in gauge.of for gauge in summary.metrics.values())]
    rows = [
        (
            name,
            "",
            [*(_metric(summary, name, gauge, head) for head in heads), Cell("Figure", Figure(_reading(gauge, name)))],
        )
        for name, gauge in summary.metrics.items()
    ]
    return _table([*heads, "Figure"], rows)


def _reading(gauge: Gauge, name: str) -> str:
    if not gauge.samples:
        return "never scraped"
    if name == "circuit_breaker_state":
        return "furthest: 0 CLOSED, 1 HALF_OPEN, 2 OPEN"
    return "gained over the run" if gauge.reading is Reading.GAINED else "largest sample"


def _metric(summary: ControlSummary, name: str, gauge: Gauge, head: str) -> Cell:
    if head not in gauge.of:
        return _none(head)
    say: Say = words.milliseconds if any(part in name for part in MILLISECONDS) else _plain
    return Cell(head, figure(summary, f"metrics.{name}.of.{head}", say))


def _plain(value: float) -> str:
    return words.count(value) if value == round(value) else words.significant(value)
