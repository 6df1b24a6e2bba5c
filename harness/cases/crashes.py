"""Chapter crashes and handshakes: a server comes back as another, and whoever met the old one must notice."""

from __future__ import annotations

import asyncio
from typing import Final

from faults.nixl.orders import Action, What
from harness.cases.case import Case, Twin
from harness.cases.leases import queued, silent_as_policy
from harness.cases.metrics import EXPIRED, FAILED_NOTIFICATIONS, RUNNING
from harness.cases.observations import CaseRun, told
from harness.cases.release import LONG_ANSWER_TOKENS
from harness.cases.sabotage import NOTIFICATIONS, WRONG_TOKEN
from harness.cases.stage import Stage
from harness.cases.terms import Need
from harness.verdicts import CheckResult
from harness.words import counted

HEARTBEATS_FAILED: Final = ("pdproof:heartbeats_failed_total", FAILED_NOTIFICATIONS)
_PROCESSES: Final = frozenset({Need.METRICS, Need.PROCESSES, Need.RESTART})


# -- the writer comes back as another -------------------------------------------------------------------------------


async def _p_restart(stage: Stage) -> None:
    """The prefill side dies with a hand-off outstanding, and comes back at its old address."""
    async with stage.slots_taken(to_the_end=False):
        tasks = await queued(stage, 1)
        held = await stage.prefilled_well("old-life")
        await stage.kill(stage.p, "engine_core", "worker")
        await stage.pass_time(stage.terms.lease_s)
        await stage.look("orphaned", stage.d, poke=False)
        await stage.returned(stage.p)
    await asyncio.gather(*tasks)
    await stage.decoded("old-life", held)
    for number in range(2):
        await stage.request(f"new-life-{number}")


def _old_life_is_over(seen: CaseRun) -> CheckResult:
    """Fail if a hand-off of a dead server gets anything but what the policy says."""
    call = seen.call("old-life")
    good = seen.as_policy_says(call)
    return told(
        "old",
        "Nothing of a dead writer is read, and who asks for it gets what the policy says",
        ["KVC-HSK-003", "S5", "R2", "L3"],
        [] if good else [f"the policy is {seen.terms.load_failure_policy!r}"],
        seen.ended(call),
    )


def _new_life_serves(seen: CaseRun) -> CheckResult:
    """Fail if a restarted writer is taken for the old one, or not read from."""
    calls = seen.calls("new-life", "decode")
    bad = [c for c in calls if not seen.right(c)]
    old = {(c.returned or {}).get("remote_engine_id") for c in seen.calls("old-life", "prefill")}
    new = {(c.returned or {}).get("remote_engine_id") for c in seen.calls("new-life", "prefill")}
    problems = [seen.ended(c) for c in bad]
    problems += ["its hand-offs bear the name of its former life"] if old & new else []
    problems += [] if len(calls) == 2 else ["a request never got to the decode side"]
    return told(
        "new",
        "A writer that was restarted is recognised as new, and read from",
        ["KVC-HSK-003", "S5"],
        problems,
        f"{counted(len(calls), 'request')}; it was {', '.join(map(str, old))} and is {', '.join(map(str, new))}",
    )


def _lost_heartbeats_show(seen: CaseRun) -> CheckResult:
    """Fail if heartbeats that could not be sent are nowhere counted."""
    grown = seen.grown(seen.d, *HEARTBEATS_FAILED, until="orphaned")
    both = [seen.grown(seen.d, name, until="orphaned") or 0 for name in HEARTBEATS_FAILED]
    return told(
        "counted",
        "A heartbeat that cannot be sent is counted",
        ["KVC-HB-008", "O2"],
        [] if grown is None or max(both) > 0 else ["none is counted, although the writer was dead"],
        f"{counted(max(both), 'is', 'are')} counted",
        unknown="" if grown is not None else "there is no such counter",
    )


async def _same_name(stage: Stage) -> None:
    """Have hand-offs of all lives bear one name, as if a server were taken for its predecessor."""
    stage.meddler.returned = lambda params: params | {"remote_engine_id": "always-the-same"}


P_RESTART: Final = Case(
    name="p_restart", title="The prefill side dies with hand-offs outstanding, and comes back at its old address",
    rules=("KVC-HSK-003", "KVC-HB-008", "S2", "S5", "R2", "L3", "O2"), drive=_p_restart, needs=_PROCESSES,
    checks=(_old_life_is_over, _new_life_serves, _lost_heartbeats_show, silent_as_policy),
    twins=(WRONG_TOKEN, Twin(name="same_name", title="all lives bear one name", fails="new", sabotage=_same_name)),
    limit_s=300.0,
)  # fmt: skip


# -- the reader comes back ------------------------------------------------------------------------------------------


async def _d_restart(stage: Stage) -> None:
    """The decode side dies in the middle of answers, and comes back; the prefill side is left alone."""
    before = stage.pair.engine_of(stage.p)
    tasks = [stage.start(stage.request(f"cut-{n}", tokens=LONG_ANSWER_TOKENS)) for n in range(2)]
    await stage.until(lambda v: v.get(RUNNING, 0) >= 2, stage.d, 20.0)
    leg = await stage.prefilled_well("waits")
    await stage.kill(stage.d, "engine_core", "worker")
    await asyncio.gather(*tasks)
    await stage.returned(stage.d)
    await stage.decoded("waits", leg)
    for number in range(2):
        await stage.request(f"behind-{number}")
    await stage.pair.serves(stage.p)
    stage.mark("writer", before=before, after=stage.pair.engine_of(stage.p))


def _served_again(seen: CaseRun) -> CheckResult:
    """Fail if a restarted reader does not get KV again, or only after the writer was touched."""
    calls = seen.calls("behind", "decode")
    problems = [seen.ended(c) for c in calls if not seen.right(c)]
    problems += [] if len(calls) == 2 else ["a request never got to the decode side"]
    late = seen.call("waits")
    problems += [] if seen.right(late) or seen.refused(late) else [f"what waited for it: {seen.ended(late)}"]
    writer = seen.marks("writer")[-1].detail
    problems += ["the writer is another as well"] if writer["before"] != writer["after"] else []
    return told("again", "A reader that was restarted is served again, and the writer was not touched", ["KVC-HSK-004"],
                problems, f"{seen.ended(late)}; {counted(len(calls), 'request')} behind it")  # fmt: skip


def _cut_are_told(seen: CaseRun) -> CheckResult:
    """Fail if a client whose server died is left to wait."""
    killed = seen.moment("kill")
    waits = [(c.end_ns - killed) / 1e9 for c in seen.calls("cut", "decode")]
    problems = [f"a client waited for {max(waits):.0f} s"] if waits and max(waits) > 10 else []
    lost = [c for c in seen.calls("cut", "decode") if c.ok and c.output_tokens != c.max_tokens]
    if lost:
        one, many = "answer that is called whole lacks tokens", "answers that are called whole lack tokens"
        problems.append(counted(len(lost), one, many))
    return told(
        "told",
        "Requests in flight at the crash end in an error, and do not hang",
        ["KVC-ROUT-002", "L3"],
        problems,
        f"{counted(len(waits), 'client was', 'clients were')} told within {max(waits, default=0.0):.1f} s",
        unknown="" if waits else "no request was under way",
    )


D_RESTART: Final = Case(
    name="d_restart", title="The decode side dies in the middle of answers, and comes back",
    rules=("KVC-HSK-004", "KVC-ROUT-002", "L3"), drive=_d_restart, needs=_PROCESSES,
    checks=(_served_again, _cut_are_told), twins=(WRONG_TOKEN,), limit_s=300.0,
)  # fmt: skip


# -- a handshake that fails -----------------------------------------------------------------------------------------


async def _failed_handshake(stage: Stage) -> None:
    """The first handshake of a fresh reader fails, and later ones do not."""
    fault = await stage.order(stage.d, Action.FAIL, what=What.HANDSHAKE, count=1, within_s=60.0)
    await stage.kill(stage.d, "engine_core", "worker")
    await stage.returned(stage.d)
    await stage.request("first")
    await stage.proved(fault, stage.d)
    await stage.lifted(fault)
    await stage.pass_time(stage.terms.lease_s)  # its back-off has passed by then
    leg = await stage.prefilled_well("second")
    await stage.held("held", stage.p)
    await stage.decoded("second", leg)
    await stage.until_free("released", stage.p, stage.terms.lease_s / 2)


def _handshake_is_tried_again(seen: CaseRun) -> CheckResult:
    """Fail if one failed handshake breaks more than the request that waited for it."""
    first, second = seen.call("first"), seen.call("second")
    problems = [] if seen.right(first) or seen.as_policy_says(first) else [f"what waited for it: {seen.ended(first)}"]
    problems += [] if seen.right(second) else [f"the next one: {seen.ended(second)}"]
    expired = seen.grown(seen.p, EXPIRED) or 0  # the first one's may have: nobody could say that it was not needed
    read = seen.freed_ns("released", seen.p) and expired <= 1
    problems += [] if read else ["the next one's blocks were not read: the peer was not met"]
    return told("again", "A failed handshake fails what waits for it, and is tried again", ["KVC-HSK-002", "R2", "L3"],
                problems, f"{seen.ended(first)}; {seen.ended(second)}")  # fmt: skip


async def _never_met(stage: Stage) -> None:
    await stage.order(stage.d, Action.FAIL, what=What.HANDSHAKE, skip=1, announced=False)


FAILED_HANDSHAKE: Final = Case(
    name="failed_handshake", title="A fresh reader's first handshake fails", rules=("KVC-HSK-002", "R2", "L3"),
    drive=_failed_handshake, needs=_PROCESSES | {Need.NOTIFICATIONS}, checks=(_handshake_is_tried_again,),
    twins=(Twin(name="never_met", title="all later handshakes fail as well", fails="again", sabotage=_never_met,
                needs=NOTIFICATIONS),),
    limit_s=300.0,
)  # fmt: skip

CASES: Final = (P_RESTART, D_RESTART, FAILED_HANDSHAKE)
