"""Chapter release: how blocks come back, and what messages may and may not do."""

from __future__ import annotations

from typing import Final

from faults.nixl.orders import Kind
from harness.conformance.case import Body, Case, Source
from harness.conformance.subject import BAD_MESSAGES, EXPIRED, LATE, Capability, Refused
from harness.conformance.trial import Trial, Unfit
from harness.conformance.world import Leg, Life

LEASE_S: Final = 6.0
PROMPT_S: Final = 1.0
"""At once, give or take some steps."""
_LEASES: Final = frozenset({Capability.LEASES})
_PULL: Final = frozenset({Capability.LEASES, Capability.PULL})


def _read(trial: Trial) -> None:
    """A hand-off is read."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair()
    trial.connected(p, d)
    leg = trial.prefilled(p)
    reader = trial.decode(d, leg, max_tokens=300)
    trial.world.pass_time(PROMPT_S)
    trial.expect(not trial.held(leg), "the blocks are free as soon as they have been read, long before the answer ends")
    if reader.end is not None:
        raise Unfit("the answer ended too soon")
    trial.world.abort(reader)


def _aborted_in_queue(trial: Trial) -> None:
    """A request is aborted before it is scheduled."""
    p, d = trial.busy(LEASE_S)
    leg = trial.prefilled(p)
    reader = trial.decode(d, leg)
    trial.world.pass_time(0.5)
    trial.world.abort(reader)
    trial.world.pass_time(PROMPT_S)
    trial.expect(not trial.held(leg), "an abort in the queue frees the holder's blocks at once")


def _rejected(trial: Trial) -> None:
    """A request is refused at the door: it asks for more than the engine can hold."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair()
    trial.connected(p, d)
    leg = trial.prefilled(p)
    try:
        trial.decode(d, leg, max_tokens=5_000)
    except Refused:
        trial.world.pass_time(PROMPT_S)
        trial.expect(not trial.held(leg), "a refusal at the door frees the holder's blocks at once")
        return
    raise Unfit("a request that asks for too much was not refused")


def _hit(trial: Trial) -> None:
    """A prompt comes again, and the decode side has all of it in its cache."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair()
    prompt = trial.prompt(192)
    first = trial.decoded(d, trial.prefilled(p, prompt), max_tokens=40)
    if not first.right:
        raise Unfit(f"the first answer went wrong: {first.end}")
    leg = trial.prefilled(p, prompt)
    again = trial.decode(d, leg, max_tokens=300)
    trial.world.pass_time(PROMPT_S)
    trial.expect(not trial.held(leg), "what is found in the own cache frees the holder's blocks at once")
    trial.world.abort(again)


def _repeated(trial: Trial) -> None:
    """The report of a read arrives three times, and then another request runs under its eyes."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair()
    trial.connected(p, d)
    leg = trial.prefilled(p)
    trial.decoded(d, leg)
    reports = [m for m in trial.world.watch.sent_by(d.name, Kind.COMPLETION) if leg.name in m.meaning.requests]
    if not reports:
        raise Unfit("no read was reported")
    other = trial.prefilled(p)
    for _ in range(2):
        trial.world.inject(d, p, reports[-1].data)
        trial.world.pass_time(0.2)
    trial.expect(p.alive, "the engine goes on")
    trial.expect(trial.held(other), "another request's lease is untouched")
    last = trial.decoded(d, other)
    trial.expect(last.right, "and it is answered rightly")


def _repeated_of_two(trial: Trial) -> None:
    """Two readers are expected; the first one's report arrives twice."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair(decode_slots=1)
    trial.connected(p, d)
    trial.world.watch.expects_release = False
    leg = trial.prefilled(p, remote_readers=2)
    first = trial.decode(d, leg, max_tokens=500)
    trial.world.pass_time(0.3)
    second = trial.decode(d, leg)
    trial.world.pass_time(0.5)
    reports = [m for m in trial.world.watch.sent_by(d.name, Kind.COMPLETION) if leg.name in m.meaning.requests]
    if not reports:
        raise Unfit("no read was reported")
    trial.world.inject(d, p, reports[0].data)
    trial.world.pass_time(0.5)
    trial.expect(trial.held(leg), "one reader's report that comes twice counts once")
    trial.world.abort(first)
    trial.world.over(second, limit_s=30)
    trial.expect(second.right, "the second reader is answered rightly")


def _early_report(trial: Trial) -> None:
    """A reader reads and reports before the holder has done another step since its hand-off."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair()
    trial.connected(p, d)
    before = trial.world.metrics(p)
    leg = trial.prefilled(p)
    trial.world.inject(d, p, _report_like(trial, d, leg))
    trial.world.pass_time(PROMPT_S)
    trial.expect(p.alive, "the engine goes on")
    trial.expect(not trial.held(leg), "a report that comes before the lease was looked at ends it all the same")
    trial.world.pass_time(LEASE_S)
    if LATE in before:
        after = trial.world.metrics(p)
        trial.expect(after[LATE] == before[LATE], "it is not counted as late")
        trial.expect(after[EXPIRED] == before[EXPIRED], "nothing expires")


def _report_like(trial: Trial, d: Life, leg: Leg) -> bytes:
    """Return what the decode side would say to have read a request: an earlier report with another name of its length.

    Raises Unfit where none was sent, or its name stands in it in no such way.
    """
    for sent in trial.world.watch.sent_by(d.name, Kind.COMPLETION):
        name = sent.meaning.requests[0].encode()
        if len(name) == len(leg.name.encode()) and sent.data.count(name) == 1:
            return sent.data.replace(name, leg.name.encode())
    raise Unfit("no report was sent whose like could be made")


def _damaged(trial: Trial) -> None:
    """Bytes arrive that are no message: empty, noise, no text, cut, without an end."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair()
    trial.connected(p, d)
    before = trial.world.metrics(p)
    real = [m.data for m in trial.world.watch.sent_by(d.name, Kind.COMPLETION)]
    if not real:
        raise Unfit("no message was sent that could be damaged")
    whole = real[-1]
    damaged = [
        b"", b"\x00", b"\xff\xfe\xfd", b"HB:", b"HB:\xff\xff", b":", b"no-such-thing", b"a:b:c", b"id:-1",
        b"id:999999999999", whole[: len(whole) // 2], bytes(each | 0x80 for each in whole), whole + b":x",
        trial.world.chance.bytes(64),
    ]  # fmt: skip
    ended_by = ""
    for data in damaged:
        trial.world.inject(d, p, data)
        trial.world.pass_time(0.1)
        if not p.alive:
            ended_by = repr(data[:40])
            break
    trial.expect(p.alive, f"no message ends the engine (these did: {ended_by or 'none'})")
    if p.alive and BAD_MESSAGES in before:
        grown = trial.world.metrics(p)[BAD_MESSAGES] - before[BAD_MESSAGES]
        trial.expect(grown > 0, f"damaged messages are counted ({grown:g} of {len(damaged)})")
    if p.alive:
        trial.expect(trial.decoded(d, trial.prefilled(p)).right, "a good request behind them is answered rightly")


def _idle(trial: Trial) -> None:
    """The holder has nothing else to do when a lease expires, and when another is released."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair(decode_slots=1)
    trial.connected(p, d)
    left = trial.prefilled(p)
    trial.world.pass_time(LEASE_S + 0.5)
    trial.expect(not trial.held(left), "a lease expires on an idle engine")
    trial.fill(d)
    leg = trial.prefilled(p)
    reader = trial.decode(d, leg)
    trial.world.pass_time(1.0)
    trial.world.abort(reader)
    trial.world.pass_time(PROMPT_S)
    trial.expect(not trial.held(leg), "a lease is released on an idle engine")


def _late_report(trial: Trial) -> None:
    """A report arrives after the lease has expired."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair(decode_slots=1)
    trial.connected(p, d)
    leg = trial.prefilled(p)
    trial.world.pass_time(LEASE_S + 0.5)
    if trial.held(leg):
        raise Unfit("the lease did not expire")
    before = trial.world.metrics(p)
    reader = trial.decoded(d, leg)
    trial.expect(reader.end is not None, "a reader that comes too late comes to an end")
    wrong = reader.end is not None and reader.end.right is False
    trial.expect(not wrong, "and is not answered from what the blocks hold by then")
    if LATE in before:
        trial.world.over(trial.world.submit(p, trial.prompt(), max_tokens=1))  # some engines count when they next work
        grown = trial.world.metrics(p)[LATE] - before[LATE]
        trial.expect(grown >= 1, f"that it came too late is counted ({grown:g})")


def _reused(trial: Trial) -> None:
    """A reader comes too late, when its blocks have been given to others."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair(blocks=64)
    trial.connected(p, d)
    leg = trial.prefilled(p)
    trial.world.pass_time(LEASE_S + 0.5)
    for _ in range(8):
        trial.world.over(trial.world.submit(p, trial.prompt(500), max_tokens=1))
    reader = trial.decoded(d, leg)
    wrong = reader.end is not None and reader.end.right is False
    trial.expect(not wrong, "a reader that comes when its blocks are others' is not answered from them")
    trial.expect(reader.end is not None, "it comes to an end")


def _case(name: str, title: str, body: Body, twins: tuple[str, ...], source: Source = Source.USERS,
          needs: frozenset[Capability] = _LEASES) -> Case:  # fmt: skip
    return Case(name=name, title=title, source=source, body=body, twins=twins, needs=needs)


CASES: Final = (
    _case("KVC-REL-001.read", "The last read's report frees the blocks at once", _read, ("report_ignored",),
          Source.LEASE_DOCUMENT),
    _case("KVC-REL-002.queue", "An abort before scheduling frees the writer's blocks", _aborted_in_queue,
          ("abort_tells_nobody",)),
    _case("KVC-REL-002.door", "A refusal at the door frees the writer's blocks", _rejected, ("refusal_tells_nobody",)),
    _case("KVC-REL-003.hit", "A full hit in the own cache notifies without reading", _hit, ("hit_tells_nobody",),
          needs=frozenset({Capability.LEASES, Capability.PREFIX_HITS})),
    _case("KVC-REL-004.repeated", "A report that arrives again changes nothing", _repeated, ("late_report_ends",),
          needs=_PULL),
    _case("KVC-REL-004.early", "A report that arrives at once ends its lease all the same", _early_report,
          ("early_report_lost",), needs=_PULL),
    _case("KVC-REL-005.repeated", "A reader's repeated report counts once", _repeated_of_two, ("counts_messages",),
          needs=_PULL | {Capability.READERS}),
    _case("KVC-REL-006.damaged", "A damaged message is dropped and counted; the loop goes on", _damaged,
          ("damaged_ends",)),
    _case("KVC-LEASE-007.idle", "Expiry and release happen on an idle engine", _idle, ("idle_sleeps",)),
    _case("KVC-LEASE-005.late", "A report after expiry is counted, and its reader not answered wrongly", _late_report,
          ("late_uncounted",), Source.LEASE_DOCUMENT),
    _case("KVC-XFER-002.reused", "Blocks that were given to others are not read silently", _reused, ("no_fence",)),
)  # fmt: skip
