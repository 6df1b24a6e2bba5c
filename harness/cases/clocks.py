"""Chapter clocks: the decode side keeps a turn's blocks for the next one, and tells until when by its own clock."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from harness.cases.case import Case, Twin
from harness.cases.client import Params, Reply
from harness.cases.metrics import EXPIRED, LATE, USAGE
from harness.cases.observations import REQUIRED_FIELDS, STEP_S, CaseRun, told
from harness.cases.sabotage import other_terms
from harness.cases.stage import Stage
from harness.cases.steps import Call
from harness.cases.terms import Need, PairTerms
from harness.verdicts import CheckResult
from harness.words import counted

TTL_S: Final = 10
SKEW_S: Final = 5_000.0
ANSWER_TOKENS: Final = 400
"""Longer than some blocks: only the decode side has their KV, so that the next turn's prefill must read them."""
MORE_TOKENS: Final = 100
DECLINED: Final = ("pdproof:turns_expired_total", EXPIRED)
"""Turns that came too late, as the reading prefill side counts them."""
RECOMPUTED: Final = "recomputed"
"""The check that makes a case one about turns that come too late."""
READ: Final = ("pdproof:loads_done_total", "vllm:nixl_bytes_transferred_count")
"""Reads of KV that were done, on the reading side."""


async def _two_turns(stage: Stage) -> None:
    """One conversation goes on while its blocks live, another one after they have gone."""
    first = await _turn_one(stage, "live")
    await stage.look("before-live", stage.p)
    await _turn_two(stage, "live", first.hand_off, first)
    await stage.look("after-live", stage.p)
    second = await _turn_one(stage, "late")
    stage.mark("turn-ended")
    await stage.look("kept", stage.d)
    await stage.pass_time(stage.terms.ttl_s + STEP_S)
    await stage.until_free("ttl-over", stage.d, STEP_S)
    await stage.look("before-late", stage.p)
    await stage.look("before-late", stage.d)
    await _turn_two(stage, "late", second.hand_off, second)
    await stage.look("after-late", stage.p)
    await stage.look("after-late", stage.d)


async def _turn_one(stage: Stage, label: str) -> Reply:
    leg = await stage.prefilled_well(f"{label}-1")
    return await stage.decoded(f"{label}-1", leg, tokens=ANSWER_TOKENS, stream=False)


async def _turn_two(stage: Stage, label: str, hand_off: Params, before: Reply) -> None:
    turn = stage.meddler.turn(hand_off) if stage.meddler.turn is not None else hand_off
    leg = await stage.prefilled(f"{label}-2", stage.next_turn(before, MORE_TOKENS), turn=turn)
    if leg.ok and leg.hand_off:
        await stage.decoded(f"{label}-2", leg)


def _turn_is_handed_over(seen: CaseRun) -> CheckResult:
    """Fail if the end of a turn keeps no blocks, hands nothing over, or keeps them for longer than agreed."""
    problems = []
    for label in ("live-1", "late-1"):
        call = seen.call(label)
        lacking = [name for name in REQUIRED_FIELDS[1:] if (call.returned or {}).get(name) in (None, [], "")]
        lacking += [] if (call.returned or {}).get("remote_blocks_expiry_time") else ["remote_blocks_expiry_time"]
        problems += [f"{seen.ended(call)}: the hand-off lacks {', '.join(lacking)}"] if lacking else []
    problems += [] if seen.holds("kept", seen.d) else ["the decode side keeps nothing"]
    freed = seen.freed_ns("ttl-over", seen.d)
    problems += [] if freed else ["the blocks are still held when their time is over"]
    took = (freed - seen.moment("turn-ended")) / 1e9 if freed else float("nan")
    return told(
        "kept",
        "A turn's blocks live for their time, and their expiry is handed over",
        ["KVC-CLK-001"],
        problems,
        f"{seen.usage('kept', seen.d):.2%} of the blocks in use after the turn, {seen.usage('baseline', seen.d):.2%} "
        f"before; free when looked at {took:.1f} s later, the time to live being {seen.terms.ttl_s} s",
    )


def _live_is_used(seen: CaseRun) -> CheckResult:
    """Fail if a turn that comes in time is declined or computed anew."""
    return _used(
        seen, "live", ["KVC-CLK-002", "KVC-CLK-005"], "A turn that comes in time is read, whatever the clocks show"
    )


def _used(seen: CaseRun, label: str, rules: list[str], title: str) -> CheckResult:
    declined, read = _grown(seen, label, seen.p, *DECLINED), _grown(seen, label, seen.p, *READ)
    calls = _second_turn(seen, label)
    problems = [seen.ended(c) for c in calls if not seen.right(c)]
    problems += [] if len(calls) == 2 else ["the turn did not come to its end"]
    problems += [f"{counted(declined, 'turn was', 'turns were')} declined as expired"] if declined else []
    problems += ["no KV was read"] if read == 0 else []
    unknown = "there are no counters of reads and of turns declined" if None in (declined, read) else ""
    return told(
        "in-time",
        title,
        rules,
        problems,
        f"{_shown(declined)} declined, {counted(read, 'read')}; " + "; ".join(map(seen.ended, calls)),
        unknown=unknown,
    )


def _second_turn(seen: CaseRun, label: str) -> list[Call]:
    return [call for leg in ("prefill", "decode") for call in seen.calls(f"{label}-2", leg)]


def _grown(seen: CaseRun, label: str, worker: str, *counters: str) -> float | None:
    return seen.grown(worker, *counters, since=f"before-{label}", until=f"after-{label}")


def _shown(number: float | None) -> str:
    return "an unknown number" if number is None else f"{number:g}"


class TurnSeen(NamedTuple):
    """The turn that came too late, as a case's run folder shows it. None: nothing shows it."""

    calls: list[Call]
    """Its legs; the second is missing where the first gave nothing to go on with."""
    declined: float | None
    """By the reader, which is the prefill side."""
    late: float | None
    """Reads of what it no longer kept, as the holder counts them."""
    reads: float | None
    usage_before: float | None
    """The share of the prefill side's blocks in use before it came; the largest that was seen since; the last."""
    usage_most: float | None
    usage_end: float | None


def late_turn(seen: CaseRun) -> TurnSeen:
    """Return what is to be seen of the turn that came too late. Raises LookupError where nobody looked before it."""
    before = seen.look("before-late", seen.p)
    looks = [look for name in ("after-late", "end") for look in seen.looks(name, seen.p)]
    used = [look.values[USAGE] for look in (before, *looks) if USAGE in look.values]
    used += [share for t_ns, share in seen.sampled(seen.p, USAGE) if t_ns >= before.t_ns]
    end = seen.looks("end", seen.p)
    looked = bool(seen.looks("after-late", seen.p))
    return TurnSeen(
        calls=_second_turn(seen, "late"),
        declined=_grown(seen, "late", seen.p, *DECLINED) if looked else None,
        late=_grown(seen, "late", seen.d, *LATE) if seen.looks("after-late", seen.d) else None,
        reads=_grown(seen, "late", seen.p, *READ) if looked else None,
        usage_before=before.values.get(USAGE), usage_most=max(used, default=None),
        usage_end=end[-1].values.get(USAGE) if end else None,
    )  # fmt: skip


def late_is_recomputed(seen: CaseRun) -> CheckResult:
    """Fail if a turn that comes too late is anything but a slower answer."""
    calls = _second_turn(seen, "late")
    problems = [seen.ended(c) for c in calls if not seen.right(c)]
    problems += [] if len(calls) == 2 else ["the turn did not come to its end"]
    return told(
        RECOMPUTED,
        "A turn that comes too late is computed anew: slower, no error",
        ["KVC-CLK-004", "L3"],
        problems,
        "; ".join(map(seen.ended, calls)),
    )


def _late_is_declined(seen: CaseRun) -> CheckResult:
    """Fail if a turn's blocks are asked for or read after their time."""
    declined, late = _grown(seen, "late", seen.p, *DECLINED), _grown(seen, "late", seen.d, *LATE)
    problems = ["the reader did not notice that it came too late"] if declined == 0 else []
    problems += [f"the holder counts {counted(late, 'read')} of what it no longer kept"] if late else []
    unknown = "there are no such counters" if None in (declined, late) else ""
    return told(
        "declined", "A turn's blocks are not read after their time, whatever the clocks show",
        ["KVC-CLK-002", "KVC-CLK-005", "S2"], problems, f"{_shown(declined)} declined by the reader, "
        f"{counted(late, 'late read')} seen by the holder", unknown=unknown,
    )  # fmt: skip


def _expiry_moved(seconds: float, name: str, title: str, fails: str) -> Twin:
    """The hand-off's expiry is read by a clock that nobody corrected."""

    async def sabotage(stage: Stage) -> None:
        def move(params: Params) -> Params:
            moment = params.get("remote_blocks_expiry_time")
            return params | {"remote_blocks_expiry_time": max(1.0, moment + seconds)} if moment else params

        stage.meddler.turn = move

    return Twin(name=name, title=title, fails=fails, sabotage=sabotage)


def _case(way: str, skew_s: float, policy: str) -> Case:
    terms = PairTerms(bidirectional=True, ttl_s=TTL_S, decode_clock_offset_s=skew_s, load_failure_policy=policy)
    fails = "in-time" if skew_s < 0 else "declined"
    return Case(
        name=f"two_turn_{way}_{policy}",
        title=f"Two turns; the decode side's clock is {abs(skew_s):,.0f} s {way}; the policy is {policy!r}",
        rules=("KVC-CLK-001", "KVC-CLK-002", "KVC-CLK-004", "KVC-CLK-005", "L3", "S2"), drive=_two_turns,
        terms=terms, needs=frozenset({Need.METRICS, Need.CLOCK}), limit_s=150.0,
        checks=(_turn_is_handed_over, _live_is_used, late_is_recomputed, _late_is_declined),
        twins=(
            _expiry_moved(-2 * SKEW_S - 1e4, "expiry_early", "expiries are read as long gone", "in-time"),
            _expiry_moved(2 * SKEW_S + 1e4, "expiry_late", "expiries are read as far ahead", "declined"),
            other_terms("uncorrected", "clocks are compared as they are", fails,
                        **msgspec.structs.asdict(msgspec.structs.replace(terms, clock_correction=False))),
        ),
    )  # fmt: skip


CASES: Final = tuple(
    _case(way, skew_s, policy)
    for way, skew_s in (("ahead", SKEW_S), ("behind", -SKEW_S))
    for policy in ("recompute", "fail")
)
