"""Chapter turns: the decode side keeps a turn for the next one, and tells until when by its own clock."""

from __future__ import annotations

from typing import Final

from harness.conformance.case import Body, Case, Source
from harness.conformance.clocks import Skew
from harness.conformance.network import HOP_NS
from harness.conformance.subject import DECLINED, Capability, How, Params, Policy
from harness.conformance.trial import Trial, Unfit
from harness.conformance.world import Leg, Life
from reference_impl.rules.clock import NS_PER_S

LEASE_S: Final = 6.0
TTL_S: Final = 20.0
MARGIN_S: Final = 6.0
"""What a reader may keep clear of a turn's end: vLLM's five seconds, and a step."""
_TURNS: Final = frozenset({Capability.LEASES, Capability.TWO_TURN})
ANSWER_TOKENS: Final = 120
"""Longer than some blocks: only the decode side has their KV, so that the next turn's prefill must read them."""


def _turn(trial: Trial, p: Life, d: Life) -> Leg:
    first = trial.decoded(d, trial.prefilled(p), max_tokens=ANSWER_TOKENS)
    if not first.right or first.hand_off is None:
        raise Unfit(f"the first turn hands nothing over: {first.end}")
    return first


def _next(trial: Trial, p: Life, turn: Leg, renewed: Params | None = None) -> Leg:
    """Send the next turn's prefill: what was said, and more; with the hand-off of its renewal, if there was one."""
    end = turn.end
    said = list(end.answer) if end is not None else []
    prompt = [*turn.request.prompt, *said, *trial.prompt(80)]
    params = {**(renewed or turn.hand_off or {}), "do_remote_decode": True}
    return trial.world.submit(p, prompt, params=params, source=turn, max_tokens=1)


def _kept(trial: Trial) -> None:
    """A turn ends; nobody comes for it."""
    trial.terms(lease_s=LEASE_S, two_turn=True, ttl_s=TTL_S)
    p, d = trial.pair()
    turn = _turn(trial, p, d)
    trial.expect(bool((turn.hand_off or {}).get("remote_blocks_expiry_time")), "the turn's expiry is handed over")
    trial.world.pass_time(TTL_S * 0.9)
    trial.expect(trial.held(turn), f"its blocks are kept for {TTL_S * 0.9:g} s")
    trial.world.pass_time(TTL_S * 0.1 + 1.0)
    trial.expect(not trial.held(turn), f"and free when the {TTL_S:g} s are over")


def _skewed(offset_s: float, drift_ppm: int = 0, idle_s: float = 0.0) -> Body:
    def body(trial: Trial) -> None:
        """One turn goes on in time, one comes too late, whatever the clocks show."""
        trial.terms(lease_s=LEASE_S, two_turn=True, ttl_s=TTL_S)
        p, d = trial.pair(decode_skew=Skew(offset_s=offset_s, drift_ppm=drift_ppm))
        trial.connected(p, d)
        if idle_s:
            trial.world.pass_time(idle_s, step_ns=NS_PER_S)
        turn = _turn(trial, p, d)
        trial.world.pass_time(TTL_S - MARGIN_S - 4)
        second = _next(trial, p, turn)
        trial.world.over(second, limit_s=30)
        loaded = second.end.loaded if second.end else 0
        trial.expect(second.right, f"a turn that comes {MARGIN_S + 4:g} s before its end is answered rightly")
        trial.expect(loaded > 0, f"and is read, not computed anew ({loaded} tokens)")
        trial.world.pass_time(LEASE_S + 1)
        turn = _turn(trial, p, d)
        trial.world.pass_time(TTL_S + 1)
        reads_before = _reads(trial, p)
        late = _next(trial, p, turn)
        trial.world.over(late, limit_s=10)
        trial.expect(_reads(trial, p) == reads_before, "of a turn that comes too late nothing is read")
        trial.world.abort(late)
        trial.world.watch.excused.add(late.name)  # what else becomes of it is another rule's

    return body


def _crooked(trial: Trial) -> None:
    """The handshake's way back takes two seconds, the way there nothing; then a turn comes just too late."""
    trial.terms(lease_s=LEASE_S, two_turn=True, ttl_s=TTL_S)
    p, d = trial.pair(decode_skew=Skew(offset_s=-300.0))
    trial.world.network.asks = lambda _asker, _port: (HOP_NS, 2 * NS_PER_S)
    _shaken(trial, p, d)
    turn = _turn(trial, p, d)
    trial.world.pass_time(TTL_S + 0.4)
    _not_read(trial, p, turn, "half the round trip of a crooked handshake after its end")


def _shaken(trial: Trial, p: Life, d: Life) -> None:
    """Have the prefill side shake hands with the decode side: it reads a first turn."""
    turn = _turn(trial, p, d)
    second = _next(trial, p, turn)
    trial.world.over(second, limit_s=30)
    if not second.right:
        raise Unfit(f"the first turn that was read back went wrong: {second.end}")


def _not_read(trial: Trial, p: Life, turn: Leg, when: str) -> None:
    before = _reads(trial, p)
    late = _next(trial, p, turn)
    trial.world.over(late, limit_s=10)
    trial.expect(_reads(trial, p) == before, f"a turn that comes {when} is not read")
    trial.world.abort(late)
    trial.world.watch.excused.add(late.name)  # what else becomes of it is another rule's


def _aged(trial: Trial) -> None:
    """Clocks drift apart by 200 ppm for a day, in which the two sides meet every half hour."""
    trial.terms(lease_s=LEASE_S, two_turn=True, ttl_s=TTL_S)
    p, d = trial.pair(decode_skew=Skew(offset_s=30.0, drift_ppm=200))
    _shaken(trial, p, d)
    for _ in range(48):
        trial.world.pass_time(1_800, step_ns=30 * NS_PER_S)
        _shaken(trial, p, d)
    turn = _turn(trial, p, d)
    trial.world.pass_time(TTL_S + 3)
    _not_read(trial, p, turn, "3 s late after a day of drift")


def _renewed(trial: Trial) -> None:
    """A client keeps its session alive for three times the time to live, and then goes on."""
    trial.terms(lease_s=LEASE_S, two_turn=True, ttl_s=TTL_S)
    p, d = trial.pair(decode_skew=Skew(offset_s=5_000.0))
    turn = _turn(trial, p, d)
    given = None
    for _ in range(6):
        trial.world.pass_time(TTL_S / 2)
        given = trial.world.renew(turn)
        if not trial.expect(given is not None, "a turn that lives can be renewed"):
            return
    trial.expect(trial.held(turn), f"its blocks are kept after {3 * TTL_S:g} s")
    second = _next(trial, p, turn, given)
    trial.world.over(second, limit_s=30)
    loaded = second.end.loaded if second.end else 0
    trial.expect(second.right and loaded > 0, f"the next turn reads them ({loaded} tokens)")


def _reads(trial: Trial, life: Life) -> int:
    return sum(entry.what == "reads" and entry.who == life.name for entry in trial.world.timeline)


def _expired(policy: Policy) -> Body:
    def body(trial: Trial) -> None:
        """A turn comes too late."""
        trial.terms(lease_s=LEASE_S, two_turn=True, ttl_s=TTL_S, policy=policy)
        p, d = trial.pair()
        turn = _turn(trial, p, d)
        trial.world.pass_time(TTL_S + 1)
        before = trial.world.metrics(p)
        late = _next(trial, p, turn)
        trial.world.over(late, limit_s=60)
        end = late.end
        trial.expect(end is not None, "a turn that comes too late comes to an end within 60 s")
        trial.expect(end is not None and end.how is How.ANSWERED, "it is computed anew: slower, no error")
        if DECLINED in before:
            grown = trial.world.metrics(p)[DECLINED] - before[DECLINED]
            trial.expect(grown == 1, f"it is counted as expired ({grown:g})")

    return body


def _case(
    name: str, title: str, body: Body, twins: tuple[str, ...], source: Source = Source.LEASE_DOCUMENT,
    more: frozenset[Capability] = frozenset(),
) -> Case:  # fmt: skip
    return Case(name=name, title=title, source=source, body=body, twins=twins, needs=_TURNS | more)


CASES: Final = (
    _case("KVC-CLK-001.kept", "A turn's blocks live for their time, and their expiry is handed over", _kept,
          ("turn_forever", "no_expiry")),
    _case("KVC-CLK-002.ahead", "A clock that is 5,000 s ahead is corrected", _skewed(5_000.0), ("no_correction",)),
    _case("KVC-CLK-002.behind", "A clock that is 5,000 s behind is corrected", _skewed(-5_000.0), ("no_correction",)),
    _case("KVC-CLK-003.crooked", "The margin covers the error of a crooked handshake", _crooked, ("no_margin",)),
    _case("KVC-CLK-006.aged", "The offset is measured again as it ages", _aged, ("measured_once",), Source.OURS),
    _case("KVC-CLK-007.renewed", "A client that keeps its session alive keeps its blocks", _renewed,
          ("renewal_ignored",), more=frozenset({Capability.RENEWAL})),
    _case("KVC-CLK-005.days", "A clock that is six days behind is corrected", _skewed(-6 * 86_400.0),
          ("clock_sign",)),
    _case("KVC-CLK-005.drift", "A clock that drifts by 200 ppm for an hour is corrected", _skewed(30.0, 200, 3_600.0),
          ("clock_sign",)),
    _case("KVC-CLK-004.recompute", "An expired turn is computed anew (policy recompute)", _expired(Policy.RECOMPUTE),
          ("expired_hangs",)),
    _case("KVC-CLK-004.fail", "An expired turn is computed anew (policy fail)", _expired(Policy.FAIL),
          ("expired_fails",)),
)  # fmt: skip
