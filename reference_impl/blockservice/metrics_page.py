"""A block service's metrics over HTTP, for whoever scrapes: GET /metrics, in Prometheus' text format."""

from __future__ import annotations

from aiohttp import web

from reference_impl.blockservice.metrics import RpcMetrics


class MetricsPage:
    """One page, on a port of its own."""

    def __init__(self, metrics: RpcMetrics) -> None:
        self._metrics = metrics
        self._runner: web.AppRunner | None = None

    async def start(self, host: str) -> int:
        """Listen, and return the port."""
        app = web.Application()
        app.add_routes([web.get("/metrics", self._text)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, 0).start()
        port: int = self._runner.addresses[0][1]
        return port

    async def close(self) -> None:
        """Stop listening. Harmless before the start."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _text(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), content_type="text/plain")
