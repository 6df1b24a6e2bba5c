"""Check: a turn's blocks are used as long as they live, and not longer, whatever the two clocks show."""

from __future__ import annotations

from typing import Final

import msgspec

from harness.holding import Held, held, terms_of
from harness.run_folder import RunFolder
from harness.verdicts import CheckResult, Verdict
from harness.words import counted
from reference_impl.rules.consumer import TURN_MARGIN_NS
from reference_impl.rules.events import Event, EventKind

SLACK_NS: Final = 100_000_000
"""A holder looks at its leases, and a judgement reaches the log, some milliseconds late on a busy machine."""
RULES: Final = ["KVC-CLK-001", "KVC-CLK-002", "KVC-CLK-003", "KVC-CLK-004", "KVC-CLK-005"]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One judgement of a turn, beside the holder's own truth. `left_s`: until the holder let its blocks go."""

    request_id: str
    judged_ns: int
    live: bool
    left_s: float | None
    """None: the holder never said."""
    refused: bool
    """The holder refused the claim that followed."""

    @property
    def early(self) -> bool:
        """Declined although the blocks lived on for longer than the margin."""
        return not self.live and self.left_s is not None and self.left_s * 1e9 > TURN_MARGIN_NS + SLACK_NS

    @property
    def late(self) -> bool:
        """Taken for live although the blocks had gone."""
        return self.live and (self.refused or (self.left_s is not None and self.left_s * 1e9 < -SLACK_NS))


def turns(run: RunFolder) -> list[Turn]:
    """Return every judgement of the run, in order.

    How long the blocks would have lived is counted from the holder's grant or the client's last renewal, not from their
    release: a reader that declines tells the holder so, and it frees them at once.
    """
    leases = {lease.request_id: lease for lease in held(run) if lease.turn}
    refused = {str(e.detail.get("reader")) for e in run.events_of(EventKind.CLAIM_REFUSED)}
    return [_turn(event, leases, refused) for event in run.events_of(EventKind.TURN_JUDGED)]


def _turn(event: Event, leases: dict[str, Held], refused: set[str]) -> Turn:
    lease = leases.get(str(event.detail.get("remote_request_id")))
    left_s = None if lease is None else (lease.expires_ns - event.t_ns) / 1e9
    return Turn(
        request_id=event.subject, judged_ns=event.t_ns, live=bool(event.detail["live"]), left_s=left_s,
        refused=event.subject in refused,
    )  # fmt: skip


def turns_are_judged_rightly(run: RunFolder) -> CheckResult:
    """Fail for a turn declined early or taken late; inconclusive unless some were taken and some were too late."""
    title = "A turn's blocks are used while they live, and never later"
    terms = terms_of(run)
    if terms is None or not terms.bidirectional_kv_xfer:
        return CheckResult(
            check="turns", title=title, rules=RULES, verdict=Verdict.PASS, found="not applicable: one turn only"
        )  # fmt: skip
    judged = turns(run)
    early, late = sum(t.early for t in judged), sum(t.late for t in judged)
    live = sum(t.live for t in judged)
    found = f"{counted(len(judged), 'turn')} judged: {live} live, {len(judged) - live} declined; "
    found += f"{early} too early, {late} too late"
    if early or late:
        verdict = Verdict.FAIL
    elif not live or live == len(judged):
        verdict, found = Verdict.INCONCLUSIVE, f"{found}; both kinds are needed to prove anything"
    else:
        verdict = Verdict.PASS
    return CheckResult(
        check="turns", title=title, rules=RULES, verdict=verdict, found=found,
        evidence={"judged": len(judged), "live": live, "early": early, "late": late},
    )  # fmt: skip
