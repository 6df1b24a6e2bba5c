"""The one sentence at the head of the page, and what the baselines are there for."""

from __future__ import annotations

from harness.verdicts import Verdict
from reports import words
from reports.kv.arms import KvArm
from reports.kv.summary import KvSummary, held_s


def lead(summary: KvSummary) -> str:
    """Return what the runs came to. Durations are at full scale."""
    arms = list(summary.runs.values())
    told = _crash(summary, arms) or _turns(arms) or _queue(arms) or _plain(arms)
    if summary.verdict in (Verdict.INCONCLUSIVE, Verdict.ERROR):
        told = f"Seen, but not proved: {told[0].lower()}{told[1:]}"
    return f"{told}; {answers(arms)}."


def answers(arms: list[KvArm]) -> str:
    """Return how right the answers of all runs were."""
    wrong, unchecked = sum(arm.content_wrong for arm in arms), sum(arm.content_unchecked for arm in arms)
    checked = sum(arm.requests_ok for arm in arms) - unchecked
    if wrong:
        told = f"{words.plural(wrong, 'answer')} {'was' if wrong == 1 else 'were'} wrong"
    elif checked <= 0:
        return "no answer could be checked"
    else:
        told = "no answer was wrong" + (" anywhere" if len(arms) > 1 else "")
    return told + (f", {unchecked:,} could not be checked" if unchecked else "")


def _crash(summary: KvSummary, arms: list[KvArm]) -> str:
    first = arms[0]
    ours, left = held_s(first), first.crash
    if left is None or ours is None:
        return ""
    crashes = "D's crash" if left.crashes == 1 else f"{left.crashes} crashes of D"
    blocks = words.plural(left.blocks, "block")
    verb = "still held" if left.standing else "freed its"
    after = f"after {words.duration(ours)}" if left.standing else f"in {words.duration(ours)}"
    told = f"After {crashes} {_who(first)} {verb} {blocks} {after}"
    other = summary.runs.get(summary.ratio_of)
    if other is not None and summary.ratio_reclaim is not None:
        told += f"; {_theirs(other, summary.ratio_reclaim)}"
    early = [arm for arm in arms[1:] if arm.leases.freed_early]
    return "; ".join([told, *(f"{_timeout(arm)} {_freed(arm)}" for arm in early)])


def _theirs(other: KvArm, ratio: float) -> str:
    standing = other.crash is not None and other.crash.standing > 0
    least = "more than " if standing else ""
    times = f"{least}{_times(ratio)} longer" if ratio >= 1 else f"{least}{ratio:.2f} times as long"
    held = words.duration(held_s(other))
    blocks = f"its {words.plural(other.crash.blocks, 'block')}" if other.crash else "them"
    told = f"still held {blocks} after {held}" if standing else f"held {blocks} for {held}"
    return f"{_timeout(other)} {told} ({times})"


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def _who(arm: KvArm) -> str:
    return _timeout(arm) if arm.extension_s is None else "the lease design"


def _timeout(arm: KvArm) -> str:
    return f"one timeout of {words.given(words.duration(arm.timeout_s))}"


def _turns(arms: list[KvArm]) -> str:
    first = arms[0]
    if first.turns is None or not first.turns.judged:
        return ""
    t = first.turns
    offsets = [clock.set_s for clock in first.clocks if abs(clock.set_s) >= 1]
    far = max((abs(s) for s in offsets), default=0.0)
    clocks = f", with clocks {far:,.0f} s apart" if far else ""
    wrong = "none too late and none too early" if not t.too_late + t.too_early else _misjudged(first)
    told = (
        f"Of {words.plural(t.judged, 'later turn')}{clocks}, {t.loaded:,} read their KV from D and {t.declined:,} were "
    )
    told += f"declined in time, {wrong}"
    others = [f"{_turns_of(arm)} {_misjudged(arm)}" for arm in arms[1:] if arm.turns and arm.turns.judged]
    return "; ".join([told, *others])


def _turns_of(arm: KvArm) -> str:
    return f"under {_who(arm)}" if arm.corrected else "without correction"


def _misjudged(arm: KvArm) -> str:
    late, early = (arm.turns.too_late, arm.turns.too_early) if arm.turns else (0, 0)
    return f"{late:,} came too late and {early:,} were declined too early"


def _queue(arms: list[KvArm]) -> str:
    first = arms[0]
    if not first.leases.granted or (not first.waiting_max and len(arms) < 2):
        return ""
    waited = f"with up to {first.waiting_max:,.0f} requests waiting on D, " if first.waiting_max else ""
    told = f"{waited}{_who(first)} {_freed(first)}"
    others = [f"{_timeout(arm)} {_freed(arm)}{_again(arm)}" for arm in arms[1:] if arm.leases.freed_early]
    return "; ".join([told[0].upper() + told[1:], *others])


def _freed(arm: KvArm) -> str:
    if not arm.leases.freed_early:
        return f"freed none of {words.plural(arm.leases.granted, 'lease')} too early"
    return f"freed {words.share(arm.leases.freed_early, arm.leases.granted)} leases while their readers still lived"


def _again(arm: KvArm) -> str:
    return f", and {words.plural(arm.recomputed_tokens, 'token')} were computed again" if arm.recomputed_tokens else ""


def _plain(arms: list[KvArm]) -> str:
    first = arms[0]
    return (
        f"{first.requests_ok:,} of {words.plural(first.requests, 'request')} answered, {first.loads.done:,} loads "
        f"of KV done and {first.loads.failed:,} failed"
    )
