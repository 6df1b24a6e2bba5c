"""The world: whose fault is what is raised, what dies with an engine, and that the watch accuses nobody falsely."""

from __future__ import annotations

import pytest

from harness.conformance.case import Case, Source
from harness.conformance.clocks import Skew
from harness.conformance.network import ReadPlan
from harness.conformance.subject import How, Misuse, ReadState, Refused, Role, Terms
from harness.conformance.subjects.reference import ReferenceEngine, ReferenceSubject
from harness.conformance.trial import FOR_REMOTE, Trial, Unfit, tried
from harness.conformance.world import EngineDied, World
from harness.verdicts import Verdict
from reference_impl.rules.clock import NS_PER_S


def world() -> World:
    """Return a small one."""
    return World(ReferenceSubject(), 3, Terms(lease_s=6.0))


def test_what_a_connector_raises_ends_its_engine_and_is_a_breach(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_self: object) -> None:
        raise Misuse("the transport says no")

    made = world()
    p = made.start("p", Role.PREFILL)
    leg = made.submit(p, [1] * 40, params=FOR_REMOTE)
    monkeypatch.setattr(ReferenceEngine, "step", broken)
    made.step()
    assert not p.alive
    assert [b.rule for b in made.breaches] == ["R1"]
    assert "the transport says no" in made.breaches[0].what
    assert leg.end is not None
    assert leg.end.how is How.FAILED
    with pytest.raises(EngineDied):
        made.submit(p, [1] * 40)


def test_a_mistake_of_the_suite_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceEngine, "step", lambda self: self.no_such_thing)
    made = world()
    made.start("p", Role.PREFILL)
    from harness.conformance.subjects import reference

    def ours(self: ReferenceEngine) -> None:
        raise ValueError("a slip")

    ours.__code__ = ours.__code__.replace(co_filename=reference.__file__)
    monkeypatch.setattr(ReferenceEngine, "step", ours)
    with pytest.raises(ValueError, match="a slip"):
        made.step()
    assert not made.breaches


def test_nothing_of_a_dead_engine_is_sent_read_or_answered() -> None:
    made = world()
    p, d = made.start("p", Role.PREFILL), made.start("d", Role.DECODE)
    made.crash(p)
    assert not d.send("p.1", b"x")
    answers: list[bytes | None] = []
    d.ask(p.spec.port, b"x", lambda reply, _sent, _got: answers.append(reply))
    flight = d.read("p.1", lambda: pytest.fail("nothing may land"))
    made.pass_time(6)
    assert answers == [None]
    assert flight.state is ReadState.FAILED
    again = made.start("p", Role.PREFILL)
    assert again.name == "p.2"
    assert again.spec.port == p.spec.port


def test_clocks_differ_by_offset_and_drift() -> None:
    made = world()
    d = made.start("d", Role.DECODE, skew=Skew(offset_s=100.0, drift_ppm=200))
    before = d.now_ns()
    made.pass_time(1_000, step_ns=NS_PER_S)
    assert d.now_ns() - before == round(1_000.2 * NS_PER_S)
    assert d.now_ns() - made.network.now_ns > 100 * NS_PER_S


def test_a_frozen_engine_does_nothing_and_goes_on() -> None:
    made = world()
    p = made.start("p", Role.PREFILL)
    leg = made.submit(p, [1] * 40, params=FOR_REMOTE)
    made.freeze(p)
    made.pass_time(2)
    assert leg.end is None
    made.thaw(p)
    assert made.over(leg, limit_s=1)


def test_a_read_that_never_ends_ends_with_the_world() -> None:
    made = world()
    p, d = made.start("p", Role.PREFILL), made.start("d", Role.DECODE)
    made.network.reads = lambda _reader, _holder: ReadPlan(never_ends=True)
    flight = d.read(p.name, lambda: None)
    made.pass_time(1_000, step_ns=NS_PER_S)
    assert flight.state is ReadState.RUNNING
    made.drain()
    assert flight.state is ReadState.FAILED
    assert not made.breaches


def test_time_does_not_go_back_and_a_name_is_used_once() -> None:
    made = world()
    made.start("p", Role.PREFILL)
    with pytest.raises(ValueError, match="still lives"):
        made.start("p", Role.PREFILL)
    with pytest.raises(ValueError, match="back to"):
        made.network.deliver(0)


def _case(body: object) -> Case:
    return Case(name="KVC-LEASE-001.made-up", title="made up", source=Source.OURS, body=body, twins=())  # type: ignore[arg-type]


def unfit(_trial: Trial) -> None:
    """Cannot be done."""
    raise Unfit("nobody is there")


def refused(trial: Trial) -> None:
    """Asks for too much."""
    p, _ = trial.pair()
    trial.world.submit(p, trial.prompt(), max_tokens=100_000)


def silent(trial: Trial) -> None:
    """Expects nothing."""
    trial.pair()


def unmet(trial: Trial) -> None:
    """Expects what is not so."""
    trial.pair()
    trial.expect(False, "two is three")


def late_unfit(trial: Trial) -> None:
    """Sees something broken, and then cannot go on."""
    trial.expect(False, "it is broken")
    raise Unfit("no more to be done")


@pytest.mark.parametrize(
    ("body", "verdict", "words"),
    [
        (unfit, Verdict.INCONCLUSIVE, "nobody is there"),
        (refused, Verdict.INCONCLUSIVE, "refused at the door"),
        (silent, Verdict.INCONCLUSIVE, "expected nothing"),
        (unmet, Verdict.FAIL, "two is three"),
        (late_unfit, Verdict.FAIL, "it is broken"),
    ],
)
def test_verdicts_of_a_trial(body: object, verdict: Verdict, words: str) -> None:
    judged = tried(_case(body), ReferenceSubject(), 1)
    assert judged.verdict is verdict
    assert words in judged.found


def test_a_refusal_leaves_no_leg_behind() -> None:
    made = world()
    p = made.start("p", Role.PREFILL)
    with pytest.raises(Refused):
        made.submit(p, [1] * 40, max_tokens=100_000)
    assert not p.legs
    assert not made.legs
