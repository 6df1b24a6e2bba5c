"""Why our figures differ from the published ones: sentences computed from the run folders."""

from __future__ import annotations

from typing import Final

import numpy as np

from harness.run_folder import RunFolder
from reports import words
from reports.figures.phases import real_seconds
from reports.summary import Summary
from reports.tables import is_emulated

SHORT_OUTAGE: Final = 10
"""An outage of fewer median TTFTs than this is over before the survivor has a queue to speak of."""


def differences(summary: Summary, cold: RunFolder, shadow: RunFolder) -> list[tuple[str, str]]:
    """Return (what, why) for each difference that a reader should know before comparing."""
    found = [_what_recovers(summary), _load(summary, cold), _machine(summary, shadow), _kills(summary)]
    if summary.time_scale != 1:
        found.insert(1, _time_scale(summary, cold, shadow))
    found.append(_failed(summary))
    ttft = _ttft(summary)
    return [*found, ttft] if ttft else found


def _what_recovers(summary: Summary) -> tuple[str, str]:
    ours, theirs = summary.ratio_recovery, summary.published.ratio_recovery
    if is_emulated(summary.emulated, "cold start"):
        start = (
            f"The profile {summary.profile} emulates the published cold start, detection and promotion, so both "
            "medians are meant to come out near the published ones; what is measured is that the real machinery around "
            "them (processes, lock, memory service, router, canary) works and what it adds."
        )
    else:
        start = (
            "Theirs loads a large model onto eight GPUs and compiles for it. Ours spawns a process and reads, maps and "
            "touches host memory, all of it real work, of another size. So only the ratio compares."
        )
    if ours is None:
        return "What recovers", start
    side = "above" if ours > theirs else "below"
    told = words.given(words.ratio(theirs))
    return "What recovers", f"{start} Our ratio is {words.ratio(ours)}, {side} the published {told}."


def _time_scale(summary: Summary, cold: RunFolder, shadow: RunFolder) -> tuple[str, str]:
    scale = summary.time_scale
    real = [(words.arm_title(r.manifest.arm).lower(), real_seconds(r).median) for r in (cold, shadow)]
    parts = [f"{words.duration(s)} of a {name} recovery, shown as {words.duration(s * scale)}" for name, s in real if s]
    text = (
        f"Every emulated duration was divided by {scale:g}, and requests arrived {scale:g} times faster. The limits "
        f"were scaled alike. “Full scale” multiplies a measured duration by {scale:g} and divides a rate by it. Real "
        "work does not shrink with the scale, so it is overstated there: "
    )
    return "Time scale", text + ("; ".join(parts) if parts else "no recovery was measured") + "."


def _load(summary: Summary, run: RunFolder) -> tuple[str, str]:
    published, rows = summary.published, run.requests
    theirs = f"{published.requests_per_s:g} requests/s, {published.input_tokens:,} tokens in, "
    theirs += f"{published.output_tokens:,} out, round robin over two workers"
    if len(rows) < 2:
        return "Load", f"Published: {theirs}. This run sent too few requests to tell its rate."
    span_s = float(rows.intended_ns.max() - rows.intended_ns.min()) / 1e9
    rate = (len(rows) - 1) / span_s if span_s else 0.0
    scaled = "" if summary.time_scale == 1 else f" ({words.significant(rate / summary.time_scale)} at full scale)"
    text = (
        f"Here {words.significant(rate)} requests/s{scaled}, median {np.median(rows.input_tokens):,.0f} tokens in and "
        f"at most {rows.max_tokens.max():,} out; published: {theirs}. Damage after a fault is queueing, so it depends "
        "on how busy the survivor is."
    )
    return "Load", text


def _machine(summary: Summary, run: RunFolder) -> tuple[str, str]:
    cores = run.manifest.machine.get("cores")
    where = "one machine" if cores is None else f"one machine of {cores} cores"
    text = f"Workers, router, load client and harness share {where}; published: two nodes of eight B200 GPUs."
    if is_emulated(summary.emulated, "compute time"):
        text += (
            " No accelerator computes here: the profile says how long a step takes, and TTFT and decode rate follow."
        )
    return "Machine", text


def _kills(summary: Summary) -> tuple[str, str]:
    cold, shadow = summary.cold, summary.shadow
    text = (
        f"Ours are medians over {words.plural(cold.recovery_s.n, 'cold start')} and "
        f"{words.plural(shadow.recovery_s.n, 'promotion')}, all requests after the first fault taken together; the "
        "published run has one kill an arm and watches 600 s after it."
    )
    return "Repeats", text


def _failed(summary: Summary) -> tuple[str, str]:
    cold, shadow = summary.cold.requests_failed, summary.shadow.requests_failed
    text = (
        f"{cold} without and {shadow} with a shadow: those running on the engine when it died, as many as the "
        "load happened to have there. A shadow saves none of them; it shortens the time in which the next ones have "
        "one worker less. The published run does not say how many it lost."
    )
    return "Requests failed", text


def _ttft(summary: Summary) -> tuple[str, str] | None:
    cold = summary.cold.ttft_ms.after_fault
    if cold.p50 is None or cold.p90 is None:
        return None
    outage_s = summary.cold.recovery_s.median
    baseline = summary.cold.ttft_ms.baseline.p50
    if outage_s is not None and baseline is not None and outage_s * 1e3 < SHORT_OUTAGE * baseline:
        return "TTFT", (
            f"Our cold start keeps a worker away for {words.duration(outage_s)}, not for minutes: "
            f"{words.significant(outage_s * 1e3 / baseline)} times a median TTFT, in which no queue builds up at the "
            "survivor. So TTFT and decode rate hardly differ between the arms. "
            "With `--profile glm-5.2-b200 --time-scale 20` the outage "
            "is as long as the published one, and they do."
        )
    text = (
        "After a cold-started fault TTFT has two humps: who meets the outage waits, who does not, does not. Its median "
        f"({words.milliseconds(cold.p50)} here, p90 {words.milliseconds(cold.p90)}) jumps between them with the share "
        "of time spent in outage. Compare the counts over the limits first."
    )
    return "TTFT", text
