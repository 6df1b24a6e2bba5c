"""Chapter release: blocks go back to the pool when they are no longer needed, and what has been used stays used."""

from __future__ import annotations

import asyncio
from typing import Final

from faults.nixl.orders import Action, Direction, Kind
from harness.cases.case import Case, Twin
from harness.cases.leases import fill, idle_expiry, queued, waited
from harness.cases.metrics import EXPIRED, FAILED_TRANSFERS, LATE, RUNNING
from harness.cases.observations import REQUIRED_FIELDS, STEP_S, CaseRun, told
from harness.cases.sabotage import WRONG_TOKEN, deaf_hop, long_lease, no_completions
from harness.cases.stage import Stage
from harness.cases.terms import Need, PairTerms, Pool
from harness.verdicts import CheckResult
from harness.words import counted

REQUESTS: Final = 3
WATCHED_TOKENS: Final = 16
"""A short answer: its lease must not end by itself before a look shows that the read has ended it."""
FULL_STEP_TOKENS: Final = 30_000
"""A prompt that a server is busy with for a while."""
LONG_ANSWER_TOKENS: Final = 4_000
SHORT_TOKENS: Final = 8
"""An answer that is over long before a lease is."""
_NOTIFIED: Final = frozenset({Need.METRICS, Need.NOTIFICATIONS})


# -- undisturbed ----------------------------------------------------------------------------------------------------


async def _undisturbed(stage: Stage) -> None:
    """A few requests after one another, and one whose blocks are looked at before and after they are read."""
    for number in range(REQUESTS):
        await stage.request(f"alone-{number}")
    leg = await stage.prefilled_well("watched")
    await stage.held("held", stage.p)
    reply = await stage.decoded("watched", leg, tokens=WATCHED_TOKENS)
    stage.mark("read", ok=reply.ok)
    await stage.until_free("released", stage.p, 2 * stage.terms.lease_s)
    several = [stage.start(stage.request(f"together-{number}")) for number in range(REQUESTS)]
    await asyncio.gather(*several)


def _hand_off_is_complete(seen: CaseRun) -> CheckResult:
    """Fail if a prefill for a remote decode gives no complete hand-off, or holds no blocks."""
    problems = []
    legs = seen.calls(leg="prefill")
    for call in legs:
        lacking = [name for name in REQUIRED_FIELDS if (call.returned or {}).get(name) in (None, [], "")]
        if not call.ok or lacking:
            problems.append(f"{seen.ended(call)}; its hand-off lacks {', '.join(lacking) or 'nothing'}")
    if not seen.holds("held", seen.p):
        problems.append("no block is held for the reader")
    return told(
        "hand-off", "A prefill keeps its blocks and gives a complete hand-off", ["KVC-LEASE-001"], problems[:3],
        f"{counted(len(legs), 'hand-off')}; with one outstanding, {seen.usage('held', seen.p):.2%} of the blocks are "
        f"in use, {seen.usage('baseline', seen.p):.2%} before",
    )  # fmt: skip


def _freed_at_once(seen: CaseRun, title: str, rules: list[str], since_ns: int, what: str) -> CheckResult:
    """Fail if the looks `released` show the blocks held for longer after a moment than a server needs to act."""
    freed = seen.freed_ns("released", seen.p)
    if not seen.holds("held", seen.p):
        return told("released", title, rules, [], "", unknown="no block was held before")
    if freed is None:
        last = (seen.look("released", seen.p).t_ns - since_ns) / 1e9
        return told("released", title, rules, [f"{last:.1f} s after {what} the blocks are still held"], "")
    took = (freed - since_ns) / 1e9
    text = f"the blocks were seen free {took:.2f} s after {what}"
    return told("released", title, rules, [f"{text}, and not at once"] if took > STEP_S else [], text, seconds=took)


def _read_frees_at_once(seen: CaseRun) -> CheckResult:
    """Fail if the blocks are not free as soon as they have been read, and not only when the lease ends."""
    return _freed_at_once(seen, "The reader's completion frees the blocks at once", ["KVC-REL-001", "L4"],
                          seen.moment("read"), "the answer's end")  # fmt: skip


def _counts_nothing(seen: CaseRun) -> CheckResult:
    """Fail if anything expired, failed or came late although nothing was disturbed."""
    problems, figures = [], []
    unknown = ""
    for worker in (seen.p, seen.d):
        for what, names in (("expired", (EXPIRED,)), ("read after expiry", LATE), ("failed", (FAILED_TRANSFERS,))):
            grown = seen.grown(worker, *names)
            if grown is None:
                unknown = f"{worker} has no counter {names[0]}"
            elif grown:
                problems.append(f"{worker} counts {grown:g} {what}")
            else:
                figures.append(f"{worker} {what} 0")
    return told("calm", "Without a fault nothing expires and nothing is read late", ["KVC-OBS-002", "O1"], problems,
                ", ".join(figures), unknown=unknown)  # fmt: skip


def _metrics_are_there(seen: CaseRun) -> CheckResult:
    """Fail if what happens to leases cannot be seen from outside."""
    wanted = {
        "blocks in use": ("vllm:kv_cache_usage_perc",), "leases expired": (EXPIRED,), "read after expiry": LATE,
        "failed reads": (FAILED_TRANSFERS,), "leases live": ("pdproof:leases_live", "vllm:nixl_num_leases_live"),
        "leases extended": ("pdproof:leases_extended_total", "vllm:nixl_num_leases_extended_total"),
        "leases released": ("pdproof:leases_released_total", "vllm:nixl_num_leases_released_total"),
    }  # fmt: skip
    values = seen.look("final", seen.p).values
    lacking = [what for what, names in wanted.items() if not any(name in values for name in names)]
    problems = [f"no metric of {', '.join(lacking)}"] if lacking else []
    return told("metrics", "What becomes of leases can be seen in metrics", ["KVC-OBS-001"], problems,
                f"{len(wanted) - len(lacking)} of {len(wanted)} figures are exposed")  # fmt: skip


def _all_right(seen: CaseRun) -> CheckResult:
    """Fail if a request that nothing disturbs does not get a whole, right answer."""
    calls = seen.calls(leg="decode")
    bad = [c for c in calls if not seen.right(c)]
    return told("answered", "Every undisturbed request is answered rightly", ["KVC-XFER-001", "L3"],
                [f"{counted(len(bad), 'was', 'were')} not: {seen.ended(bad[0])}"] if bad else [],
                counted(len(calls) - len(bad), "whole answer"))  # fmt: skip


UNDISTURBED: Final = Case(
    name="undisturbed", title="Nothing is disturbed",
    rules=("KVC-LEASE-001", "KVC-REL-001", "KVC-OBS-001", "KVC-OBS-002", "KVC-XFER-001", "L3", "L4", "O1"),
    drive=_undisturbed,
    checks=(_all_right, _hand_off_is_complete, _read_frees_at_once, _counts_nothing, _metrics_are_there),
    twins=(WRONG_TOKEN, no_completions("released"), no_completions("calm", name="no_completions_counted")),
)  # fmt: skip


# -- nobody will come -----------------------------------------------------------------------------------------------


async def _rejected(stage: Stage) -> None:
    """The decode side refuses a request at its door: it asks for more tokens than the server can ever make."""
    leg = await stage.prefilled_well("rejected")
    await stage.held("held", stage.p)
    await stage.decoded("rejected", leg, tokens=10_000_000, stream=False)
    stage.mark("refused")
    await stage.until_free("released", stage.p, 2 * stage.terms.lease_s)


def _refusal_frees(seen: CaseRun) -> CheckResult:
    """Fail if a request that is refused at the door leaves its blocks to the lease."""
    call = seen.call("rejected")
    result = _freed_at_once(seen, "A refusal at the reader's door releases the blocks", ["KVC-REL-002", "L4"],
                            seen.moment("refused"), "the refusal")  # fmt: skip
    if 400 <= call.status < 500:
        return result
    return told("released", result.title, result.rules, [], seen.ended(call), unknown="the request was not refused")


REJECTED: Final = Case(
    name="rejected_at_door",
    title="The decode side refuses a request whose blocks are kept",
    rules=("KVC-REL-002", "L4"),
    drive=_rejected,
    checks=(_refusal_frees,),
    twins=(no_completions("released"),),
)


async def _abort_in_queue(stage: Stage) -> None:
    """A client goes while its request waits in the decode side's queue."""
    async with stage.slots_taken():
        tasks = await queued(stage, 1)
        stage.mark("leaves")
        await stage.gone(*tasks)
        await stage.until_free("released", stage.p, stage.terms.lease_s + 2 * STEP_S)


def _abort_frees(seen: CaseRun) -> CheckResult:
    """Fail if an abort before scheduling leaves the blocks to the lease."""
    result = _freed_at_once(seen, "An abort in the queue releases the blocks", ["KVC-REL-002", "L4"],
                            seen.moment("leaves"), "the client left")  # fmt: skip
    early = waited(seen)
    return told("released", result.title, result.rules, [], "", unknown=early) if early else result


ABORT_IN_QUEUE: Final = Case(
    name="abort_in_queue", title="A client goes while its request waits at the decode side",
    rules=("KVC-REL-002", "L4"), drive=_abort_in_queue, checks=(_abort_frees,),
    twins=(no_completions("released"), deaf_hop("released")),
)  # fmt: skip


async def _client_gone(stage: Stage) -> None:
    """Clients go in the middle of a prefill, and in the middle of an answer."""
    prefill = stage.start(stage.prefilled("gone-early", stage.prompt(FULL_STEP_TOKENS)))
    await stage.until(lambda v: v.get(RUNNING, 0) > 0, stage.p, 1.0)
    stage.mark("leaves-prefill")
    await stage.gone(prefill)
    await stage.until_free("freed-p", stage.p, stage.terms.lease_s + 4 * STEP_S)
    leg = await stage.prefilled_well("gone-late")
    decode = stage.start(stage.decoded("gone-late", leg, tokens=LONG_ANSWER_TOKENS))
    await stage.until(lambda v: v.get(RUNNING, 0) > 0, stage.d, 10.0)
    await stage.pass_time(0.5)
    await stage.look("decoding", stage.d, poke=False)
    stage.mark("leaves-decode")
    await stage.gone(decode)
    await stage.until_free("freed-d", stage.d, 4 * STEP_S)


def _abort_frees_both(seen: CaseRun) -> CheckResult:
    """Fail if what a client no longer wants is computed or kept."""
    title, rules = "What no client wants any more is not kept", ["KVC-LEASE-002", "L4"]
    cut = [c for c in (*seen.calls("gone-early"), *seen.calls("gone-late", "decode")) if c.outcome == "unknown"]
    problems, figures = [], []
    for worker, name, left in ((seen.p, "freed-p", "leaves-prefill"), (seen.d, "freed-d", "leaves-decode")):
        freed, since = seen.freed_ns(name, worker), seen.moment(left)
        took = (freed - since) / 1e9 if freed else None
        figures.append(
            f"{worker} free {took:.2f} s after its client left" if took is not None else f"{worker} not free"
        )
        # a step that is under way is not broken off: the longest is a long prompt's
        if took is None or took > 2 * STEP_S:
            problems.append(f"{worker} kept what nobody wanted")
    grown = seen.grown(seen.p, EXPIRED)
    if grown:
        problems.append(f"{counted(grown, 'lease')} ran out: a prefill that was broken off was kept for a reader")
    unknown = "" if len(cut) == 2 or problems else "an answer had come before its client left"
    return told("freed", title, rules, problems, "; ".join(figures), unknown=unknown)


async def _no_hand_off_asked(stage: Stage) -> None:
    """A prefill that is for nobody else."""
    await stage.plain("for-nobody", stage.p, stage.prompt(), 1, stream=False)
    stage.mark("answered")
    await stage.until_free("freed", stage.p, stage.terms.lease_s + 2 * STEP_S)


def _nothing_is_kept(seen: CaseRun) -> CheckResult:
    """Fail if a request that is for nobody else keeps blocks or returns a hand-off."""
    call = seen.call("for-nobody", "plain")
    freed = seen.freed_ns("freed", seen.p)
    took = (freed - seen.moment("answered")) / 1e9 if freed else None
    problems = ["it returned a hand-off"] if (call.returned or {}).get("remote_block_ids") else []
    problems += ["its blocks were kept"] if took is None or took > STEP_S else []
    problems += [seen.ended(call)] if not seen.right(call) else []
    return told("freed", "A prefill that is for nobody else keeps nothing", ["KVC-LEASE-002"], problems,
                f"free {took:.2f} s after the answer" if took is not None else "never seen free")  # fmt: skip


async def _keep_for_nobody(stage: Stage) -> None:
    """Have another request's blocks kept meanwhile, as if this one's had been."""
    await stage.prefilled_well("somebody-else")


NOT_FOR_REMOTE: Final = Case(
    name="no_remote_decode", title="A prefill that is for no other server", rules=("KVC-LEASE-002",),
    drive=_no_hand_off_asked, checks=(_nothing_is_kept,),
    twins=(Twin(name="kept", title="blocks are kept for a reader that nobody named", fails="freed",
                sabotage=_keep_for_nobody),),
)  # fmt: skip
CLIENT_GONE: Final = Case(
    name="client_gone", title="Clients go in the middle of a prefill and of an answer", rules=("KVC-LEASE-002", "L4"),
    drive=_client_gone, checks=(_abort_frees_both,), twins=(deaf_hop("freed"),),
)  # fmt: skip


# -- nothing to read ------------------------------------------------------------------------------------------------


async def _local_hit(stage: Stage) -> None:
    """The decode side has the whole prompt in its cache already."""
    prompt = stage.prompt()
    await stage.request("first", prompt)
    leg = await stage.prefilled_well("again", prompt)
    await stage.held("held", stage.p)
    await stage.decoded("again", leg, tokens=WATCHED_TOKENS)
    stage.mark("answered")
    await stage.until_free("released", stage.p, 2 * stage.terms.lease_s)


def _hit_frees(seen: CaseRun) -> CheckResult:
    """Fail if blocks that need no reading are left to the lease."""
    return _freed_at_once(
        seen,
        "A prompt that the reader has in its cache frees the blocks as well",
        ["KVC-REL-003", "L4"],
        seen.moment("answered"),
        "the answer's end",
    )


def _hit_is_right(seen: CaseRun) -> CheckResult:
    """Fail if an answer made from the reader's cache is not the right one."""
    calls = [seen.call("first"), seen.call("again")]
    bad = [c for c in calls if not seen.right(c)]
    return told("answered", "An answer from the cache is the right one", ["KVC-XFER-001"], [seen.ended(c) for c in bad],
                "; ".join(map(seen.ended, calls)))  # fmt: skip


LOCAL_HIT: Final = Case(
    name="local_hit", title="The decode side has the prompt in its own cache",
    rules=("KVC-REL-003", "KVC-XFER-001", "L4"), drive=_local_hit, checks=(_hit_frees, _hit_is_right),
    twins=(no_completions("released"), WRONG_TOKEN),
)  # fmt: skip


# -- completions that go wrong --------------------------------------------------------------------------------------


async def _lost_completion(stage: Stage) -> None:
    """The reader's word that it has read gets lost."""
    leg = await stage.prefilled_well("unheard")
    await stage.held("held", stage.p)
    fault = await stage.order(stage.p, Action.DROP, kind=Kind.COMPLETION, count=1)
    await stage.decoded("unheard", leg)
    await stage.proved(fault, stage.p)
    await stage.lifted(fault)
    stage.mark("idle")
    await stage.pass_time(stage.terms.lease_s + 2 * STEP_S)
    stage.mark("poke")
    await stage.until_free("released", stage.p, 1.0)


def _lost_is_made_good(seen: CaseRun) -> CheckResult:
    """Fail if a lease whose completion was lost stands past its deadline."""
    title, rules = "A lost completion costs one lease at most", ["KVC-LEASE-005", "L1"]
    freed = seen.freed_ns("released", seen.p)
    answer = seen.call("unheard")
    if freed is None:
        return told(
            "released", title, rules, ["the blocks were still held when the lease must have ended"], seen.ended(answer)
        )
    problems = [] if seen.right(answer) else [f"the request itself: {seen.ended(answer)}"]
    return told("released", title, rules, problems, f"free when looked at, {(freed - answer.end_ns) / 1e9:.1f} s "
                f"after the answer's end; {counted(seen.grown(seen.p, EXPIRED), 'expiry', 'expiries')}")  # fmt: skip


LOST_COMPLETION: Final = Case(
    name="lost_completion", title="The reader's word that it has read gets lost",
    rules=("KVC-LEASE-005", "KVC-LEASE-007", "L1", "L5"), drive=_lost_completion, needs=_NOTIFIED,
    checks=(_lost_is_made_good, idle_expiry), twins=(long_lease("released"),),
)  # fmt: skip


async def _repeated_completion(stage: Stage) -> None:
    """Each completion comes twice, while other requests come and go."""
    fault = await stage.order(stage.p, Action.REPEAT, kind=Kind.COMPLETION, count=2)
    await stage.request("twice")
    leg = await stage.prefilled_well("beside")
    await stage.held("held", stage.p)
    await stage.request("twice-again", tokens=SHORT_TOKENS)  # nobody renews the lease beside it
    await stage.proved(fault, stage.p)
    await stage.look("beside", stage.p)
    await stage.decoded("beside", leg)
    await stage.lifted(fault)


def _repeat_is_harmless(seen: CaseRun) -> CheckResult:
    """Fail if a completion that comes twice ends another lease, or breaks a request."""
    calls = seen.calls(leg="decode")
    bad = [c for c in calls if not seen.right(c)]
    problems = [seen.ended(c) for c in bad]
    problems += [] if seen.holds("beside", seen.p) else ["another request's blocks were freed as well"]
    grown = seen.grown(seen.p, EXPIRED)
    problems += [counted(grown, "lease ran out", "leases ran out")] if grown else []
    return told(
        "harmless",
        "A completion that comes twice changes nothing",
        ["S4", "KVC-REL-004"],
        problems,
        f"{counted(len(calls) - len(bad), 'whole answer')}; beside them a lease on {seen.usage('beside', seen.p):.2%} "
        "stood",
    )


async def _cut_short(stage: Stage) -> None:
    stage.meddler.answer = lambda ids: ids[:-1]


REPEATED_COMPLETION: Final = Case(
    name="repeated_completion", title="The reader's word that it has read comes twice", rules=("S4", "KVC-REL-004"),
    drive=_repeated_completion, needs=_NOTIFIED, checks=(_repeat_is_harmless,),
    twins=(
        Twin(name="cut_short", title="answers lack their last token", fails="harmless", sabotage=_cut_short),
    ),
)  # fmt: skip


async def _damaged(stage: Stage) -> None:
    """One completion arrives damaged."""
    leg = await stage.prefilled_well("damaged")
    await stage.held("held", stage.p)
    fault = await stage.order(stage.p, Action.DAMAGE, kind=Kind.COMPLETION, direction=Direction.RECEIVED, count=1)
    await stage.decoded("damaged", leg)
    await stage.proved(fault, stage.p)
    await stage.lifted(fault)
    await stage.request("behind")
    await stage.pass_time(stage.terms.lease_s)
    await stage.until_free("released", stage.p, 2 * STEP_S)


def _damage_is_contained(seen: CaseRun) -> CheckResult:
    """Fail if a damaged notification breaks more than what it was about."""
    behind, own = seen.call("behind"), seen.call("damaged")
    problems = [f"the request behind it: {seen.ended(c)}" for c in (behind,) if not seen.right(c)]
    problems += [] if seen.right(own) else [f"the request itself: {seen.ended(own)}"]
    problems += [] if seen.freed_ns("released", seen.p) else ["its blocks are still held after the lease"]
    return told("contained", "A damaged notification is dropped, and the loop goes on", ["KVC-REL-006", "L6", "L1"],
                problems, f"{seen.ended(own)}; {seen.ended(behind)}")  # fmt: skip


DAMAGED: Final = Case(
    name="damaged_notification", title="A completion arrives damaged", rules=("KVC-REL-006", "L1", "L6"),
    drive=_damaged, needs=_NOTIFIED, checks=(_damage_is_contained,), twins=(long_lease("contained"),),
)  # fmt: skip


# -- hand-offs that are not for this ----------------------------------------------------------------------------------


async def _stale(stage: Stage) -> None:
    """A used hand-off is sent again after both sides have given its blocks to others."""
    leg = await stage.prefilled_well("fresh")
    await stage.decoded("fresh", leg)
    await fill(stage, stage.p)
    await fill(stage, stage.d)
    await stage.decoded("stale", leg)


def _stale_is_noticed(seen: CaseRun) -> CheckResult:
    """Fail for anything but an error or a right answer."""
    call = seen.call("stale")
    good = seen.right(call) or seen.refused(call)
    return told("stale", "A used hand-off gives an error or a right answer", ["KVC-REL-007", "S2", "S5"],
                [] if good else [seen.ended(call)], seen.ended(call))  # fmt: skip


STALE: Final = Case(
    name="stale_handoff", title="A used hand-off is sent again after its blocks were given to others",
    rules=("KVC-REL-007", "S2", "S5"), drive=_stale, terms=PairTerms(pool=Pool.TIGHT), checks=(_stale_is_noticed,),
    twins=(WRONG_TOKEN,),
)  # fmt: skip


async def _foreign(stage: Stage) -> None:
    """A live hand-off of one prompt is sent along with another prompt of the same length, or with an unknown engine."""
    owner = await stage.prefilled_well("owner")
    other = await stage.prefilled_well("other")
    await stage.decoded("crossed", other, hand_off=owner.hand_off)
    nobody = await stage.prefilled_well("nobody")
    await stage.decoded("nobody", nobody, hand_off=nobody.hand_off | {"remote_engine_id": "nobody-has-this-name"})
    await stage.request("owner-again", owner.prompt)


def _foreign_is_noticed(seen: CaseRun) -> CheckResult:
    """Fail for an answer that was made from another prompt's KV."""
    calls = [seen.call("crossed"), seen.call("nobody")]
    bad = [c for c in calls if not (seen.right(c) or seen.refused(c))]
    return told(
        "foreign",
        "A hand-off that is another's gives an error or a right answer",
        ["KVC-XFER-005", "S2", "C1"],
        [seen.ended(c) for c in bad],
        "; ".join(map(seen.ended, calls)),
    )


FOREIGN: Final = Case(
    name="foreign_handoff", title="One prompt's hand-off is sent along with another prompt",
    rules=("KVC-XFER-005", "S2", "C1"), drive=_foreign, checks=(_foreign_is_noticed,), twins=(WRONG_TOKEN,),
)  # fmt: skip

CASES: Final = (
    UNDISTURBED, REJECTED, ABORT_IN_QUEUE, CLIENT_GONE, NOT_FOR_REMOTE, LOCAL_HIT, LOST_COMPLETION,
    REPEATED_COMPLETION, DAMAGED, STALE, FOREIGN,
)  # fmt: skip
