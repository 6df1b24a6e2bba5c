"""One case on one subject: its world, what the body expects to see there, and the verdict."""

from __future__ import annotations

from typing import Final

from harness.conformance.case import Case
from harness.conformance.checked import checked
from harness.conformance.clocks import Skew
from harness.conformance.subject import Capability, Params, Refused, Role, Subject, Terms
from harness.conformance.timeline import Entry
from harness.conformance.watch import Breach
from harness.conformance.world import EngineDied, Leg, Life, World
from harness.verdicts import Verdict

FOR_REMOTE: Params = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a router asks of the first leg."""
PROMPT_TOKENS: Final = 200
VOCABULARY: Final = 4_000


class Unfit(Exception):
    """The case could not do what it is about, so nothing can be concluded; the message says what."""


class Trial:
    """See above. The usual world has one prefill and one decode engine, `p` and `d`."""

    def __init__(self, subject: Subject, seed: int, terms: Terms | None = None) -> None:
        self.subject = checked(subject)
        self.seed = seed
        self.world = World(subject, seed, terms)
        self.unmet: list[str] = []
        self.met: list[str] = []
        self._prompts = 0
        self._fillers: list[Leg] = []

    # Building.

    def terms(self, **changes: object) -> None:
        """Begin with other terms; before the first engine."""
        if self.world.lives:
            raise ValueError("terms are chosen before the first engine starts")
        self.world = World(self.subject, self.seed, Terms(**changes))  # type: ignore[arg-type]

    def pair(self, *, decode_skew: Skew | None = None, decode_slots: int = 4, blocks: int = 192) -> tuple[Life, Life]:
        """Start a prefill and a decode engine."""
        p = self.world.start("p", Role.PREFILL, blocks=blocks)
        d = self.world.start("d", Role.DECODE, skew=decode_skew, slots=decode_slots, blocks=blocks)
        return p, d

    def busy(self, lease_s: float) -> tuple[Life, Life]:
        """Start a pair whose decode engine knows the prefill engine and has its one slot taken: what comes, queues."""
        self.terms(lease_s=lease_s)
        p, d = self.pair(decode_slots=1)
        self.connected(p, d)
        self.fill(d)
        return p, d

    def prompt(self, tokens: int = PROMPT_TOKENS) -> list[int]:
        """Return a prompt that begins like no other."""
        self._prompts += 1
        own = (self.seed * 7 + self._prompts * 131) % VOCABULARY
        rest: list[int] = self.world.chance.integers(VOCABULARY, size=tokens - 1).tolist()
        return [own, *rest]

    # Doing.

    def prefilled(self, p: Life, prompt: list[int] | None = None, *, name: str = "", **more: object) -> Leg:
        """Send a first leg and wait for its end. Raises Unfit if it hands nothing over."""
        leg = self.world.submit(p, prompt or self.prompt(), params=FOR_REMOTE | more, name=name)
        keeps = Capability.LEASES in self.subject.capabilities
        if not self.world.over(leg) or (keeps and leg.hand_off is None):
            raise Unfit(f"the prefill of {leg.name} handed nothing over: {leg.end}")
        return leg

    def decode(self, d: Life, source: Leg, *, max_tokens: int = 4, params: Params | None = None, name: str = "") -> Leg:
        """Send a second leg, and do not wait."""
        given = source.hand_off if params is None else params
        return self.world.submit(
            d, source.request.prompt, params=given, source=source, max_tokens=max_tokens, name=name
        )  # fmt: skip

    def decoded(self, d: Life, source: Leg, *, max_tokens: int = 4, limit_s: float = 60.0) -> Leg:
        """Send a second leg and wait for its end."""
        leg = self.decode(d, source, max_tokens=max_tokens)
        self.world.over(leg, limit_s=limit_s)
        return leg

    def connected(self, p: Life, d: Life) -> None:
        """Let two engines get to know each other with a request of no interest."""
        leg = self.decoded(d, self.prefilled(p))
        if not leg.right:
            raise Unfit(f"an undisturbed request was not answered: {leg.end}")

    def fill(self, d: Life, tokens: int = 760) -> list[Leg]:
        """Keep every slot of an engine busy for as many steps as an answer has tokens."""
        self._fillers += [self.world.submit(d, self.prompt(), max_tokens=tokens) for _ in range(d.spec.slots)]
        self.world.pass_time(0.2)
        return self._fillers

    def empty(self) -> None:
        """Let the slots that were filled go."""
        for leg in self._fillers:
            if leg.life.alive and leg.end is None:
                self.world.abort(leg)
        self.world.step()

    def held(self, leg: Leg) -> bool:
        """Whether a request's blocks are held where it ended."""
        return leg.name in self.world.held(leg.life)

    # Judging.

    def expect(self, holds: bool, what: str) -> bool:
        """Say what must be seen; `what` is told in either case."""
        (self.met if holds else self.unmet).append(what)
        if not holds:
            self.world.note("trial", "unmet", "", found=what)
        return holds


class Judged:
    """What came of a trial."""

    def __init__(
        self, verdict: Verdict, found: str, breaches: list[Breach], timeline: list[Entry], note: str = ""
    ) -> None:
        self.verdict, self.found, self.breaches, self.timeline, self.note = verdict, found, breaches, timeline, note


def tried(case: Case, subject: Subject, seed: int) -> Judged:
    """Run a case and judge it. A mistake of the suite's own raises."""
    trial = Trial(subject, seed)
    unfit = ""
    try:
        case.body(trial)
        trial.empty()
        trial.world.drain()
    except Unfit as error:
        unfit = str(error)
    except Refused as error:
        unfit = f"a request was refused at the door: {error}"
    except EngineDied as error:
        unfit = f"{error} had ended"
    world = trial.world
    world.close()
    breaches = list(world.breaches)
    timeline = list(world.timeline)
    problems = [*trial.unmet, *(f"{b.rule}: {b.what}" for b in breaches)]
    if problems:
        return Judged(Verdict.FAIL, "; ".join(problems), breaches, timeline, unfit)
    if unfit or not trial.met:
        return Judged(Verdict.INCONCLUSIVE, unfit or "the case expected nothing", breaches, timeline)
    return Judged(Verdict.PASS, "; ".join(trial.met), breaches, timeline)
