"""Scrapes memory, descriptors and the engines' own gauges while a run goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from harness.run_folder import RunWriter
from harness.targets.deployment import DeploymentTarget
from reference_impl.blockservice.peers import read_address
from reference_impl.engine.process import pss_bytes
from reference_impl.realclock import now_ns

INTERVAL_S: Final = 0.5
SCRAPE_LIMIT_S: Final = 0.4
_MEMFD: Final = "/memfd:pdproof:"
_TAGS: Final = {"weights": "memory_weights_bytes", "kv_cache": "memory_kv_bytes"}
_ENGINE_GAUGES: Final = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "pdproof:leases_live",
    "pdproof:lease_blocks_held", "pdproof:loads_running", "pdproof:recomputed_tokens_total",
    "pdproof:reads_after_expiry_total", "pdproof:heartbeats_sent_total", "pdproof:heartbeats_failed_total",
    "pdproof:notifications_malformed_total", "pdproof:handshakes_failed_total", "pdproof:loads_done_total",
    "pdproof:loads_failed_total", "pdproof:turns_expired_total", "vllm:nixl_num_kv_expired_reqs_total",
    "vllm:nixl_num_failed_transfers_total", "vllm:nixl_num_failed_notifications_total",
}  # fmt: skip
_OWN_MEMORY: Final = {
    "pdproof:weights_bytes_mapped": "memory_weights_bytes", "pdproof:kv_bytes_mapped": "memory_kv_bytes",
}  # fmt: skip


class Sampler:
    """Writes gauges of `target` into `writer`, one row a value; all rows of one round have one stamp.

    `memory_weights_bytes`, `memory_kv_bytes` (node: the device): physical memory, as the kernel counts the memory
    service's memfds; of an engine with memory of its own, what it says it has mapped. `engine_pss_bytes` (of all of an
    engine's processes), `vllm:*`, `pdproof:*` (node: `worker/engine`). `open_descriptors` (node: `worker/process`). The
    RPC document's names (node: `worker/blocks`), with a method or a bucket behind the name where the metric has one.
    """

    def __init__(self, target: DeploymentTarget, writer: RunWriter) -> None:
        self._target = target
        self._writer = writer
        self._round_ns = 0

    async def run(self) -> None:
        """Scrape until cancelled."""
        timeout = aiohttp.ClientTimeout(total=SCRAPE_LIMIT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await self.sample(session)
                await asyncio.sleep(INTERVAL_S)

    async def sample(self, session: aiohttp.ClientSession) -> None:
        """Scrape once. A process that dies meanwhile has no value."""
        self._round_ns = now_ns()
        devices: Counter[tuple[str, str]] = Counter()
        groups: Counter[str] = Counter()
        processes = self._target.processes()
        for worker, process in processes:
            for gauge in _TAGS.values():
                devices[worker, gauge] += 0
            node = f"{worker}/{process.name}"
            try:
                self._say(node, "open_descriptors", count_descriptors(process.pid))
                if process.engine:
                    groups[f"{worker}/{process.engine}"] += pss_bytes(str(process.pid))
                elif process.role == "engine":
                    groups[node] += pss_bytes(str(process.pid))
                elif process.role == "memory-service":
                    devices.update({(worker, tag): n for tag, n in memfd_bytes(process.pid).items()})
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        for node, pss in groups.items():
            self._say(node, "engine_pss_bytes", pss)
        await self._engines(session, devices)
        await asyncio.gather(*(self._blocks(session, worker) for worker, p in processes if p.role == "block-service"))
        for (worker, gauge), value in devices.items():
            self._say(worker, gauge, value)

    async def _engines(self, session: aiohttp.ClientSession, devices: Counter[tuple[str, str]]) -> None:
        try:
            async with session.get(f"{self._target.url}/health") as response:
                routes = msgspec.json.decode(await response.read())["workers"]
            for route in routes:
                async with session.get(f"{route['url']}/metrics") as response:
                    self._engine(route["worker_id"], route["engine_id"], await response.text(), devices)
        except (aiohttp.ClientError, TimeoutError):
            return  # a dying engine answers nothing; the events tell why

    def _engine(self, worker: str, engine: str, text: str, devices: Counter[tuple[str, str]]) -> None:
        own: dict[str, int] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in _ENGINE_GAUGES:
                    self._say(f"{worker}/{engine}", sample.name, sample.value)
                elif sample.name in _OWN_MEMORY:
                    own[_OWN_MEMORY[sample.name]] = int(sample.value)
        for gauge, value in own.items():
            devices[worker, gauge] = devices[worker, gauge] or value

    async def _blocks(self, session: aiohttp.ClientSession, worker: str) -> None:
        """Scrape a block service: every metric under its name, and its method behind it if it is a method's."""
        address = read_address(Path(self._target.announcement.run_dir), worker)
        if address is None:
            return
        url = f"http://{address.host}:{address.metrics_port}/metrics"
        try:
            async with session.get(url) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return  # it is away; the events tell why
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._say(f"{worker}/blocks", " ".join([sample.name, *sample.labels.values()]), sample.value)

    def _say(self, node: str, name: str, value: float) -> None:
        self._writer.metric(self._round_ns, node, name, value)


def count_descriptors(pid: int) -> int:
    """Return how many descriptors a process has open. Raises FileNotFoundError when it has gone."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def memfd_bytes(pid: int) -> Counter[str]:
    """Return the physical bytes of a memory service's memfds by gauge, as the kernel counts them."""
    found: Counter[str] = Counter()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            link = str(path.readlink())
            if link.startswith(_MEMFD):
                tag = link.removeprefix(_MEMFD).removesuffix(" (deleted)")
                found[_TAGS.get(tag, "memory_other_bytes")] += path.stat().st_blocks * 512
        except FileNotFoundError:  # closed since it was listed
            continue
    return found
