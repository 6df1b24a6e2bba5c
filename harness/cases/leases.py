"""Chapter leases: how long the prefill side keeps blocks for a reader that is slow, silent or dead."""

from __future__ import annotations

import asyncio
from typing import Final

from faults.nixl.orders import Action, Kind
from harness.cases.case import Case, Hindered
from harness.cases.client import Reply
from harness.cases.metrics import EXPIRED, LATE, USAGE
from harness.cases.observations import KV_LINE, STEP_S, CaseRun, told
from harness.cases.sabotage import WRONG_TOKEN, heartbeats_end, long_lease, no_heartbeats, single_timeout
from harness.cases.stage import Stage
from harness.cases.steps import Call
from harness.cases.terms import Need, PairTerms, Pool, pool_tokens
from harness.verdicts import CheckResult
from harness.words import counted

QUEUED: Final = 4
FILLER_TOKENS_MAX: Final = 30_000
SETTLE_S: Final = 0.5
"""For a request to stand in a server's queue."""
TIGHT: Final = PairTerms(pool=Pool.TIGHT)
_NOTIFIED: Final = frozenset({Need.METRICS, Need.NOTIFICATIONS})
_PROCESSES: Final = frozenset({Need.METRICS, Need.PROCESSES, Need.RESTART})


async def queued(stage: Stage, count: int) -> list[asyncio.Task[Reply]]:
    """Prefill some requests and have them wait at the decode side, whose slots are taken."""
    tasks = []
    for number in range(count):
        leg = await stage.prefilled_well(f"queued-{number}")
        tasks.append(stage.start(stage.decoded(f"queued-{number}", leg, limit_s=300)))
        await asyncio.sleep(0)
    await stage.pass_time(SETTLE_S)
    await stage.held("held", stage.p)
    return tasks


async def fill(stage: Stage, worker: str) -> None:
    """Have a server compute prompts that nobody asked for before, until each of its free blocks held some of them."""
    pool = pool_tokens(stage.terms.pool, stage.size)
    tokens = max(stage.size.input_tokens, min(FILLER_TOKENS_MAX, pool // 4))
    for number in range(pool // tokens + 1):
        await stage.plain(f"filler-{number}", worker, stage.prompt(tokens), 1, stream=False)


def _queued_calls(seen: CaseRun) -> list[Call]:
    calls = seen.calls("queued", "decode")
    if not calls:
        raise LookupError("no request was ever queued")
    return calls


def waited(seen: CaseRun) -> str:
    """Return why the queued requests cannot have waited as they should, "" if they did."""
    freed = seen.moment("slots-freed")
    early = [c for c in _queued_calls(seen) if c.ok and c.first_ns and c.first_ns < freed]
    text = counted(len(early), "request was", "requests were")
    return f"{text} served while the slots were taken" if early else ""


# -- abandoned ------------------------------------------------------------------------------------------------------


async def _abandoned(stage: Stage) -> None:
    """Nobody comes for a hand-off, and the engine has nothing else to do."""
    await stage.prefilled_well("abandoned")
    await stage.held("held", stage.p)
    await stage.pass_time(stage.terms.lease_s - 2.5)
    await stage.look("still-held", stage.p)
    stage.mark("idle")
    await stage.pass_time(2.5 + 2 * STEP_S)
    stage.mark("poke")
    await stage.until_free("freed", stage.p, 1.0)


def _kept_for_the_lease(seen: CaseRun) -> CheckResult:
    """Fail if the blocks were given away before the lease ended."""
    left = (
        seen.call("abandoned", "prefill").end_ns + seen.terms.lease_s * 1e9 - seen.look("still-held", seen.p).t_ns
    ) / 1e9
    kept = seen.holds("still-held", seen.p)
    return told("kept", "A lease lasts as long as was agreed", ["KVC-LEASE-001"],
                [] if kept or left < 0 else ["the blocks were already free"],
                f"{left:.1f} s before the lease's end {seen.usage('still-held', seen.p):.2%} of the blocks were in use",
                unknown="the look came too late" if left < 0 else "")  # fmt: skip


def _freed_at_the_deadline(seen: CaseRun) -> CheckResult:
    """Fail if the blocks are not back in the pool when the lease has ended."""
    freed = seen.freed_ns("freed", seen.p)
    since = seen.call("abandoned", "prefill").end_ns
    if freed is None:
        last = (seen.look("freed", seen.p).t_ns - since) / 1e9
        problem = f"{last:.1f} s after the prefill, with a lease of {seen.terms.lease_s} s, the blocks are still held"
        return told(
            "freed", "Without a heartbeat the lease ends at its deadline", ["KVC-LEASE-005", "L1"], [problem], ""
        )
    return told("freed", "Without a heartbeat the lease ends at its deadline", ["KVC-LEASE-005", "L1"], [],
                f"the blocks were free when looked at, {(freed - since) / 1e9:.1f} s after the prefill")  # fmt: skip


def idle_expiry(seen: CaseRun) -> CheckResult:
    """Fail if an engine without other work let its lease stand until somebody woke it."""
    title, rules = "An idle engine lets go by itself", ["KVC-LEASE-007", "L5"]
    idle, poke = seen.moment("idle"), seen.moment("poke")
    before = seen.lines(seen.p, KV_LINE, idle, poke)
    after = seen.lines(seen.p, KV_LINE, poke)
    limit = seen.usage("baseline", seen.p) + seen.spare
    free = [t for t, v in seen.sampled(seen.p, USAGE) if idle <= t <= poke and v <= limit]
    if before or free:
        t_ns = min([line.t_ns for line in before] + free)
        how = f'its log says "{before[0].text[-120:]}"' if before else "its gauge of blocks fell"
        return told("idle", title, rules, [], f"{(poke - t_ns) / 1e9:.1f} s before anybody asked it again, {how}")
    problems = ["it let go only when it was asked for something"] if after else []
    return told("idle", title, rules, problems, "", unknown="" if after else "nothing was said or shown of it")


def expired_once(seen: CaseRun) -> CheckResult:
    """Fail if one expiry is not counted as one."""
    grown = seen.grown(seen.p, EXPIRED)
    text = f"{counted(grown, 'expiry', 'expiries')} ({EXPIRED})"
    problems = [] if grown in (1, None) else [f"{text}, where one lease ran out"]
    return told("counted", "An expiry is counted once", ["KVC-LEASE-005", "O1"], problems, text,
                unknown="there is no such counter" if grown is None else "")  # fmt: skip


ABANDONED: Final = Case(
    name="abandoned", title="Nobody comes for a hand-off, on an engine with no other work",
    rules=("KVC-LEASE-001", "KVC-LEASE-005", "KVC-LEASE-007", "L1", "L5", "O1"), drive=_abandoned,
    checks=(_kept_for_the_lease, _freed_at_the_deadline, idle_expiry, expired_once), twins=(long_lease("freed"),),
)  # fmt: skip


# -- surge ----------------------------------------------------------------------------------------------------------


async def _surge(stage: Stage) -> None:
    """Requests wait in the decode side's queue for several lease lengths."""
    async with stage.slots_taken():
        tasks = await queued(stage, QUEUED)
        await _wait_looking(stage, stage.size.queue_leases * stage.terms.lease_s)
    await asyncio.gather(*tasks)
    await stage.until_free("released", stage.p, stage.terms.lease_s)


async def _wait_looking(stage: Stage, seconds: float) -> None:
    """Let time pass, and look at the prefill side three times in a lease."""
    step_s = stage.terms.lease_s / 3
    for _ in range(max(1, round(seconds / step_s))):
        await stage.pass_time(step_s)
        await stage.look("waiting", stage.p)


def leases_held_while_queued(seen: CaseRun) -> CheckResult:
    """Fail if a lease ran out while its reader was alive and queued."""
    grown = seen.grown(seen.p, EXPIRED) or 0
    looks = seen.looks("waiting", seen.p)
    base, held = seen.usage("baseline", seen.p), seen.usage("held", seen.p)
    least = min((k.values[USAGE] for k in looks), default=0.0)
    problems = [counted(grown, "lease ran out", "leases ran out")] if grown else []
    problems += ["some blocks were already free"] if least < base + 0.8 * (held - base) else []
    span = (looks[-1].t_ns - looks[0].t_ns) / 1e9 if looks else 0.0
    return told(
        "leases-kept",
        "A reader that is alive and queued keeps its lease",
        ["KVC-LEASE-010", "L2"],
        problems,
        f"{counted(len(_queued_calls(seen)), 'request')} waited for {span / seen.terms.lease_s:.1f} lease lengths, "
        f"with at least {least:.2%} of the blocks in use ({held:.2%} at first)",
        unknown=waited(seen),
        leases=span / seen.terms.lease_s,
    )


def queued_are_answered(seen: CaseRun) -> CheckResult:
    """Fail if a request that only waited is not answered rightly."""
    calls = _queued_calls(seen)
    bad = [c for c in calls if not seen.right(c)]
    return told(
        "answered",
        "What waited is answered rightly",
        ["KVC-XFER-001", "L2", "L3"],
        [f"of {len(calls)}, {counted(len(bad), 'was', 'were')} not: {seen.ended(bad[0])}"] if bad else [],
        counted(len(calls) - len(bad), "whole answer"),
    )


SURGE: Final = Case(
    name="surge", title="Requests wait in the decode side's queue for several lease lengths",
    rules=("KVC-LEASE-010", "KVC-LEASE-013", "KVC-XFER-001", "L2", "L3"), drive=_surge,
    checks=(leases_held_while_queued, queued_are_answered),
    twins=(no_heartbeats("leases-kept"), single_timeout("leases-kept", 6)),
)  # fmt: skip


# -- lost heartbeats ------------------------------------------------------------------------------------------------


async def _some_lost(stage: Stage) -> None:
    """Two heartbeats in a row are lost, twice, while requests are queued."""
    async with stage.slots_taken():
        tasks = await queued(stage, 2)
        for _ in range(2):
            fault = await stage.order(stage.p, Action.DROP, kind=Kind.HEARTBEAT, count=2)
            await stage.proved(fault, stage.p)
            await stage.lifted(fault)
            await _wait_looking(stage, stage.terms.lease_s)
    await asyncio.gather(*tasks)


async def _one_silent(stage: Stage) -> None:
    """All heartbeats for one of two queued requests are lost; when its lease has ended, others get its blocks."""
    async with stage.slots_taken():
        first = await stage.prefilled_well("silent")
        fault = await stage.order(
            stage.p, Action.DROP, kind=Kind.HEARTBEAT, request=first.hand_off["remote_request_id"]
        )
        silent = stage.start(stage.decoded("silent", first, limit_s=300))
        tasks = await queued(stage, 1)
        await stage.proved(fault, stage.p)
        await stage.pass_time(2 * stage.terms.lease_s)
        await stage.look("later", stage.p)
        await fill(stage, stage.p)
    await asyncio.gather(silent, *tasks)
    await stage.lifted(fault)


async def _all_lost(stage: Stage) -> None:
    """No heartbeat comes through any more; when the leases have ended, others get their blocks."""
    fault = await stage.order(stage.p, Action.DROP, kind=Kind.HEARTBEAT)
    async with stage.slots_taken():
        tasks = await queued(stage, 2)
        await stage.proved(fault, stage.p)
        await stage.until_free("freed", stage.p, stage.terms.lease_s + 2 * STEP_S)
        await fill(stage, stage.p)
    await asyncio.gather(*tasks)
    await stage.lifted(fault)


def _only_one_expires(seen: CaseRun) -> CheckResult:
    """Fail if the silent lease stands on, or takes the other with it."""
    grown = seen.grown(seen.p, EXPIRED, until="later")
    other = seen.call("queued-0")
    problems = [] if grown in (1, None) else [f"{counted(grown, 'lease')} ran out, where one had no heartbeats"]
    problems += [] if seen.right(other) else [f"the one whose heartbeats came: {seen.ended(other)}"]
    return told("one-expires", "A lease that nobody renews ends, whatever others do", ["L1", "L6", "KVC-LEASE-005"],
                problems, f"{counted(grown, 'expiry', 'expiries')}; {seen.ended(other)}", unknown=waited(seen) or
                ("there is no counter of expiries" if grown is None else ""))  # fmt: skip


def silent_as_policy(seen: CaseRun) -> CheckResult:
    """Fail if a reader that came too late got anything but what the policy says."""
    calls = seen.calls("silent", "decode") or _queued_calls(seen)
    bad = [c for c in calls if not (seen.right(c) or seen.refused(c))]
    wrong_end = [c for c in calls if not seen.as_policy_says(c)]
    problems = [seen.ended(c) for c in bad]
    problems += [
        f"{seen.ended(c)}, where the policy is {seen.terms.load_failure_policy}" for c in wrong_end if c not in bad
    ]
    return told("late-reader", "Who comes too late notices, and the failure policy is applied", ["S2", "R2", "L3"],
                problems, "; ".join(map(seen.ended, calls)))  # fmt: skip


def _all_expire(seen: CaseRun) -> CheckResult:
    """Fail if leases without heartbeats stand past their deadline."""
    freed = seen.freed_ns("freed", seen.p)
    granted = max(c.end_ns for c in seen.calls("queued", "prefill"))
    if freed is None:
        problem = (
            f"{(seen.look('freed', seen.p).t_ns - granted) / 1e9:.1f} s after the last prefill they are still held"
        )
        return told("freed", "Without heartbeats leases end at their deadline", ["KVC-LEASE-005", "L1"], [problem], "")
    took = (freed - granted) / 1e9
    late = took > seen.terms.lease_s + STEP_S
    return told(
        "freed",
        "Without heartbeats leases end at their deadline",
        ["KVC-LEASE-005", "L1"],
        [f"not before {took:.1f} s"] if late else [],
        f"free {took:.1f} s after the last prefill, the lease being {seen.terms.lease_s} s",
        unknown=waited(seen),
    )


LOST_SOME: Final = Case(
    name="lost_heartbeats_some", title="Two heartbeats in a row are lost, and the next ones come",
    rules=("KVC-LEASE-010", "KVC-XFER-001", "L2", "L3"), drive=_some_lost, needs=_NOTIFIED,
    checks=(leases_held_while_queued, queued_are_answered), twins=(heartbeats_end("leases-kept", 2),),
)  # fmt: skip
LOST_ONE: Final = Case(
    name="lost_heartbeats_one", title="The heartbeats of one of two queued requests are lost",
    rules=("KVC-LEASE-005", "L1", "L6", "S2", "R2", "L3"), drive=_one_silent, needs=_NOTIFIED,
    checks=(_only_one_expires, silent_as_policy), twins=(heartbeats_end("one-expires", 1),),
)  # fmt: skip
LOST_ALL: Final = Case(
    name="lost_heartbeats_all", title="No heartbeat comes through",
    rules=("KVC-LEASE-005", "L1", "S2", "R2", "L3"), drive=_all_lost, needs=_NOTIFIED,
    checks=(_all_expire, silent_as_policy), twins=(long_lease("freed"),),
)  # fmt: skip


# -- router hold ----------------------------------------------------------------------------------------------------


async def _held_back(stage: Stage) -> None:
    """The router keeps a hand-off for longer than the lease, and the prefill side has nothing else to do."""
    leg = await stage.prefilled_well("held-back")
    await stage.held("held", stage.p)
    await stage.pass_time(stage.terms.lease_s + 2 * STEP_S)
    await stage.look("freed", stage.p, poke=False)  # even a poke's token would be written into the freed blocks
    await stage.decoded("held-back", leg)


async def _held_back_reused(stage: Stage) -> None:
    """The router keeps a hand-off for longer than the lease, and the prefill side serves others meanwhile."""
    leg = await stage.prefilled_well("held-back")
    await stage.held("held", stage.p)
    await stage.pass_time(stage.terms.lease_s + STEP_S)
    await stage.until_free("freed", stage.p, STEP_S)
    await fill(stage, stage.p)
    await stage.decoded("held-back", leg)


def _still_leased(seen: CaseRun) -> str:
    """Return why the hand-off may have come in time after all, "" if its lease was seen to have ended."""
    came = seen.call("held-back").sent_ns
    logged = seen.lines(seen.p, KV_LINE, until_ns=came)
    return "" if logged or seen.freed_ns("freed", seen.p) else "the lease was not seen to have ended before"


def _late_but_right(seen: CaseRun) -> CheckResult:
    """Fail for anything but a right answer or an error."""
    call = seen.call("held-back")
    good = seen.right(call) or seen.refused(call)
    return told(
        "outcome",
        "A hand-off that came after its lease gives an error or a right answer",
        ["KVC-LEASE-011", "S2"],
        [] if good else [seen.ended(call)],
        seen.ended(call),
        unknown=_still_leased(seen),
    )


def _late_is_visible(seen: CaseRun) -> CheckResult:
    """Fail if nothing counts that a lease ran out, and that somebody came for it afterwards."""
    expired, late = seen.grown(seen.p, EXPIRED), seen.grown(seen.p, *LATE)
    text = counted(expired, "expiry", "expiries")
    problems = [] if expired in (1, None) else [f"{text}, where one lease ran out"]
    problems += [] if late is None or late >= 1 else ["no read after expiry is counted"]
    unknown = "there are no such counters" if expired is None or late is None else ""
    return told(
        "visible",
        "An expiry, and a read that comes after it, are counted",
        ["KVC-OBS-001", "O1", "O2"],
        problems,
        f"{text}, {counted(late, 'late read')}",
        unknown=unknown,
    )


HOLD: Final = Case(
    name="router_hold_kept",
    title="The hand-off reaches the decode side only after the lease; the blocks stay as they were",
    rules=("KVC-LEASE-011", "KVC-OBS-001", "S2", "O1", "O2"),
    drive=_held_back,
    checks=(_late_but_right, _late_is_visible),
    twins=(WRONG_TOKEN,),
)
HOLD_REUSED: Final = Case(
    name="router_hold_reused",
    title="The hand-off reaches the decode side only after other prompts got its blocks",
    rules=("KVC-LEASE-011", "KVC-OBS-001", "S2", "O1", "O2"),
    drive=_held_back_reused,
    terms=TIGHT,
    checks=(_late_but_right, _late_is_visible),
    twins=(WRONG_TOKEN,),
)


# -- a busy holder, a stalled reader --------------------------------------------------------------------------------


async def _long_prefill(stage: Stage) -> None:
    """Long prefills keep the prefill side busy while a request is queued at the decode side."""
    async with stage.slots_taken():
        tasks = await queued(stage, 1)
        until = 2 * stage.terms.lease_s
        work = stage.start(_prefills(stage))
        await _wait_looking(stage, until)
        work.cancel()
    await asyncio.gather(*tasks)


async def _prefills(stage: Stage) -> None:
    number = 0
    while True:
        await stage.plain(f"long-{number}", stage.p, stage.prompt(24_000), 1, stream=False)
        number += 1


def _was_busy(seen: CaseRun) -> str:
    longs = [c for c in seen.calls("long") if c.ok]
    return "" if longs else "no long prefill came to its end"


def _busy_holder_keeps(seen: CaseRun) -> CheckResult:
    """Fail if a holder that is busy with long steps forgets heartbeats."""
    grown = seen.grown(seen.p, EXPIRED)
    longs = [c for c in seen.calls("long") if c.ok]
    longest = max((c.seconds for c in longs), default=0.0)
    return told("leases-kept", "Long prefills at the holder cost no lease", ["KVC-LEASE-010", "L2", "L6"],
                [counted(grown, "lease ran out", "leases ran out")] if grown else [],
                f"{counted(len(longs), 'prefill')} of 24,000 tokens, the longest {longest:.1f} s; "
                f"{counted(grown, 'lease')} ran out",
                unknown=_was_busy(seen) or waited(seen))  # fmt: skip


LONG_PREFILL: Final = Case(
    name="long_prefill", title="The prefill side is busy with long prompts while a reader waits",
    rules=("KVC-LEASE-010", "KVC-XFER-001", "L2", "L3", "L6"), drive=_long_prefill,
    checks=(_busy_holder_keeps, queued_are_answered), twins=(no_heartbeats("leases-kept"),),
)  # fmt: skip


async def _stalled(stage: Stage) -> None:
    """The decode side stands still for several lease lengths with requests in its queue, and goes on."""
    async with stage.slots_taken():
        tasks = await queued(stage, 1)
        await stage.stop(stage.d, "engine_core", "worker")
        await stage.pass_time(stage.size.queue_leases * stage.terms.lease_s)
        await stage.until_free("freed", stage.p, STEP_S)
        await fill(stage, stage.p)
        await stage.go_on()
        await stage.pass_time(SETTLE_S)
    await asyncio.gather(*tasks)


def _stalled_lease_ends(seen: CaseRun) -> CheckResult:
    """Fail if a silent reader's blocks are not given back."""
    freed = seen.freed_ns("freed", seen.p)
    stopped = seen.moment("stop")
    text = f"free {(freed - stopped) / 1e9:.1f} s after the decode side stood still" if freed else ""
    return told("freed", "The blocks of a reader that fell silent come back", ["L1", "KVC-LEASE-005"],
                [] if freed else ["the blocks were never seen free"], text)  # fmt: skip


D_STALLED: Final = Case(
    name="d_stalled", title="The decode side stands still for several leases, and then goes on with what it had queued",
    rules=("KVC-LEASE-005", "L1", "L3", "S2", "R2"), drive=_stalled, terms=TIGHT, needs=_PROCESSES,
    checks=(_stalled_lease_ends, silent_as_policy), twins=(WRONG_TOKEN, long_lease("freed", pool=Pool.TIGHT)),
)  # fmt: skip


# -- a dead reader --------------------------------------------------------------------------------------------------


async def _crash(stage: Stage) -> None:
    """The decode side is killed with requests in its queue, later than their first term."""
    async with stage.slots_taken(to_the_end=False):
        tasks = await queued(stage, QUEUED)
        await stage.pass_time(stage.terms.lease_s)
        await stage.look("waiting", stage.p)
        if any(task.done() for task in tasks):
            raise Hindered("a queued request ended before the crash")
        await stage.kill(stage.d, "engine_core", "worker")
        await stage.until_free("reclaimed", stage.p, stage.terms.extension_s + 4 * STEP_S)
        await asyncio.gather(*tasks)


def _reclaimed(seen: CaseRun) -> CheckResult:
    """Fail if a dead reader's blocks are held for longer than one extension and a step."""
    title, rules = (
        "A dead reader's blocks are free one extension after the crash",
        ["KVC-LEASE-009", "KVC-LEASE-013", "L1"],
    )
    killed, freed = seen.moment("kill"), seen.freed_ns("reclaimed", seen.p)
    bound = seen.terms.extension_s + STEP_S
    held = f"{seen.usage('waiting', seen.p):.2%} of the blocks were held"
    if not seen.holds("waiting", seen.p):
        return told("reclaimed", title, rules, [], held, unknown="nothing was held when the reader died")
    if freed is None:
        last = (seen.look("reclaimed", seen.p).t_ns - killed) / 1e9
        return told("reclaimed", title, rules, [f"{last:.1f} s after the crash they are still held"], held)
    took = (freed - killed) / 1e9
    return told("reclaimed", title, rules, [f"only {took:.2f} s after the crash"] if took > bound else [],
                f"{held}; seen free {took:.2f} s after the crash, one extension being {seen.terms.extension_s:g} s",
                seconds=took)  # fmt: skip


def _clients_are_told(seen: CaseRun) -> CheckResult:
    """Fail if a client of a dead server waits on."""
    killed = seen.moment("kill")
    waits = [(c.end_ns - killed) / 1e9 for c in _queued_calls(seen)]
    late = [w for w in waits if w > 10.0]
    return told("told", "Requests in flight at the crash end in an error, and do not hang", ["KVC-ROUT-002", "L3"],
                [f"{counted(len(late), 'client')} waited up to {max(late):.0f} s"] if late else [],
                f"{counted(len(waits), 'client was', 'clients were')} told within {max(waits):.1f} s")  # fmt: skip


D_CRASH: Final = Case(
    name="d_crash", title="The decode side dies with requests in its queue",
    rules=("KVC-LEASE-009", "KVC-LEASE-013", "KVC-ROUT-002", "L1", "L3"), drive=_crash, needs=_PROCESSES,
    checks=(_reclaimed, _clients_are_told), twins=(long_lease("reclaimed"), single_timeout("reclaimed", 480)),
    limit_s=150.0,
)  # fmt: skip

CASES: Final = (
    ABANDONED, SURGE, LOST_SOME, LOST_ONE, LOST_ALL, HOLD, HOLD_REUSED, LONG_PREFILL, D_STALLED, D_CRASH,
)  # fmt: skip
