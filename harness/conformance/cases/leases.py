"""Chapter leases: what the prefill side keeps, for whom and for how long."""

from __future__ import annotations

from typing import Final

from faults.nixl.orders import Kind
from harness.conformance.case import Body, Case, Source
from harness.conformance.network import HOP_NS, Delivery, LinkPolicy, Message
from harness.conformance.subject import EXPIRED, Capability
from harness.conformance.trial import FOR_REMOTE, Trial, Unfit
from reference_impl.rules.clock import NS_PER_S

LEASE_S: Final = 6.0
_LEASES: Final = frozenset({Capability.LEASES})
FIELDS: Final = ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port", "tp_size")
"""What a hand-off must hold so that another engine can come for the blocks."""


def _grant(trial: Trial) -> None:
    """A prefill for a remote decode ends."""
    trial.terms(lease_s=LEASE_S)
    p, _ = trial.pair()
    leg = trial.prefilled(p)
    lacking = [name for name in FIELDS if (leg.hand_off or {}).get(name) in (None, "", [])]
    trial.expect(not lacking, f"the hand-off is complete (it lacks: {', '.join(lacking) or 'nothing'})")
    trial.expect(trial.held(leg), "its blocks are kept when the prefill has ended")
    trial.world.pass_time(LEASE_S * 0.8)
    trial.expect(trial.held(leg), f"they are kept {LEASE_S * 0.8:g} s later, before the lease's end")
    ids = (leg.hand_off or {}).get("remote_request_id")
    trial.expect(str(ids).startswith(leg.name), f"the hand-off names the holder's own request: {ids!r}")


def _other_ends(trial: Trial) -> None:
    """Prefills end without anybody to hand over to: one asks for none, one is aborted while it waits."""
    trial.terms(lease_s=LEASE_S)
    p, _ = trial.pair()
    plain = trial.world.submit(p, trial.prompt(), max_tokens=1)
    trial.world.over(plain)
    trial.world.step()
    trial.expect(plain.hand_off is None, "a request that asks for nothing is handed nothing")
    trial.expect(not trial.held(plain), "its blocks are free at once")
    gone = trial.world.submit(p, trial.prompt(), params=FOR_REMOTE)
    trial.world.abort(gone)
    trial.world.pass_time(0.5)
    trial.expect(not trial.held(gone), "an aborted prefill's blocks are free at once")
    trial.expect(gone.hand_off is None, "an aborted prefill hands nothing over")


def _aborts(trial: Trial) -> None:
    """Requests are aborted after none, one, two and more steps, on both sides."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair(decode_slots=2)
    for steps in range(6):
        first = trial.world.submit(p, trial.prompt(), params=FOR_REMOTE)
        source = trial.prefilled(p)
        second = trial.decode(d, source, max_tokens=50)
        for _ in range(steps):
            trial.world.step()
        for leg in (first, second):
            if leg.end is None:
                trial.world.abort(leg)
        trial.world.pass_time(0.3)
        held = [leg.name for leg in (first, second) if leg.end is not None and leg.hand_off is None and trial.held(leg)]
        trial.expect(
            not held, f"after {steps} steps an abort leaves nothing behind (held: {', '.join(held) or 'none'})"
        )
    last = trial.decoded(d, trial.prefilled(p))
    trial.expect(last.right, "a request behind them is answered rightly")


def _never_back(trial: Trial) -> None:
    """One heartbeat early in a lease, which alone would end it sooner; then none."""
    p, d = trial.busy(LEASE_S)
    leg = trial.prefilled(p)
    trial.world.network.link = only_first(Kind.HEARTBEAT, trial)
    trial.decode(d, leg)
    trial.world.pass_time(LEASE_S * 0.9)
    if not trial.world.watch.sent_by(d.name, Kind.HEARTBEAT):
        raise Unfit("no heartbeat was sent")
    trial.expect(trial.held(leg), f"the lease still lives at {LEASE_S * 0.9:g} s, after a heartbeat at its beginning")


def only_first(kind: Kind, trial: Trial) -> LinkPolicy:
    """Return a link that lets the first message of a kind through, and loses the others."""
    seen = 0

    def link(message: Message) -> list[Delivery]:
        nonlocal seen
        if trial.subject.meaning(message.data).kind is kind:
            seen += 1
            if seen > 1:
                return []
        return [(HOP_NS, message.data)]

    return link


def losing(kind: Kind, trial: Trial) -> LinkPolicy:
    """Return a link that loses every message of a kind."""

    def link(message: Message) -> list[Delivery]:
        return [] if trial.subject.meaning(message.data).kind is kind else [(HOP_NS, message.data)]

    return link


def _unknown(trial: Trial) -> None:
    """A heartbeat comes for a lease that has ended; then a new request of no relation is prefilled."""
    p, d = trial.busy(LEASE_S)
    leg = trial.prefilled(p)
    reader = trial.decode(d, leg)
    trial.world.pass_time(LEASE_S / 2)
    beats = [m for m in trial.world.watch.sent_by(d.name, Kind.HEARTBEAT) if leg.name in m.meaning.requests]
    if not beats:
        raise Unfit("no heartbeat was sent")
    trial.world.abort(reader)
    if not trial.world.until(lambda: not trial.held(leg), 2 * LEASE_S):
        raise Unfit("the lease did not end")
    before = trial.world.metrics(p)
    trial.world.inject(d, p, beats[-1].data)
    trial.world.pass_time(1.0)
    trial.expect(not trial.held(leg), "a heartbeat for a lease that has ended holds nothing")
    trial.world.pass_time(LEASE_S)
    if EXPIRED in before:
        grown = trial.world.metrics(p)[EXPIRED] - before[EXPIRED]
        trial.expect(grown == 0, f"and nothing expires because of it ({grown:g} counted)")


def _expiry(trial: Trial) -> None:
    """Nobody ever comes for a hand-off."""
    trial.terms(lease_s=LEASE_S)
    p, _ = trial.pair()
    before = trial.world.metrics(p)
    leg = trial.prefilled(p)
    trial.world.pass_time(LEASE_S * 0.9)
    trial.expect(trial.held(leg), f"the lease lives at {LEASE_S * 0.9:g} s")
    trial.world.pass_time(LEASE_S * 0.1 + 0.5)
    trial.expect(not trial.held(leg), "its blocks are free when the lease is over")
    if EXPIRED in before:
        grown = trial.world.metrics(p)[EXPIRED] - before[EXPIRED]
        trial.expect(grown == 1, f"one expiry is counted ({grown:g})")


def _all_looked_at(trial: Trial) -> None:
    """An older lease is renewed, a younger one is not."""
    p, d = trial.busy(LEASE_S)
    kept = trial.prefilled(p)
    trial.decode(d, kept)
    left = trial.prefilled(p)
    trial.world.pass_time(LEASE_S + 0.5)
    trial.expect(trial.held(kept), "the renewed lease in front lives")
    trial.expect(not trial.held(left), "the one behind it, which nobody renews, has ended in its time")


def _inbox_first(trial: Trial) -> None:
    """The holder stands still until after a lease's end, with a renewal in its inbox that came in time."""
    p, d = trial.busy(LEASE_S)
    leg = trial.prefilled(p)
    reader = trial.decode(d, leg)
    trial.world.pass_time(LEASE_S / 2)
    trial.world.freeze(p)
    trial.world.pass_time(LEASE_S)
    waiting = [m for m in trial.world.watch.sent_by(d.name, Kind.HEARTBEAT) if leg.name in m.meaning.requests]
    if not waiting or waiting[-1].t_ns < trial.world.network.now_ns - LEASE_S * NS_PER_S / 2:
        raise Unfit("no renewal waits in the inbox")
    trial.world.thaw(p)
    trial.world.step()
    trial.world.step()
    trial.expect(trial.held(leg), "what waits in the inbox is read before expiry is judged: the lease lives")
    trial.world.abort(reader)


def _queued_for_long(trial: Trial) -> None:
    """A reader waits in the decode side's queue for ten lease lengths."""
    p, d = trial.busy(LEASE_S)
    leg = trial.prefilled(p)
    reader = trial.decode(d, leg)
    for part in range(1, 11):
        trial.world.pass_time(LEASE_S, step_ns=NS_PER_S // 10)
        if reader.end is not None:
            raise Unfit(f"the reader was not kept waiting: it ended after {part} lease lengths")
        if not trial.expect(trial.held(leg), f"its lease lives after {part} lease lengths in the queue"):
            return
    trial.world.until(lambda: reader.end is not None, 120, step_ns=NS_PER_S // 10)
    trial.expect(reader.right, "it is answered rightly in the end")
    loaded = reader.end.loaded if reader.end else 0
    trial.expect(loaded > 0, f"from what the lease kept for it ({loaded} tokens)")


def _crash(trial: Trial) -> None:
    """The reader dies in the queue."""
    p, d = trial.busy(LEASE_S)
    leg = trial.prefilled(p)
    trial.decode(d, leg)
    trial.world.pass_time(LEASE_S * 1.5)
    trial.expect(trial.held(leg), "the lease lives while its reader does")
    trial.world.crash(d)
    trial.world.pass_time(LEASE_S * 2 / 3 + 0.5)
    trial.expect(not trial.held(leg), "it is over one extension after its reader's death")


def _odd_duration(trial: Trial) -> None:
    """A duration that is no multiple of six, with a reader that queues."""
    p, d = trial.busy(5.0)
    leg = trial.prefilled(p)
    reader = trial.decode(d, leg)
    trial.world.pass_time(20.0, step_ns=NS_PER_S // 10)
    trial.expect(trial.held(leg), "a lease of 5 s lives for 20 s while its reader queues")
    trial.world.abort(reader)


def _short_duration(trial: Trial) -> None:
    """The shortest duration in whole seconds."""
    p, d = trial.busy(1.0)
    leg = trial.prefilled(p)
    reader = trial.decode(d, leg)
    trial.world.pass_time(5.0)
    trial.expect(trial.held(leg), "a lease of 1 s lives for 5 s while its reader queues")
    trial.world.abort(reader)


def _unlike_durations(trial: Trial) -> None:
    """The two sides were started with unlike lease durations."""
    from harness.conformance.subject import Role, Terms

    trial.terms(lease_s=LEASE_S)
    p = trial.world.start("p", Role.PREFILL, blocks=128)
    d = trial.world.start("d", Role.DECODE, terms=Terms(lease_s=120.0), slots=1, blocks=128)
    leg = trial.prefilled(p)
    first = trial.decode(d, leg)
    trial.world.over(first, limit_s=90)
    if first.right and first.end is not None and not first.end.loaded:
        trial.expect(True, "the sides find out that their terms differ, and nothing is read")
        return
    trial.fill(d)
    leg = trial.prefilled(p)
    reader = trial.decode(d, leg)
    trial.world.pass_time(3 * LEASE_S, step_ns=NS_PER_S // 10)
    trial.expect(
        trial.held(leg),
        "the sides agree on the terms, or refuse each other: a lease of 6 s lives while its reader, told 120 s, queues",
    )
    trial.world.abort(reader)


def _many_ids(trial: Trial) -> None:
    """Requests whose ids hold any printable characters."""
    p, d = trial.busy(LEASE_S)
    names = ["plain", "with,comma", "with:colon", "HB:like-a-heartbeat", "1:2", "x" * 100, "~!@#$%^&*()"]
    legs = [trial.prefilled(p, name=name) for name in names]
    readers = [trial.decode(d, leg) for leg in legs]
    trial.world.pass_time(2 * LEASE_S)
    lost = [leg.name[:24] for leg in legs if not trial.held(leg)]
    trial.expect(
        not lost,
        f"every queued reader's lease lives, whatever its request is called (lost: {', '.join(lost) or 'none'})",
    )
    trial.empty()
    trial.world.over(*readers, limit_s=60)
    wrong = [reader.name for reader in readers if not reader.right]
    trial.expect(not wrong, "every one of them is answered rightly")
    trial.world.pass_time(1.0)
    kept = [leg.name[:24] for leg in legs if trial.held(leg)]
    trial.expect(not kept, f"every one's blocks are free when it has been read (kept: {', '.join(kept) or 'none'})")


def _case(
    name: str, title: str, body: Body, twins: tuple[str, ...], source: Source = Source.LEASE_DOCUMENT,
    needs: frozenset[Capability] = _LEASES,
) -> Case:  # fmt: skip
    return Case(name=name, title=title, source=source, body=body, twins=twins, needs=needs)


CASES: Final = (
    _case("KVC-LEASE-001.grant", "A prefill for a remote decode keeps its blocks and hands them over", _grant,
          ("no_lease", "hand_off_lacks_port")),
    _case("KVC-LEASE-002.other-ends", "A prefill that ends in any other way frees at once", _other_ends,
          ("abort_leaks",), needs=frozenset()),
    _case("KVC-LEASE-002.aborts", "An abort at any moment frees everything", _aborts, ("abort_leaks",), Source.USERS,
          needs=frozenset()),
    _case("KVC-LEASE-003.never-back", "A heartbeat never moves a deadline back", _never_back, ("extend_back",)),
    _case("KVC-LEASE-004.unknown", "A heartbeat for no lease creates none", _unknown, ("heartbeat_creates",)),
    _case("KVC-LEASE-005.expiry", "Without a heartbeat the lease ends at its deadline", _expiry,
          ("expiry_twice", "lease_forever")),
    _case("KVC-LEASE-006.all-looked-at", "A renewed lease in front hides no expired one", _all_looked_at,
          ("first_only",), Source.USERS),
    _case("KVC-LEASE-008.inbox-first", "What waits in the inbox is read before expiry is judged", _inbox_first,
          ("expiry_first",), Source.USERS),
    _case("KVC-LEASE-009.crash", "After a reader's crash the blocks are free within one extension", _crash,
          ("lease_forever",)),
    _case("KVC-LEASE-010.queued", "A reader that queues for ten lease lengths keeps its lease", _queued_for_long,
          ("no_renewal",)),
    _case("KVC-LEASE-010.odd-duration", "A lease of an odd duration is renewed in time", _odd_duration,
          ("no_renewal",), Source.OURS),
    _case("KVC-LEASE-010.short-duration", "A lease of one second is renewed in time", _short_duration,
          ("no_renewal",), Source.OURS),
    _case("KVC-LEASE-010.unlike-durations", "Sides with unlike durations agree, or refuse each other",
          _unlike_durations, ("own_interval",), Source.OURS),
    _case("KVC-LEASE-010.any-id", "Leases live and end for requests of any name", _many_ids, ("comma_ids",),
          Source.OURS),
)  # fmt: skip
