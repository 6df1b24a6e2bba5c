"""The engine's metrics, under vLLM's names where vLLM has one."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from reference_impl.engine.core import EngineCore
from reference_impl.rules.lifecycle import EngineState


class EngineMetrics:
    """Reads the figures at the moment they are asked for. `core` is None until the engine is awake."""

    def __init__(self, model: str, engine_id: str) -> None:
        self.core: EngineCore | None = None
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
        yield self._gauge("vllm:num_requests_waiting", "requests waiting for admission", len(core.waiting))
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

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        metric = GaugeMetricFamily(name, about, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), float(value))
        return metric

    def _counter(self, name: str, about: str, value: float, **more: str) -> Metric:
        labels = self._labels | more
        metric = CounterMetricFamily(name, about, labels=list(labels))
        metric.add_metric(list(labels.values()), float(value))
        return metric
