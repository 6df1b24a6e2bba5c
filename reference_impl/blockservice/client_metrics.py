"""What clients count, under the RPC document's names to the letter, as the server's metrics are (KVC-IDEM-018).

Figures of the last ten seconds are for who looks at one scrape, the counters beside them for who draws a line.
Counters keep the document's names, without `_total`, so they are exposed untyped.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric, UntypedMetricFamily

from reference_impl.blockservice.breaker import Breaker, BreakerState
from reference_impl.blockservice.calls import CallOutcome
from reference_impl.blockservice.pool import Pool
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_MS, NS_PER_S

WINDOW_NS: Final = 10 * NS_PER_S
RECENT_MAX: Final = 8192
_STATES: Final = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


class Ended(NamedTuple):
    """One call that ended: when, after how long, and whether without a reply."""

    end_ns: int
    latency_ms: float
    error: bool


class Recent(NamedTuple):
    """The last ten seconds."""

    qps: float
    error_rate: float
    p50_ms: float
    p99_ms: float


class CallStats:
    """One client's counts. A call is in flight from when it is made until its caller has the result."""

    def __init__(self) -> None:
        self.inflight = 0
        self.retries = 0
        self.timeouts = 0
        self.calls: Counter[tuple[str, str]] = Counter()
        """Calls that ended, by method and outcome ("cancelled": given up by their caller)."""
        self._recent: deque[Ended] = deque(maxlen=RECENT_MAX)

    def ended(self, method: str, outcome: CallOutcome | str, began_ns: int, *, error: bool) -> float:
        """Note the end of a call; return its latency in ms."""
        end_ns = now_ns()
        latency_ms = (end_ns - began_ns) / NS_PER_MS
        self.calls[method, str(outcome)] += 1
        self._recent.append(Ended(end_ns, latency_ms, error))
        return latency_ms

    def recent(self) -> Recent:
        """Return the figures of the last ten seconds, or of the last calls if there were too many to remember."""
        now = now_ns()
        while self._recent and self._recent[0].end_ns < now - WINDOW_NS:
            self._recent.popleft()
        if not self._recent:
            return Recent(0.0, 0.0, 0.0, 0.0)
        full = len(self._recent) == RECENT_MAX
        span_ns = max(1, now - self._recent[0].end_ns) if full else WINDOW_NS
        n, ranked = len(self._recent), sorted(ended.latency_ms for ended in self._recent)
        errors = sum(ended.error for ended in self._recent)
        return Recent(n * NS_PER_S / span_ns, errors / n, _rank(ranked, 0.5), _rank(ranked, 0.99))


class Watched(NamedTuple):
    """One client, as far as it is looked at."""

    target: str
    tenant: str
    stats: CallStats
    pool: Pool
    breaker: Breaker
    number: int
    """Tells clients of one target and tenant apart."""

    @property
    def labels(self) -> list[str]:
        """Return the values of `LABELS`."""
        return [self.target, self.tenant, str(self.number)]


LABELS: Final = ("target", "tenant", "client")


class ClientMetrics:
    """The metrics of all clients of a process, each under its own labels: `target`, `tenant` and a number."""

    def __init__(self) -> None:
        self._clients: list[Watched] = []
        self._added = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add(self, target: str, tenant: str, stats: CallStats, pool: Pool, breaker: Breaker) -> Watched:
        """Look at a client from now on; what is returned is for `remove`."""
        self._added += 1
        client = Watched(target, tenant, stats, pool, breaker, self._added)
        self._clients.append(client)
        return client

    def remove(self, client: Watched) -> None:
        """Look at it no longer."""
        self._clients.remove(client)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric (the registry's protocol)."""
        recent = {id(client): client.stats.recent() for client in self._clients}
        yield self._gauge("rpc_qps", "calls ended a second, last 10 s", lambda c: recent[id(c)].qps)
        yield self._gauge(
            "rpc_error_rate", "share of calls without a reply, last 10 s", lambda c: recent[id(c)].error_rate
        )
        yield self._gauge("rpc_latency_p50", "ms a call, retries included, last 10 s", lambda c: recent[id(c)].p50_ms)
        yield self._gauge("rpc_latency_p99", "ms a call, retries included, last 10 s", lambda c: recent[id(c)].p99_ms)
        yield self._calls()
        yield self._counter("rpc_timeout_count", "attempts not answered in time", lambda c: c.stats.timeouts)
        yield self._counter("rpc_retry_count", "attempts after the first of a call", lambda c: c.stats.retries)
        yield self._gauge("rpc_inflight_requests", "calls under way", lambda c: c.stats.inflight)
        yield self._gauge("connection_pool_in_use", "places taken on connections", lambda c: c.pool.in_use)
        yield self._counter(
            "connection_pool_wait_time", "ms that attempts waited for a place", lambda c: c.pool.waited_s * 1e3
        )
        yield self._counter("connection_pool_places", "places given, most without waiting", lambda c: c.pool.waits)
        yield self._gauge(
            "circuit_breaker_state", "0 CLOSED, 1 HALF_OPEN, 2 OPEN", lambda c: _STATES.index(c.breaker.state)
        )

    def _calls(self) -> Metric:
        family = UntypedMetricFamily("rpc_calls", "calls that ended", labels=[*LABELS, "method", "outcome"])
        for client in self._clients:
            for (method, outcome), count in sorted(client.stats.calls.items()):
                family.add_metric([*client.labels, method, outcome], count)
        return family

    def _counter(self, name: str, help_text: str, value: Callable[[Watched], float]) -> Metric:
        family = UntypedMetricFamily(name, help_text, labels=LABELS)
        for client in self._clients:
            family.add_metric(client.labels, value(client))
        return family

    def _gauge(self, name: str, help_text: str, value: Callable[[Watched], float]) -> Metric:
        family = GaugeMetricFamily(name, help_text, labels=LABELS)
        for client in self._clients:
            family.add_metric(client.labels, value(client))
        return family


def _rank(ranked: list[float], share: float) -> float:
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]
