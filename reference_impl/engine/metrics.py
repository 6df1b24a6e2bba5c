"""The engine's metrics, under vLLM's names where vLLM has one."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from reference_impl.engine.connector import Connector
from reference_impl.engine.core import EngineCore
from reference_impl.rules.lifecycle import EngineState


class EngineMetrics:
    """Reads the figures at the moment they are asked for. `core` is None until the engine is awake.

    `connector` is None in an engine that moves no KV. Its events count once, whatever the number of ranks (O1).
    """

    def __init__(self, model: str, engine_id: str) -> None:
        self.core: EngineCore | None = None
        self.connector: Connector | None = None
        self.state = EngineState.INIT
        self.weights_bytes_mapped = 0
        self.kv_bytes_mapped = 0
        self._labels = {"model_name": model, "engine": engine_id}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric (the registry's protocol)."""
        yield self._gauge("pdproof:engine_awake", "1 while the engine may serve", self.state is EngineState.ACTIVE)
        yield self._gauge("pdproof:weights_bytes_mapped", "bytes of weights mapped", self.weights_bytes_mapped)
        yield self._gauge("pdproof:kv_bytes_mapped", "bytes of KV pool mapped", self.kv_bytes_mapped)
        core = self.core
        if core is None:
            return
        totals, pool = core.totals, core.pool
        yield self._gauge("vllm:num_requests_running", "requests in the running batch", len(core.running))
        yield self._gauge("vllm:num_requests_waiting", "requests waiting for admission or for their KV",
                          len(core.waiting) + len(core.loading))  # fmt: skip
        yield self._gauge("vllm:kv_cache_usage_perc", "share of KV blocks held by requests", pool.held / pool.blocks)
        yield self._gauge("pdproof:kv_blocks_cached", "KV blocks kept for their prefix only", pool.cached)
        yield self._counter("vllm:prompt_tokens", "prompt tokens admitted", totals.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "tokens generated", totals.output_tokens)
        yield self._counter("vllm:prefix_cache_queries", "prompt tokens looked up", totals.prompt_tokens)
        yield self._counter("vllm:prefix_cache_hits", "prompt tokens found cached", totals.cached_tokens)
        yield self._counter(
            "vllm:request_success", "requests answered whole", totals.finished, finished_reason="length"
        )
        yield self._counter("pdproof:requests_aborted", "requests given up by their client", totals.aborted)
        yield self._counter("vllm:num_preemptions", "requests put back for lack of blocks", totals.preempted)
        if self.connector is not None:
            yield from self._kv(self.connector, totals.recomputed_tokens)

    def _kv(self, connector: Connector, recomputed_tokens: int) -> Iterator[Metric]:
        """Yield what the movement of KV comes to (KVC-OBS-001, O2)."""
        leases, holder, reader = connector.producer.leases, connector.producer.counts, connector.consumer.counts
        held = len({block for blocks in leases.blocks for block in blocks})  # two leases may share some
        yield self._gauge("pdproof:leases_live", "leases granted and not ended", len(leases))
        yield self._gauge("pdproof:lease_blocks_held", "KV blocks under live leases", held)
        yield self._gauge("pdproof:loads_running", "requests whose KV is awaited from a peer", len(connector.consumer))
        yield self._counter("vllm:nixl_num_kv_expired_reqs", "leases that ran out unread", holder.expired)
        yield self._counter(
            "vllm:nixl_num_failed_transfers", "reads of KV that failed or tore", reader.failed_transfers
        )
        yield self._counter(
            "vllm:nixl_num_failed_notifications", "notifications that did not leave", reader.notifications_failed
        )
        yield self._counter("pdproof:leases_granted", "leases granted", holder.granted)
        yield self._counter("pdproof:leases_extended", "extensions of leases by heartbeats", holder.extended)
        yield self._counter("pdproof:leases_released", "leases ended by a report or an abort", holder.released)
        yield self._counter("pdproof:reads_after_expiry", "claims refused: no lease was left", holder.late_claims)
        yield self._counter("pdproof:claims_refused", "claims refused, for whatever reason", holder.claims_refused)
        yield self._counter("pdproof:heartbeats_sent", "heartbeats sent", reader.heartbeats_sent)
        yield self._counter("pdproof:heartbeats_received", "heartbeats received", holder.heartbeats_received)
        yield self._counter("pdproof:heartbeats_failed", "heartbeats that did not leave", reader.heartbeats_failed)
        yield self._counter("pdproof:notifications_malformed", "notifications dropped as damaged", holder.malformed)
        yield self._counter(
            "pdproof:notifications_of_strangers", "notifications dropped: their sender is no peer", connector.strangers
        )
        yield self._counter("pdproof:handshakes_failed", "handshakes that failed", reader.handshakes_failed)
        yield self._counter("pdproof:loads_done", "requests whose KV was loaded", reader.loaded)
        yield self._counter("pdproof:loads_failed", "requests whose KV could not be loaded", reader.failed)
        yield self._counter("pdproof:turns_expired", "turns that came too late to be loaded", reader.expired_turns)
        yield self._counter(
            "pdproof:recomputed_tokens", "tokens computed here because their load failed", recomputed_tokens
        )

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        metric = GaugeMetricFamily(name, about, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), float(value))
        return metric

    def _counter(self, name: str, about: str, value: float, **more: str) -> Metric:
        labels = self._labels | more
        metric = CounterMetricFamily(name, about, labels=list(labels))
        metric.add_metric(list(labels.values()), float(value))
        return metric
