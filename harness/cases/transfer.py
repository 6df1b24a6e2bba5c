"""Chapter transfer: reads of KV that fail, stall or are broken off, and hand-offs that make no sense."""

from __future__ import annotations

import asyncio
from typing import Final

from faults.nixl.orders import Action, What
from harness.cases.case import Case, Drive, Twin
from harness.cases.client import Params, Reply
from harness.cases.metrics import FAILED_TRANSFERS
from harness.cases.observations import STEP_S, CaseRun, told
from harness.cases.sabotage import NOTIFICATIONS, WRONG_TOKEN, hop_alters, other_terms
from harness.cases.stage import Stage
from harness.cases.terms import Need, PairTerms
from harness.verdicts import CheckResult
from harness.words import counted

STALL_S: Final = 4.0
REPLY_LIMIT_S: Final = 15.0
_NOTIFIED: Final = frozenset({Need.METRICS, Need.NOTIFICATIONS})
FAIL_POLICY: Final = PairTerms(load_failure_policy="fail")


# -- failed reads ---------------------------------------------------------------------------------------------------


async def _failed(stage: Stage) -> None:
    """One read of KV fails; then the same prompt comes once more."""
    leg = await stage.prefilled_well("failed")
    fault = await stage.order(stage.d, Action.FAIL, what=What.TRANSFER, count=1)
    await stage.decoded("failed", leg)
    await stage.proved(fault, stage.d)
    await stage.lifted(fault)
    again = await stage.prefilled_well("again", leg.prompt)
    await stage.decoded("again", again)


def _fails_as_policy_says(seen: CaseRun) -> CheckResult:
    """Fail if a failed read ends in any other way than the policy says."""
    call = seen.call("failed")
    good = seen.as_policy_says(call)
    return told("policy", f"A failed read ends as the policy {seen.terms.load_failure_policy!r} says",
                ["KVC-XFER-002", "R2", "L3"], [] if good else [seen.ended(call)], seen.ended(call))  # fmt: skip


def _no_cache_is_poisoned(seen: CaseRun) -> CheckResult:
    """Fail if the same prompt is answered wrongly after a read of its KV failed."""
    call = seen.call("again")
    return told("cache", "A failed read poisons no cache", ["KVC-XFER-002", "S2"],
                [] if seen.right(call) else [seen.ended(call)], seen.ended(call))  # fmt: skip


def _failure_is_counted(seen: CaseRun) -> CheckResult:
    """Fail if a read that failed is not counted as one."""
    grown = seen.grown(seen.d, FAILED_TRANSFERS)
    return told(
        "counted",
        "A failed read is counted as one",
        ["KVC-XFER-002", "O1", "O2"],
        [] if grown in (1, None) else [f"{counted(grown, 'is', 'are')} counted, where one failed"],
        f"{counted(grown, 'failed read')} ({FAILED_TRANSFERS})",
        unknown="" if grown is not None else "there is no such counter",
    )


def _failed_transfer(policy: str, other: str) -> Case:
    return Case(
        name=f"failed_transfer_{policy}", title=f"A read of KV fails; the policy is {policy!r}",
        rules=("KVC-XFER-002", "R2", "L3", "S2", "O1", "O2"), drive=_failed, needs=_NOTIFIED,
        terms=PairTerms(load_failure_policy=policy),
        checks=(_fails_as_policy_says, _no_cache_is_poisoned, _failure_is_counted),
        twins=(other_terms("other_policy", f"the servers were told {other!r}", "policy", load_failure_policy=other),),
    )  # fmt: skip


# -- slow reads -----------------------------------------------------------------------------------------------------


async def _stalled(stage: Stage) -> None:
    """A read stands still for a while, and then ends well; others go past it."""
    leg = await stage.prefilled_well("stalled")
    fault = await stage.order(stage.d, Action.STALL, what=What.TRANSFER, count=1, seconds=STALL_S)
    slow = stage.start(stage.decoded("stalled", leg))
    await stage.proved(fault, stage.d)
    await stage.request("beside")
    await slow
    await stage.lifted(fault)


def _stall_ends(seen: CaseRun) -> CheckResult:
    """Fail if a slow read costs more than its own request its time."""
    slow, beside = seen.call("stalled"), seen.call("beside")
    problems, unknown = [seen.ended(c) for c in (slow, beside) if not seen.right(c)], ""
    if not problems:  # What has no first token has no part in the comparison.
        if slow.first_ns - slow.sent_ns < STALL_S * 1e9:
            unknown = "the read was not held up"
        elif beside.sent_ns > slow.first_ns:
            unknown = "the other request came only when the read was no longer held up"
        elif beside.first_ns > slow.first_ns:
            problems = ["the other request waited for it"]
    return told("stalled", "A slow read ends, and holds up nobody else", ["L3", "L6", "KVC-XFER-001"], problems,
                f"{seen.ended(slow)}; {seen.ended(beside)}", unknown=unknown)  # fmt: skip


async def _stall_all(stage: Stage) -> None:
    """Have the others' reads stand still as well."""
    await stage.order(stage.d, Action.STALL, what=What.TRANSFER, skip=1, seconds=2 * STALL_S, announced=False)


_ALL_STALL: Final = Twin(
    name="all_stall", title="the other request's read stands still as well", fails="stalled", sabotage=_stall_all,
    needs=NOTIFICATIONS,
)  # fmt: skip


async def _abort(stage: Stage) -> None:
    """A client goes while the KV of its request is on its way; the next requests use what blocks there are."""
    leg = await stage.prefilled_well("cut")
    await stage.held("held", stage.p)
    fault = await stage.order(stage.d, Action.STALL, what=What.TRANSFER, count=1, seconds=STALL_S)
    task = stage.start(stage.decoded("cut", leg))
    await stage.proved(fault, stage.d)
    stage.mark("leaves")
    await stage.gone(task)
    await asyncio.gather(*(stage.request(f"next-{number}") for number in range(3)))
    await stage.pass_time(STALL_S)
    await stage.lifted(fault)
    await stage.until_free("released", stage.p, 2 * stage.terms.lease_s)
    await stage.until_free("emptied", stage.d, 2 * stage.terms.lease_s)


def _abort_is_clean(seen: CaseRun) -> CheckResult:
    """Fail if an abort in the middle of a read strands blocks, or spoils those who come next."""
    nexts = seen.calls("next", "decode")
    problems = [seen.ended(c) for c in nexts if not seen.right(c)]
    problems += [] if len(nexts) == 3 else [f"of 3 requests behind it {len(nexts)} got to the decode side"]
    for worker, name in ((seen.p, "released"), (seen.d, "emptied")):
        problems += [] if seen.freed_ns(name, worker) else [f"{worker} still holds its blocks"]
    unknown = "" if seen.call("cut").outcome == "unknown" or problems else "the answer had come before"
    return told("clean", "An abort in the middle of a read strands nothing and spoils nobody", ["S6", "L1", "L4", "L6"],
                problems, "; ".join(map(seen.ended, nexts)), unknown=unknown)  # fmt: skip


# -- hand-offs that make no sense -----------------------------------------------------------------------------------

FIELDS: Final = (
    "remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port", "tp_size",
    "remote_num_tokens",
)  # fmt: skip
TYPES: Final[Params] = {
    "remote_engine_id": 17, "remote_request_id": 17, "remote_block_ids": "some", "remote_host": 17,
    "remote_port": "a port", "tp_size": "one", "remote_num_tokens": "many",
}  # fmt: skip
RANGES: Final[Params] = {
    "remote_engine_id": "", "remote_request_id": "", "remote_block_ids": [[1_999_999_999]],
    "remote_host": "192.0.2.1", "remote_port": 70_000, "tp_size": 0, "remote_num_tokens": -1,
}  # fmt: skip


def _without(name: str, params: Params) -> Params:
    return {key: value for key, value in params.items() if key != name}


def _malformed(kind: str) -> Drive:
    async def drive(stage: Stage) -> None:
        """Send one broken hand-off after another, and a good request behind each."""
        for name in FIELDS:
            leg = await stage.prefilled_well(f"for-{name}")
            good = leg.hand_off
            bad = {
                "missing": _without(name, good),
                "type": good | {name: TYPES[name]},
                "range": good | {name: RANGES[name]},
            }[kind]
            await _bad(stage, name, leg, bad)
        if kind == "missing":
            leg = await stage.prefilled_well("for-everything")
            await _bad(stage, "everything", leg, {"do_remote_prefill": True})

    return drive


async def _bad(stage: Stage, name: str, leg: Reply, params: Params) -> None:
    await stage.decoded(f"bad-{name}", leg, hand_off=params, stream=False, tokens=8, limit_s=REPLY_LIMIT_S)
    await stage.pass_time(STEP_S)  # a server that will die of it dies in this time
    if not await stage.alive(stage.d):
        stage.mark("died", worker=stage.d, field=name)
        await stage.returned(stage.d)
    await stage.request(f"then-{name}", tokens=8)


def _refused_at_the_door(seen: CaseRun) -> CheckResult:
    """Fail for a broken hand-off that gets anything but a 4xx with its field's name."""
    problems = []
    calls = seen.calls("bad", "decode")
    for call in calls:
        name = call.label.removeprefix("bad-")
        named = name in call.error or (name == "everything" and "remote_" in call.error)
        if not 400 <= call.status < 500 or not named:
            problems.append(seen.ended(call))
    text = f"of {len(calls)}, {counted(len(calls) - len(problems), 'was', 'were')} refused with the field's name"
    return told(
        "refused",
        "A broken hand-off gets a 4xx that names the field",
        ["KVC-XFER-005"],
        [f"{counted(len(problems), 'was', 'were')} not: {'; '.join(p[:120] for p in problems)}"] if problems else [],
        text,
    )


def _goes_on(seen: CaseRun) -> CheckResult:
    """Fail if a server dies of what a client sent, or does not serve the next request."""
    died = [str(m.detail["field"]) for m in seen.marks("died")]
    bad = [c for c in seen.calls("then") if not seen.right(c)]
    problems = [f"the server died of {', '.join(died)}"] if died else []
    problems += [f"the request behind it: {seen.ended(c)}" for c in bad]
    return told("goes-on", "No hand-off ends a server", ["R1", "L6", "KVC-XFER-005"], problems,
                f"{counted(len(seen.calls('then', 'decode')), 'good request')}, one behind each")  # fmt: skip


def _mended(name: str) -> Twin:
    """A hop that fills in what is missing, so that nothing is left to refuse."""
    good: Params = {}

    def alter(params: Params) -> Params:
        if all(name in params and params[name] not in (TYPES[name], RANGES[name]) for name in FIELDS):
            good.update(params)
        return good or {"do_remote_prefill": False}

    return hop_alters(name, "a hop sends the last good hand-off in the place of a broken one", "refused", alter)


def _case_of(kind: str, what: str) -> Case:
    return Case(
        name=f"malformed_handoff_{kind}", title=f"Hand-offs with one field {what}", rules=("KVC-XFER-005", "R1", "L6"),
        drive=_malformed(kind), checks=(_refused_at_the_door, _goes_on), twins=(_mended("mended"),), limit_s=600.0,
        needs=frozenset({Need.METRICS, Need.RESTART}),
    )  # fmt: skip


CASES: Final = (
    _failed_transfer("recompute", "fail"),
    _failed_transfer("fail", "recompute"),
    Case(
        name="stalled_transfer",
        title="A read of KV stands still for a while",
        rules=("L3", "L6", "KVC-XFER-001"),
        drive=_stalled,
        needs=_NOTIFIED,
        checks=(_stall_ends,),
        twins=(_ALL_STALL,),
    ),
    Case(
        name="abort_in_transfer",
        title="A client goes while the KV of its request is on its way",
        rules=("S6", "L1", "L4", "L6"),
        drive=_abort,
        needs=_NOTIFIED,
        checks=(_abort_is_clean,),
        twins=(WRONG_TOKEN,),
    ),
    _case_of("missing", "missing"),
    _case_of("type", "of a wrong type"),
    _case_of("range", "out of range"),
)
