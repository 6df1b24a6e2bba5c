"""Chapter transfer: reads that fail, stall, are broken off, or meet the wrong peer."""

from __future__ import annotations

from typing import Final

from harness.conformance.case import Body, Case, Source
from harness.conformance.network import HOP_NS, ReadPlan
from harness.conformance.subject import FAILED_HANDSHAKES, FAILED_READS, Capability, How, Policy, Role
from harness.conformance.trial import Trial, Unfit
from reference_impl.rules.clock import NS_PER_S

LEASE_S: Final = 6.0
_LEASES: Final = frozenset({Capability.LEASES})


def _content(trial: Trial) -> None:
    """Prompts of many lengths are read."""
    p, d = trial.pair()
    for tokens in (1, 15, 16, 17, 31, 32, 33, 64, 100, 257):
        reader = trial.decoded(d, trial.prefilled(p, trial.prompt(tokens)))
        if not trial.expect(reader.right, f"a prompt of {tokens} tokens is decoded from what was written for it"):
            return
    loaded = [leg.end.loaded for leg in trial.world.legs if leg.life is d and leg.end]
    if not any(loaded):
        raise Unfit("nothing was read from another engine")


def _again(trial: Trial) -> None:
    """Four prompts, two of which begin alike, come in turns on both sides of small pools."""
    p, d = trial.pair(blocks=64)
    start = trial.prompt(96)
    prompts = [trial.prompt(150), trial.prompt(220), start + trial.prompt(60), start + trial.prompt(120)]
    wrong = []
    for number in range(12):
        prompt = prompts[number * 7 % 4]
        first = trial.prefilled(p, prompt)
        second = trial.decoded(d, first, max_tokens=12)
        wrong += [leg.name for leg in (first, second) if not leg.right]
    trial.expect(not wrong, f"every one of 12 is answered rightly (wrong: {', '.join(wrong) or 'none'})")


def _fails(policy: Policy) -> Body:
    def body(trial: Trial) -> None:
        """A read fails."""
        trial.terms(lease_s=LEASE_S, policy=policy)
        p, d = trial.pair()
        trial.connected(p, d)
        leg = trial.prefilled(p)
        before = trial.world.metrics(d)
        trial.world.network.reads = lambda _reader, _holder: ReadPlan(fails=True)
        reader = trial.decoded(d, leg)
        trial.world.network.reads = lambda _reader, _holder: ReadPlan()
        end = reader.end
        trial.expect(end is not None, "a request whose read fails comes to an end")
        how = How.ANSWERED if policy is Policy.RECOMPUTE else How.FAILED
        trial.expect(end is not None and end.how is how, f"by the policy {policy}: {end.how if end else 'no end'}")
        if policy is Policy.RECOMPUTE:
            trial.expect(reader.right, "what is computed anew is right")
        if FAILED_READS in before:
            grown = trial.world.metrics(d)[FAILED_READS] - before[FAILED_READS]
            trial.expect(grown == 1, f"one failed read is counted ({grown:g})")
        again = trial.decoded(d, trial.prefilled(p, leg.request.prompt))
        trial.expect(again.right, "the same prompt once more is answered rightly: no cache is poisoned")

    return body


def _never_ends(trial: Trial) -> None:
    """A read never ends."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair()
    trial.connected(p, d)
    leg = trial.prefilled(p)
    trial.world.network.reads = lambda _reader, _holder: ReadPlan(never_ends=True)
    reader = trial.decode(d, leg)
    trial.world.over(reader, limit_s=120)
    trial.expect(reader.end is not None, "a request whose read never ends comes to an end within 120 s")
    trial.world.network.reads = lambda _reader, _holder: ReadPlan()
    beside = trial.decoded(d, trial.prefilled(p))
    trial.expect(beside.right, "another request is served beside it")


def _slow(trial: Trial) -> None:
    """A read takes longer than a lease."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair()
    trial.connected(p, d)
    leg = trial.prefilled(p)
    trial.world.network.reads = lambda _reader, _holder: ReadPlan(takes_ns=round(0.5 * LEASE_S * NS_PER_S))
    reader = trial.decode(d, leg)
    trial.world.over(reader, limit_s=60)
    trial.expect(reader.right, f"a read of {0.5 * LEASE_S:g} s is waited for, and its request answered rightly")
    loaded = reader.end.loaded if reader.end else 0
    trial.expect(loaded > 0, f"from what was read ({loaded} tokens)")


def _aborted(trial: Trial) -> None:
    """A client goes while its KV is on its way; then others use what blocks there are."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair(blocks=48)
    trial.connected(p, d)
    leg = trial.prefilled(p)
    trial.world.network.reads = lambda _reader, _holder: ReadPlan(takes_ns=2 * NS_PER_S)
    reader = trial.decode(d, leg)
    trial.world.pass_time(0.5)
    trial.world.abort(reader)
    trial.world.network.reads = lambda _reader, _holder: ReadPlan(takes_ns=HOP_NS)
    others = [trial.world.submit(d, trial.prompt(220), max_tokens=60) for _ in range(3)]
    trial.world.over(*others, limit_s=60)
    wrong = [leg.name for leg in others if not leg.right]
    trial.expect(not wrong, f"nothing lands in the blocks of those who come next (wrong: {', '.join(wrong) or 'none'})")
    trial.world.pass_time(LEASE_S)
    trial.expect(not trial.held(leg), "the holder's blocks come back")


def _holder_dies(trial: Trial) -> None:
    """The holder dies in the middle of a read, and comes back at its address."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair()
    trial.connected(p, d)
    leg, later = trial.prefilled(p), trial.prefilled(p)
    trial.world.network.reads = lambda _reader, _holder: ReadPlan(takes_ns=2 * NS_PER_S)
    reader = trial.decode(d, leg)
    trial.world.pass_time(0.5)
    trial.world.crash(p)
    trial.world.over(reader, limit_s=120)
    trial.expect(reader.end is not None, "a request whose holder dies in the middle of its read comes to an end")
    trial.expect(reader.end is None or reader.end.right is not False, "and is not answered wrongly")
    trial.world.network.reads = lambda _reader, _holder: ReadPlan()
    born = trial.world.start("p", Role.PREFILL)
    late = trial.decoded(d, later, limit_s=120)
    trial.expect(late.end is not None, "one that holds a hand-off of the dead engine comes to an end")
    trial.expect(late.end is None or late.end.right is not False, "and reads nothing of its successor")
    fresh = trial.decoded(d, trial.prefilled(born), limit_s=60)
    trial.expect(fresh.right, "the successor at the same address is recognised as new, and served from")


def _handshake_fails(trial: Trial) -> None:
    """The first handshake gets no answer, the next ones do."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair()
    leg = trial.prefilled(p)
    before = trial.world.metrics(d)
    trial.world.network.asks = lambda _asker, _port: None
    first = trial.decode(d, leg)
    trial.world.over(first, limit_s=90)
    trial.expect(first.end is not None, "a request whose handshake fails comes to an end")
    trial.expect(first.right, "it is computed anew")
    if FAILED_HANDSHAKES in before:
        grown = trial.world.metrics(d)[FAILED_HANDSHAKES] - before[FAILED_HANDSHAKES]
        trial.expect(grown >= 1, f"a failed handshake is counted ({grown:g})")
    trial.world.network.asks = lambda _asker, _port: (HOP_NS, HOP_NS)
    trial.world.pass_time(30)
    second = trial.decoded(d, trial.prefilled(p))
    loaded = second.end.loaded if second.end else 0
    trial.expect(second.right and loaded > 0, f"the next request tries again, and reads ({loaded} tokens)")


def _unlike(trial: Trial) -> None:
    """The two sides serve unlike models."""
    trial.terms(lease_s=LEASE_S)
    p = trial.world.start("p", Role.PREFILL)
    d = trial.world.start("d", Role.DECODE, model="another")
    leg = trial.prefilled(p)
    reader = trial.decoded(d, leg, limit_s=90)
    trial.expect(reader.end is not None, "a request whose holder serves another model comes to an end")
    read = any(entry.what == "reads" for entry in trial.world.timeline)
    trial.expect(not read, "nothing is read")
    trial.expect(reader.right, "it is computed anew")


def _hostile_questions(trial: Trial) -> None:
    """Whoever listens for handshakes is asked nonsense."""
    trial.terms(lease_s=LEASE_S)
    p, d = trial.pair()
    for question in (b"", b"\xc1", b"\x93\xa1x\x00\x00", b"\x90", b"\x93\xacget_meta_msg\x00\x7f", b"\x92\xa1x\x00",
                     trial.world.chance.bytes(40)):  # fmt: skip
        d.ask(p.spec.port, question, lambda *_: None)
        trial.world.pass_time(0.2)
        if not p.alive:
            break
    trial.expect(p.alive, "no question ends the one who listens")
    if p.alive:
        trial.expect(trial.decoded(d, trial.prefilled(p)).right, "a good handshake behind them is answered")


def _case(name: str, title: str, body: Body, twins: tuple[str, ...], source: Source = Source.USERS,
          needs: frozenset[Capability] = _LEASES) -> Case:  # fmt: skip
    return Case(name=name, title=title, source=source, body=body, twins=twins, needs=needs)


CASES: Final = (
    _case("KVC-XFER-001.content", "What is decoded from is what was written for that prompt", _content,
          ("reads_wrong_block",), Source.LEASE_DOCUMENT, frozenset()),
    _case("KVC-XFER-001.again", "Prompts that come again are answered rightly, whatever was recycled meanwhile", _again,
          ("reads_wrong_block",), Source.OURS, frozenset()),
    _case("KVC-XFER-002.recompute", "A failed read is computed anew, and poisons no cache", _fails(Policy.RECOMPUTE),
          ("failed_read_counts_as_done",)),
    _case("KVC-XFER-002.fail", "A failed read fails its request, where the policy says so", _fails(Policy.FAIL),
          ("always_recomputes",)),
    _case("KVC-XFER-003.aborted", "Destination blocks stay reserved until the transfer has ended", _aborted,
          ("destination_free_at_abort",)),
    _case("KVC-XFER-004.never-ends", "A transfer that never completes ends at a deadline", _never_ends,
          ("no_read_limit",)),
    _case("KVC-XFER-004.slow", "A slow transfer is waited for", _slow, ("impatient",), Source.OURS),
    _case("KVC-HSK-001.unlike", "An incompatible peer is refused", _unlike, ("anybody_suits",), Source.USERS),
    _case("KVC-HSK-002.fails", "A failed handshake fails only what waits for it, and can be tried again",
          _handshake_fails, ("handshake_once",)),
    _case("KVC-HSK-002.nonsense", "No question ends the listener", _hostile_questions, ("question_ends",)),
    _case("KVC-HSK-003.restarted", "A writer restarted on the same address is recognised as new", _holder_dies,
          ("takes_successor",)),
)  # fmt: skip
