"""Chapter heartbeats: how the decode side keeps alive what waits for it."""

from __future__ import annotations

import itertools
from typing import Final

from faults.nixl.orders import Kind
from harness.conformance.case import Body, Case, Level, Source
from harness.conformance.subject import UNSENT_HEARTBEATS, Capability, Role
from harness.conformance.trial import Trial, Unfit
from harness.conformance.world import STEP_NS
from reference_impl.rules.clock import NS_PER_S, s_to_ns

LEASE_S: Final = 6.0
INTERVAL_S: Final = LEASE_S / 6
SHAKE_S: Final = 0.6
_LEASES: Final = frozenset({Capability.LEASES})


def _from_arrival(trial: Trial) -> None:
    """A request waits in the queue and is never scheduled."""
    p, d = trial.busy(LEASE_S)
    leg = trial.prefilled(p)
    reader = trial.decode(d, leg)
    sent_ns = trial.world.network.now_ns
    trial.world.pass_time(LEASE_S / 2)
    beats = [m for m in trial.world.watch.sent_by(d.name, Kind.HEARTBEAT) if leg.name in m.meaning.requests]
    if reader.end is not None:
        raise Unfit("the reader did not have to wait")
    late_s = (beats[0].t_ns - sent_ns) / NS_PER_S if beats else float("inf")
    trial.expect(bool(beats), "a request that waits in the queue is renewed before it is scheduled")
    trial.expect(late_s <= INTERVAL_S + 0.2, f"for the first time within an interval ({late_s:.2f} s)")
    trial.world.abort(reader)


def _together(trial: Trial) -> None:
    """Five requests of one holder wait."""
    p, d = trial.busy(LEASE_S)
    legs = [trial.prefilled(p) for _ in range(5)]
    readers = [trial.decode(d, leg) for leg in legs]
    trial.world.pass_time(1.5 * INTERVAL_S)
    start_ns = trial.world.network.now_ns
    trial.world.pass_time(10 * INTERVAL_S)
    beats = [m for m in trial.world.watch.sent_by(d.name, Kind.HEARTBEAT) if m.t_ns > start_ns]
    if not beats:
        raise Unfit("no heartbeat was sent")
    whole = sum({leg.name for leg in legs} <= set(m.meaning.requests) for m in beats)
    trial.expect(whole == len(beats), f"each of {len(beats)} messages renews all five ({whole} do)")
    trial.expect(len(beats) <= 11, f"in ten intervals no more than eleven messages leave ({len(beats)})")
    for reader in readers:
        trial.world.abort(reader)


def _apart(trial: Trial) -> None:
    """A request waits for ten intervals, and others come meanwhile."""
    p, d = trial.busy(LEASE_S)
    readers = []
    for _ in range(10):
        readers.append(trial.decode(d, trial.prefilled(p)))
        trial.world.pass_time(INTERVAL_S * 0.9)
    beats = trial.world.watch.sent_by(d.name, Kind.HEARTBEAT)
    gaps = [(b.t_ns - a.t_ns) / NS_PER_S for a, b in itertools.pairwise(beats)]
    if len(gaps) < 5:
        raise Unfit(f"only {len(beats)} heartbeats were sent")
    least = min(gaps)
    trial.expect(least >= INTERVAL_S - 1e-6, f"messages are a sixth of the duration apart at least ({least:.3f} s)")
    for reader in readers:
        trial.world.abort(reader)


def _first(trial: Trial) -> None:
    """The first request for a holder arrives; the handshake with it takes a while."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair(decode_slots=1)
    trial.fill(d)
    leg = trial.prefilled(p)
    slow_ns = s_to_ns(SHAKE_S / 2)
    trial.world.network.asks = lambda _asker, _port: (slow_ns, slow_ns)
    reader = trial.decode(d, leg)
    sent_ns = trial.world.network.now_ns
    trial.world.pass_time(INTERVAL_S * 2 + SHAKE_S + 1)
    beats = trial.world.watch.sent_by(d.name, Kind.HEARTBEAT)
    late_s = (beats[0].t_ns - sent_ns) / NS_PER_S if beats else float("inf")
    limit_s = INTERVAL_S + SHAKE_S + 0.25
    trial.expect(late_s <= limit_s, f"the first heartbeat leaves within an interval and the handshake's time "
                 f"({late_s:.2f} s, at most {limit_s:.2f})")  # fmt: skip
    trial.world.abort(reader)


def _never_blocks(trial: Trial) -> None:
    """A handshake takes four seconds, while another request is being answered."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair(decode_slots=2)
    leg = trial.prefilled(p)
    trial.world.network.asks = lambda _asker, _port: (s_to_ns(2.0), s_to_ns(2.0))
    local = trial.world.submit(d, trial.prompt(), max_tokens=40)
    trial.world.pass_time(0.2)
    reader = trial.decode(d, leg)
    begun_ns = trial.world.network.now_ns
    trial.world.over(local, limit_s=20)
    took_s = (local.end_ns - begun_ns) / NS_PER_S
    limit_s = 40 * STEP_NS / NS_PER_S + 0.5
    trial.expect(local.right and took_s <= limit_s, f"another request's 40 tokens come one a step meanwhile "
                 f"({took_s:.2f} s, at most {limit_s:.2f})")  # fmt: skip
    trial.world.over(reader, limit_s=30)
    trial.expect(reader.right, "the request that waited for the handshake is answered rightly")


def _ranks(prefill: int, decode: int) -> Body:
    def body(trial: Trial) -> None:
        """The two sides have unlike numbers of ranks."""
        trial.terms(lease_s=LEASE_S)
        p = trial.world.start("p", Role.PREFILL, blocks=192, ranks=prefill)
        d = trial.world.start("d", Role.DECODE, blocks=192, slots=1, ranks=decode)
        trial.connected(p, d)
        trial.fill(d)
        leg = trial.prefilled(p)
        reader = trial.decode(d, leg)
        trial.world.pass_time(3 * LEASE_S, step_ns=NS_PER_S // 10)
        trial.expect(trial.held(leg), f"{prefill} ranks keep what {decode} of a queued reader renew")
        trial.empty()
        trial.world.over(reader, limit_s=30)
        loaded = reader.end.loaded if reader.end else 0
        trial.expect(reader.right and loaded > 0, f"every rank's part is read ({loaded} tokens)")
        trial.world.pass_time(1.0)
        trial.expect(not trial.held(leg), "and released when the last rank has read")

    return body


def _stops(trial: Trial) -> None:
    """One request is read, one is aborted; neither is named again."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair(decode_slots=2)
    trial.connected(p, d)
    read, gone = trial.prefilled(p), trial.prefilled(p)
    reader = trial.decode(d, read, max_tokens=400)
    trial.world.pass_time(1.0)
    trial.fill(d)
    aborted = trial.decode(d, gone)
    trial.world.pass_time(INTERVAL_S + 0.2)
    trial.world.abort(aborted)
    trial.world.pass_time(0.2)
    start_ns = trial.world.network.now_ns
    trial.world.pass_time(5 * INTERVAL_S)
    named = {
        r for m in trial.world.watch.sent_by(d.name, Kind.HEARTBEAT) if m.t_ns > start_ns for r in m.meaning.requests
    }
    trial.expect(read.name not in named, "what has been read is renewed no more")
    trial.expect(gone.name not in named, "what was aborted is renewed no more")
    trial.world.abort(reader)


def _shakes_hands(trial: Trial) -> None:
    """A request waits for a holder that the decode side has never met."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair(decode_slots=1)
    trial.fill(d)
    leg = trial.prefilled(p)
    reader = trial.decode(d, leg)
    trial.world.pass_time(2 * LEASE_S)
    if reader.end is not None:
        raise Unfit("the reader did not have to wait")
    trial.expect(trial.held(leg), "a stranger's lease is renewed: the handshake starts by itself")
    trial.world.abort(reader)


def _dead_peer(trial: Trial) -> None:
    """Requests wait for a holder that has died, and for one that lives and was never met."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair(decode_slots=1)
    other = trial.world.start("q", Role.PREFILL, blocks=192)
    trial.connected(p, d)
    trial.fill(d)
    lost = [trial.prefilled(other) for _ in range(3)]
    trial.world.crash(other)
    readers = [trial.decode(d, leg) for leg in lost]
    trial.world.pass_time(0.3)
    healthy = trial.world.start("h", Role.PREFILL, blocks=192)
    leg = trial.prefilled(healthy)
    readers.append(trial.decode(d, leg))
    for part in range(1, 7):
        trial.world.pass_time(LEASE_S / 2)
        if not trial.expect(
            trial.held(leg), f"a healthy holder's lease lives {part * LEASE_S / 2:g} s beside a dead one"
        ):
            break
    for reader in readers:
        trial.world.abort(reader)


def _unsent_is_counted(trial: Trial) -> None:
    """The holder dies; its reader's heartbeats cannot be sent any more."""
    p, d = trial.busy(LEASE_S)
    leg = trial.prefilled(p)
    reader = trial.decode(d, leg)
    trial.world.pass_time(2 * INTERVAL_S)
    before = trial.world.metrics(d)
    if UNSENT_HEARTBEATS not in before:
        trial.expect(False, "there is a counter of heartbeats that could not be sent")
        return
    trial.world.crash(p)
    trial.world.pass_time(5 * INTERVAL_S)
    grown = trial.world.metrics(d)[UNSENT_HEARTBEATS] - before[UNSENT_HEARTBEATS]
    trial.expect(grown >= 1, f"a heartbeat that cannot be sent is counted ({grown:g} in five intervals)")
    trial.world.abort(reader)


def _samples(trial: Trial) -> None:
    """Two samples of one prompt; the first has been read, and the other still waits."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair(decode_slots=1)
    trial.connected(p, d)
    trial.world.watch.expects_release = False
    leg = trial.prefilled(p, remote_readers=2) if trial.subject.name == "reference" else trial.prefilled(p)
    first = trial.decode(d, leg, max_tokens=500)
    trial.world.pass_time(0.2)
    second = trial.decode(d, leg)
    trial.world.pass_time(1.0)
    trial.expect(trial.held(leg), "the blocks are kept while a second sample of the prompt waits")
    trial.world.pass_time(2 * LEASE_S)
    if second.end is not None or first.end is not None:
        raise Unfit("the second sample did not have to wait")
    trial.expect(trial.held(leg), "and its lease is renewed")
    trial.world.abort(first)
    trial.world.over(second, limit_s=30)
    trial.expect(second.right, "the second sample is answered rightly")


def _case(name: str, title: str, body: Body, twins: tuple[str, ...], source: Source = Source.LEASE_DOCUMENT,
          level: Level = Level.MUST, needs: frozenset[Capability] = _LEASES) -> Case:  # fmt: skip
    return Case(name=name, title=title, source=source, level=level, body=body, twins=twins, needs=needs)


CASES: Final = (
    _case("KVC-HB-001.from-arrival", "A request is renewed from when it enters the queue", _from_arrival,
          ("tracked_when_scheduled",)),
    _case("KVC-HB-002.together", "One message an interval renews all requests of a holder", _together,
          ("one_message_each",)),
    _case("KVC-HB-003.apart", "Heartbeats are a sixth of the duration apart at least", _apart, ("no_pacing",)),
    _case("KVC-HB-006.first", "The first heartbeat leaves within one interval plus the handshake's time", _first,
          ("first_late",), level=Level.SHOULD),
    _case("KVC-HB-007.more-prefill", "With more ranks on the prefill side every one of them is renewed", _ranks(4, 1),
          ("no_renewal", "ranks_swapped"), needs=frozenset({Capability.LEASES, Capability.RANKS})),
    _case("KVC-HB-007.more-decode", "With more ranks on the decode side repeats are harmless", _ranks(1, 4),
          ("no_renewal", "ranks_swapped"), needs=frozenset({Capability.LEASES, Capability.RANKS})),
    _case("KVC-HB-009.never-blocks", "A handshake never blocks the step loop", _never_blocks, ("shaking_blocks",)),
    _case("KVC-HB-004.stops", "What was read or aborted is renewed no more", _stops, ("never_untracked",)),
    _case("KVC-HB-005.shakes-hands", "The handshake starts by itself", _shakes_hands, ("handshake_when_scheduled",)),
    _case("KVC-HB-005.dead-peer", "A dead holder delays no healthy one", _dead_peer, ("one_handshake_at_a_time",),
          Source.USERS),
    _case("KVC-HB-008.unsent", "A heartbeat that cannot be sent is counted", _unsent_is_counted, ("unsent_uncounted",),
          Source.USERS, Level.SHOULD, frozenset({Capability.LEASES, Capability.METRICS})),
    _case("KVC-REL-005.samples", "With several readers the release waits for all of them", _samples,
          ("first_report_releases", "readers_share_tracking"), Source.USERS,
          needs=frozenset({Capability.LEASES, Capability.READERS})),
)  # fmt: skip
