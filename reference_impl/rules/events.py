"""The words of the protocol's history: what an actor may say happened to it.

An event is a fact stamped by the process that it happened to. Checks and reports read events and nothing else.
"""

from __future__ import annotations

import enum

import msgspec

Scalar = str | int | float | bool | None


class EventKind(enum.StrEnum):
    """Every kind of event; `subject` and `detail` are described beside each."""

    # A process's life. subject: the process's name.
    PROCESS_STARTED = "process.started"  # detail: pid, start_ticks, role, worker_id
    PROCESS_EXITED = "process.exited"  # seen by its parent. detail: pid, status (exit code, or -signal)
    PROCESS_HUNG = "process.hung"  # the probe's verdict. detail: pid, silent_ms
    # An engine's life. subject: engine id. detail of each: worker_id
    INIT_PHASE = "engine.init_phase"  # detail: name, start_ns, end_ns, emulated
    ENGINE_ASLEEP = "engine.asleep"  # parked: a shadow. detail: pss_bytes
    ENGINE_WAKING = "engine.waking"
    ENGINE_AWAKE = "engine.awake"  # it may serve from here on. detail: epoch
    WAKE_FAILED = "engine.wake_failed"  # detail: reason
    CANARY_ANSWERED = "engine.canary_answered"  # detail: ok
    PROMOTION_PHASE = "engine.promotion_phase"  # detail: name, start_ns, end_ns, emulated
    # Failover lock. subject: engine id
    LOCK_WAITING = "lock.waiting"
    LOCK_WON = "lock.won"  # detail: epoch, worker_id
    # Memory service. subject: device id (the service) or engine id (a client)
    WEIGHTS_MAPPED = "weights.mapped"  # detail: bytes, generation
    KV_MAPPED = "kv.mapped"  # detail: bytes
    SESSION_OPENED = "memory.session_opened"  # detail: session, tag, mode, engine_id, epoch
    SESSION_CLOSED = "memory.session_closed"  # detail: session, tag, mode, reason, allocations
    SESSION_REFUSED = "memory.session_refused"  # detail: tag, mode, reason
    LAYOUT_COMMITTED = "memory.layout_committed"  # detail: tag, generation, hash, bytes, allocations
    # Router. subject: engine id. detail: worker_id
    ROUTER_REGISTERED = "router.registered"  # detail: worker_id, epoch
    ROUTER_REFUSED = "router.refused"  # detail: worker_id, epoch, reason
    ROUTER_REMOVED = "router.removed"  # detail: worker_id, reason
    # Leases, said by the engine that holds the blocks. subject: the holder's request id. detail: engine_id
    LEASE_GRANTED = "lease.granted"  # detail: blocks, duration_s, turn (True: decode-side blocks of a finished turn)
    LEASE_EXTENDED = "lease.extended"  # one a heartbeat. subject: the reader's engine id. detail: leases, unknown
    # heard_from: the engine that last renewed or claimed it, "" if none ever did
    LEASE_RELEASED = "lease.released"  # detail: blocks, held_ms, how (read, hit, abort, failed), turn, heard_from
    LEASE_EXPIRED = "lease.expired"  # detail: blocks, held_ms, turn, heard_from
    TURN_RENEWED = "turn.renewed"  # by the client. detail: duration_s
    CLAIM_REFUSED = "lease.claim_refused"  # a reader came too late, or with a used hand-off. detail: reader, reason
    # Loads, said by the reader. subject: its own request id. detail: engine_id, remote_engine_id, remote_request_id
    LOAD_DONE = "load.done"  # detail: tokens, blocks, waited_ms, read_ms
    LOAD_FAILED = "load.failed"  # detail: reason, policy
    TURN_JUDGED = "turn.judged"  # by its corrected expiry. detail: live, left_ms, error_ms
    # Peers. subject: the peer's engine id. detail: engine_id
    PEER_CONNECTED = "peer.connected"  # detail: handshake_ms, offset_ms, offset_error_ms
    PEER_LOST = "peer.lost"  # detail: reason
    # Block groups, said by a node's block service. subject: the operation's id
    # detail of each: tenant, method, block_group_id, epoch, refusal
    OPERATION_APPLIED = "op.applied"
    OPERATION_REPLAYED = "op.replayed"
    OPERATION_REFUSED = "op.refused"
    MIGRATION_MOVED = "migration.moved"  # a step of one. detail: status, step, src, dst, block_group_id
    BLOCKS_LINKED = "blocks.linked"  # subject: the node. detail: incarnation, new, groups, lost, loans
    FAIL_POINT_REACHED = "failpoint.reached"  # said before it acts. subject: the point. detail: action, method, node
    # Faults. subject: fault id
    FAULT_INJECTED = "fault.injected"  # detail: fault, target, pid, worker_id
    FAULT_PROVED = "fault.proved"  # detail: evidence
    FAULT_UNPROVED = "fault.unproved"  # detail: reason
    FAULT_HEALED = "fault.healed"
    # The harness. subject: run id
    PHASE_STARTED = "phase.started"  # detail: phase
    PHASE_ENDED = "phase.ended"  # detail: phase
    PROCESS_LEFT = "process.left"  # found alive after the end. subject: its name. detail: pid
    AUDITED = "run.audited"  # detail: processes (looked for), left


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of `events.jsonl`.

    `t_ns` is monotonic with one base a host; `wall_ns` is for display; `actor` is the process that says it.
    """

    t_ns: int
    wall_ns: int
    actor: str
    kind: EventKind
    subject: str
    detail: dict[str, Scalar] = {}
