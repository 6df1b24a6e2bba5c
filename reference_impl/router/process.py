"""The router's process: `python -m reference_impl.router.process --port 0`; prints its address as one JSON line."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import uvloop
from aiohttp import web

from reference_impl.event_log import EventLog
from reference_impl.processes import die_with_parent
from reference_impl.router.server import Router
from reference_impl.secret import TOKEN_VARIABLE


async def _run(arguments: argparse.Namespace, token: str) -> int:
    events = EventLog(Path(arguments.events) if arguments.events else None, "router")
    prefixes, learning = None, None
    if arguments.blocks_nodes:
        from reference_impl.router.prefixes import Prefixes  # gRPC costs a router that does not need it its start

        prefixes = Prefixes(Path(arguments.run_dir), arguments.blocks_nodes.split(","), token.encode())
        learning = asyncio.create_task(prefixes.run())
    app = Router(token, events, prefixes).app
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, arguments.host, arguments.port, backlog=512).start()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        where = f"{arguments.host}:{arguments.port}"
        problem = f"router: cannot listen on {where}: {reason}; choose another --port"
        print(problem, file=sys.stderr)  # noqa: T201 # the one clear line
        await runner.cleanup()
        return 7
    port = runner.addresses[0][1]
    print(json.dumps({"url": f"http://{arguments.host}:{port}"}), flush=True)  # noqa: T201
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    await stop.wait()
    await runner.cleanup()
    if learning is not None:
        learning.cancel()
        await asyncio.gather(learning, return_exceptions=True)
    return 0


def main() -> None:
    """Run the router."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--events", default="")
    parser.add_argument("--parent-pid", type=int, default=0)
    parser.add_argument("--run-dir", default="", help="the deployment's private folder")
    parser.add_argument("--blocks-nodes", default="", help="nodes with block services, whose prefixes may be borrowed")
    arguments = parser.parse_args()
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        parser.error(f"set {TOKEN_VARIABLE}: engines register with it")
    if arguments.parent_pid:
        die_with_parent(arguments.parent_pid)
    sys.exit(uvloop.run(_run(arguments, token)))


if __name__ == "__main__":
    main()
