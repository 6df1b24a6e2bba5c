"""What was held for whom, and until when: leases on KV blocks, read from a run's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

import msgspec

from harness.errors import BadRunFolder
from harness.run_folder import RunFolder
from reference_impl.rules.clock import s_to_ns
from reference_impl.rules.events import Event, EventKind
from reference_impl.rules.terms import KvTerms, LeaseDesign
from reference_impl.rules.transfer_tokens import is_token

EXPIRED = "expired"
DIED = "died"
"""The holder ended, and its memory with it."""
GRANT_SLACK_NS = 1_000_000_000
"""A prefill that ends this long after a crash may still be handed to the dead reader."""
STEP_SLACK_S = 0.5
"""A holder looks at its leases between steps."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """One lease. `ended_ns` is None if it still stood when the run ended."""

    request_id: str
    worker_id: str
    engine_id: str
    blocks: int
    granted_ns: int
    duration_s: float
    expires_ns: int
    """When it ends by itself, as granted (or, a turn's, as last renewed by its client); heartbeats move that on."""
    turn: bool
    ended_ns: int | None = None
    how: str = ""
    """How it ended: read, hit, abort, failed, expired, died."""
    heard_from: str = ""
    """The engine that last renewed or claimed it, as its holder says; "": nobody ever did."""

    def may_be_of(self, worker_id: str) -> bool:
        """Whether its reader may have been an engine of this worker: it was, or nobody was ever heard of."""
        return not self.heard_from or self.heard_from.startswith(f"{worker_id}-")

    @property
    def loan(self) -> bool:
        """Whether it is a block group on loan: whoever asked for that may never come to read."""
        return is_token(self.request_id)

    def live_at(self, t_ns: int) -> bool:
        """Whether it stood at a moment."""
        return self.granted_ns <= t_ns and (self.ended_ns is None or self.ended_ns > t_ns)


class Reclaim(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader's crash left behind at the holders, and how long.

    `seconds` is from the crash to the end of the last lease that nobody came for any more; None if there was none, or
    if one still stood at the end. `late` are leases that stood longer than the design promises; `promised_s` is from
    the crash to the last end that it promised. `block_seconds`: blocks times seconds from the crash on, as far as the
    run was watched. `left` are those leases.
    """

    fault_id: str
    worker_id: str
    fault_ns: int
    leases: int
    blocks: int
    seconds: float | None
    standing: int
    late: list[str]
    promised_s: float | None
    block_seconds: float
    left: list[Held]


def terms_of(run: RunFolder) -> KvTerms | None:
    """Return the terms of a run's engines, as they were (already scaled); None if no KV moved in it.

    Raises BadRunFolder if the scenario moves KV and the terms are missing: no check must be left out for that.
    """
    configuration = run.manifest.configuration
    terms, scenario = configuration.get("terms"), configuration.get("scenario")
    if terms is None and isinstance(scenario, dict) and scenario.get("kv") is not None:
        raise BadRunFolder(run.path, "manifest.json: the scenario moves KV, but configuration.terms is missing")
    try:
        return None if terms is None else msgspec.convert(terms, KvTerms)
    except msgspec.ValidationError as error:
        raise BadRunFolder(run.path, f"manifest.json: configuration.terms: {error}") from error


def held(run: RunFolder) -> list[Held]:
    """Return every lease of the run, in the order of their grants."""
    found: dict[tuple[str, str], Held] = {}
    for event in run.events:
        match event.kind:
            case EventKind.LEASE_GRANTED:
                found[_key(event)] = _granted(run, event)
            case EventKind.TURN_RENEWED:
                _renew(found, event)
            case EventKind.LEASE_RELEASED:
                _end(found, _key(event), event.t_ns, str(event.detail.get("how", "")), _heard(event))
            case EventKind.LEASE_EXPIRED:
                _end(found, _key(event), event.t_ns, EXPIRED, _heard(event))
            case EventKind.PROCESS_EXITED:
                for key in [k for k, lease in found.items() if k[0] == event.subject and lease.ended_ns is None]:
                    _end(found, key, event.t_ns, DIED)
            case _:
                pass
    return sorted(found.values(), key=lambda lease: lease.granted_ns)


def _key(event: Event) -> tuple[str, str]:
    return str(event.detail.get("engine_id", "")), event.subject


def _granted(run: RunFolder, event: Event) -> Held:
    detail = event.detail
    try:
        return Held(
            request_id=event.subject, worker_id=str(detail["worker_id"]), engine_id=str(detail["engine_id"]),
            blocks=int(detail["blocks"] or 0), granted_ns=event.t_ns, duration_s=float(detail["duration_s"] or 0),
            expires_ns=event.t_ns + s_to_ns(float(detail["duration_s"] or 0)), turn=bool(detail["turn"]),
        )  # fmt: skip
    except (KeyError, ValueError) as error:
        raise BadRunFolder(run.path, f"events.jsonl: {event.kind} of {event.subject}: {error!r}") from error


def _renew(found: dict[tuple[str, str], Held], event: Event) -> None:
    lease = found.get(_key(event))
    if lease is not None:
        until_ns = event.t_ns + s_to_ns(float(event.detail.get("duration_s") or 0))
        found[_key(event)] = msgspec.structs.replace(lease, expires_ns=until_ns)


def _heard(event: Event) -> str:
    return str(event.detail.get("heard_from", ""))


def _end(found: dict[tuple[str, str], Held], key: tuple[str, str], t_ns: int, how: str, heard_from: str = "") -> None:
    lease = found.get(key)
    if lease is not None and lease.ended_ns is None:
        found[key] = msgspec.structs.replace(lease, ended_ns=t_ns, how=how, heard_from=heard_from)


def blocks_over_time(leases: Iterable[Held]) -> list[tuple[int, int]]:
    """Return (t_ns, blocks held from then on) at each change, in order: a step function that starts at 0."""
    changes: Counter[int] = Counter()
    for lease in leases:
        changes[lease.granted_ns] += lease.blocks
        if lease.ended_ns is not None:
            changes[lease.ended_ns] -= lease.blocks
    times = sorted(changes)
    return list(zip(times, accumulate(changes[t] for t in times), strict=True))


def came_late(run: RunFolder) -> set[tuple[str, str]]:
    """Return (engine id, request id) of leases that a reader claimed when they had expired: it was alive."""
    expired = {(lease.engine_id, lease.request_id) for lease in held(run) if lease.how == EXPIRED}
    return expired & {_key(event) for event in run.events_of(EventKind.CLAIM_REFUSED)}


class Excuse(msgspec.Struct, frozen=True):
    """A proved fault, and the stretch in which what it left unread runs out.

    `reader` is the worker whose reader it killed, "" if it killed none; `held_back`: it kept hand-offs from readers.
    """

    reader: str
    held_back: bool
    begin_ns: int
    end_ns: int

    def at(self, t_ns: int) -> bool:
        """Whether the fault was at work at a moment."""
        return self.begin_ns <= t_ns <= self.end_ns

    def explains(self, lease: Held, *, came_late: bool) -> bool:
        """Whether a lease ran out because of it.

        A killed reader does not come any more; one whose hand-off is held back was never heard of before.
        """
        if not self.at(lease.ended_ns or 0):
            return False
        killed = bool(self.reader) and lease.may_be_of(self.reader) and not came_late
        return killed or (self.held_back and not lease.heard_from)


def excuses(run: RunFolder) -> list[Excuse]:
    """Return the faults that explain leases which ran out, and loads that failed.

    What a kill leaves unread runs out within one first term (and a second) of it; what a router holds back, within the
    hold as well.
    """
    terms = terms_of(run)
    if terms is None:
        return []
    proved = {e.subject for e in run.events_of(EventKind.FAULT_PROVED)}
    healed = {e.subject: e.t_ns for e in run.events_of(EventKind.FAULT_HEALED)}
    slack_ns = terms.first_ns + s_to_ns(1.0)
    found = []
    for fault in run.events_of(EventKind.FAULT_INJECTED):
        if fault.subject not in proved:
            continue
        worker_id = str(fault.detail.get("worker_id", ""))
        killed_reader = fault.detail.get("fault") == "kill" and reads(run, worker_id)
        end_ns = max(healed.get(fault.subject, fault.t_ns), fault.t_ns) + slack_ns
        held_back = fault.detail.get("fault") == "router_hold"
        found.append(Excuse(worker_id if killed_reader else "", held_back, fault.t_ns, end_ns))
    return found


def freed_early(run: RunFolder) -> list[Held]:
    """Return the prefills' leases that expired, and no fault explains it (KVC-LEASE-010, -013).

    A loan whose bearer was never heard of has no reader.
    """
    came, faults = came_late(run), excuses(run)
    return [
        lease for lease in held(run)
        if lease.how == EXPIRED and not lease.turn and not (lease.loan and not lease.heard_from)
        and not any(
            fault.explains(lease, came_late=(lease.engine_id, lease.request_id) in came) for fault in faults
        )
    ]  # fmt: skip


def reclaims(run: RunFolder) -> list[Reclaim]:
    """Return what each proved kill of a reader left at the holders (KVC-LEASE-009)."""
    proved = {e.subject for e in run.events_of(EventKind.FAULT_PROVED)}
    came, terms = came_late(run), terms_of(run)
    leases = [
        lease for lease in held(run)
        if not (lease.turn or lease.loan) and (lease.engine_id, lease.request_id) not in came
    ]  # fmt: skip
    kills = [
        e for e in run.events_of(EventKind.FAULT_INJECTED)
        if e.subject in proved and e.detail.get("fault") == "kill" and reads(run, str(e.detail.get("worker_id", "")))
    ]  # fmt: skip
    end_ns = run.events[-1].t_ns if run.events else 0
    return [] if terms is None else [_reclaim(kill, leases, terms, end_ns) for kill in kills]


def reads(run: RunFolder, worker_id: str) -> bool:
    """Whether a worker reads the prefills of others, as far as the manifest tells."""
    roles = run.manifest.configuration.get("roles")
    return not isinstance(roles, dict) or roles.get(worker_id) != "prefill"


def _reclaim(kill: Event, leases: list[Held], terms: KvTerms, end_ns: int) -> Reclaim:
    """A lease that stood at the crash and was never read was the dead reader's: healthy readers come for theirs."""
    worker_id = str(kill.detail.get("worker_id", ""))
    left = [
        lease for lease in leases
        if lease.worker_id != worker_id and lease.may_be_of(worker_id)
        and lease.granted_ns <= kill.t_ns + GRANT_SLACK_NS
        and (lease.ended_ns is None or lease.ended_ns > kill.t_ns) and lease.how in ("", EXPIRED)
    ]  # fmt: skip
    ends = [lease.ended_ns for lease in left if lease.ended_ns is not None]
    promised = [_promised_ns(lease, kill.t_ns, terms) for lease in left]
    held_ns = [
        lease.blocks * ((lease.ended_ns or end_ns) - max(kill.t_ns, lease.granted_ns)) for lease in left
    ]  # fmt: skip
    return Reclaim(
        fault_id=kill.subject, worker_id=worker_id, fault_ns=kill.t_ns, leases=len(left),
        blocks=sum(lease.blocks for lease in left), standing=len(left) - len(ends),
        seconds=(max(ends) - kill.t_ns) / 1e9 if ends and len(ends) == len(left) else None,
        late=[lease.request_id for lease in left if _late(lease, kill.t_ns, terms)],
        promised_s=(max(promised) - kill.t_ns) / 1e9 if promised else None,
        block_seconds=sum(held_ns) / 1e9, left=left,
    )  # fmt: skip


def _promised_ns(lease: Held, fault_ns: int, terms: KvTerms) -> int:
    """The end of a lease's first term, or of one extension after the crash, whichever is later."""
    promised_ns = lease.granted_ns + terms.first_ns
    return max(promised_ns, fault_ns + terms.extension_ns) if terms.renews else promised_ns


def _late(lease: Held, fault_ns: int, terms: KvTerms) -> bool:
    """Whether a lease stood longer than leases promise. The old design is held to that too: it shows how far it is."""
    renewed = msgspec.structs.replace(terms, design=LeaseDesign.LEASE)
    return lease.ended_ns is None or lease.ended_ns > _promised_ns(lease, fault_ns, renewed) + s_to_ns(STEP_SLACK_S)
