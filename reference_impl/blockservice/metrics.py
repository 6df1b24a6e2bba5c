"""The server's metrics, under the RPC document's names to the letter (KVC-IDEM-018).

Its counters do not end in `_total`, as Prometheus would have it; to keep the names they are exposed untyped, and rise
like any counter. Latencies are in milliseconds, as the client's are. Quantiles are those of the last calls, exactly, by
the nearest rank; a method that has not been called has none. Connection pool and breaker are the client's.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric, UntypedMetricFamily

from reference_impl.blockservice.buckets import Bucket, How
from reference_impl.realclock import now_ns
from reference_impl.rules.blockgroups import Answer
from reference_impl.rules.clock import NS_PER_MS, NS_PER_S

CALLS_KEPT: Final = 1024
"""Calls of a method that its quantiles and its error rate are drawn from."""
RATE_S: Final = 10
"""Seconds that `rpc_qps` looks back."""

METHODS: Final = (  # shown from the start; those of fail points once they are called
    "GetMetadata", "ListGroups", "GetMigrateStatus", "GetOperation", "Reserve", "Pin", "Unpin", "Evict", "PrepareGet",
    "StartMigrate", "CancelMigrate", "Accept", "Settle",
)  # fmt: skip
_OK: Final = "OK"
_TIMEOUT: Final = "DEADLINE_EXCEEDED"
_KV_LATENCIES: Final = {
    "GetMetadata": "get_metadata_latency",
    "PrepareGet": "get_block_group_latency",
    "StartMigrate": "migrate_start_latency",
    "GetMigrateStatus": "migrate_status_latency",
    "Evict": "evict_latency",
    "Pin": "pin_latency",
    "Unpin": "unpin_latency",
}


def quantile(sorted_values: list[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed. Raises IndexError of none."""
    return sorted_values[max(0, math.ceil(share * len(sorted_values)) - 1)]


class _Method:
    """What is known of one method's calls."""

    def __init__(self) -> None:
        self.calls: deque[tuple[float, bool]] = deque(maxlen=CALLS_KEPT)
        """Latency in ms, and whether it failed."""
        self.seconds: Counter[int] = Counter()
        """Calls that began in a second, of the last few."""
        self.timeouts = 0
        self.retries = 0
        self.count = 0
        self.sum_ms = 0.0

    def began(self, second: int) -> None:
        self.seconds[second] += 1
        for old in [s for s in self.seconds if s <= second - RATE_S - 1]:
            del self.seconds[old]

    def rate(self, second: int) -> float:
        """Return the calls a second, over the whole seconds before this one."""
        return sum(n for s, n in self.seconds.items() if second - RATE_S <= s < second) / RATE_S

    def latencies_ms(self) -> list[float]:
        return sorted(latency for latency, _ in self.calls)


class RpcMetrics:
    """Counts calls. `queue_length` is asked when somebody looks: how many writes wait for the store."""

    def __init__(
        self, *, queue_length: Callable[[], int] = lambda: 0, clock_ns: Callable[[], int] = now_ns
    ) -> None:  # fmt: skip
        self.queue_length = queue_length
        self._clock_ns = clock_ns
        self._methods = {name: _Method() for name in METHODS}
        self._inflight = 0
        self._limited = Counter({(bucket, how): 0 for bucket in Bucket for how in How})
        self._operations = Counter({"applied": 0, "replayed": 0, "refused": 0})
        self._remote_read_timeouts = 0
        self._broken = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def began(self, method: str, attempt: int) -> None:
        """Count a call that has arrived; an attempt above 1 is a retry."""
        known = self._methods.setdefault(method, _Method())
        known.began(self._clock_ns() // NS_PER_S)
        known.retries += attempt > 1
        self._inflight += 1

    def ended(self, method: str, code: str, latency_ns: int) -> None:
        """Count the end of a call that `began`: `code` is gRPC's, by name."""
        known = self._methods[method]
        latency_ms = latency_ns / NS_PER_MS
        known.calls.append((latency_ms, code != _OK))
        known.count += 1
        known.sum_ms += latency_ms
        self._inflight -= 1
        if code == _TIMEOUT:
            known.timeouts += 1
            if method == "PrepareGet":
                self.remote_read_timed_out()

    def answered(self, answer: Answer, *, replayed: bool) -> None:
        """Count what a write was answered."""
        self._operations["replayed" if replayed else "applied" if answer.applied else "refused"] += 1

    def rate_limited(self, bucket: Bucket, how: How) -> None:
        """Count a take that found its bucket empty."""
        self._limited[bucket, how] += 1

    def remote_read_timed_out(self) -> None:
        """Count a read of another node's bytes that did not come in time."""
        self._remote_read_timeouts += 1

    def broke(self) -> None:
        """Count a handler that raised what no handler should."""
        self._broken += 1

    @property
    def inflight(self) -> int:
        """Calls that have begun and not ended."""
        return self._inflight

    @property
    def broken(self) -> int:
        """Handlers that raised what no handler should."""
        return self._broken

    def text(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, with the values of this moment."""
        yield from self._of_methods()
        yield from self._of_kv()
        yield _gauge("rpc_inflight_requests", "Calls that are being worked on", [({}, self._inflight)])
        yield _gauge("rpc_queue_length", "Writes that wait for the store", [({}, self.queue_length())])
        limited = [({"bucket": b.value, "how": h.value}, n) for (b, h), n in self._limited.items()]
        yield _counter("rate_limited_count", "Takes of tokens that were delayed or refused", limited)
        for name, count in self._operations.items():
            yield _counter(f"operations_{name}", f"Writes that were {name}", [({}, count)])
        yield _counter("rpc_broken_handlers", "Handlers that raised what no handler should", [({}, self._broken)])

    def _of_methods(self) -> Iterator[Metric]:
        second, methods = self._clock_ns() // NS_PER_S, self._methods.items()
        rates = [({"method": name}, m.rate(second)) for name, m in methods]
        yield _gauge("rpc_qps", f"Calls a second, over the last {RATE_S} whole seconds", rates)
        failed = [({"method": name}, sum(f for _, f in m.calls) / len(m.calls)) for name, m in methods if m.calls]
        yield _gauge("rpc_error_rate", f"Share of the last {CALLS_KEPT} calls that did not end with OK", failed)
        timeouts = [({"method": name}, m.timeouts) for name, m in methods]
        yield _counter("rpc_timeout_count", "Calls whose deadline passed before their answer", timeouts)
        retries = [({"method": name}, m.retries) for name, m in methods]
        yield _counter("rpc_retry_count", "Calls that said that they were not the first attempt", retries)
        for percent in (50, 99):
            found = [({"method": name}, quantile(m.latencies_ms(), percent / 100)) for name, m in methods if m.calls]
            yield _gauge(f"rpc_latency_p{percent}", f"ms a call took, of the last {CALLS_KEPT}", found)

    def _of_kv(self) -> Iterator[Metric]:
        for method, name in _KV_LATENCIES.items():
            known = self._methods[method]
            metric = Metric(name, f"ms that {method} took, quantiles of the last {CALLS_KEPT} calls", "summary")
            latencies_ms = known.latencies_ms()
            for share in (0.5, 0.99) if latencies_ms else ():
                metric.add_sample(name, {"quantile": f"{share:g}"}, quantile(latencies_ms, share))
            metric.add_sample(f"{name}_count", {}, known.count)
            metric.add_sample(f"{name}_sum", {}, known.sum_ms)
            yield metric
        words, count = "Reads of another node's bytes that did not come in time", self._remote_read_timeouts
        yield _counter("remote_read_timeout_count", words, [({}, count)])


def _gauge(name: str, words: str, values: Iterable[tuple[dict[str, str], float]]) -> Metric:
    family = GaugeMetricFamily(name, words)
    for labels, value in values:
        family.add_sample(name, labels, value)
    return family


def _counter(name: str, words: str, values: Iterable[tuple[dict[str, str], float]]) -> Metric:
    family = UntypedMetricFamily(name, words)
    for labels, value in values:
        family.add_sample(name, labels, value)
    return family
