"""A pair of real vLLM servers, prefill and decode, each on a core of its own, and what tests ask of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
import pytest

from faults.nixl.channel import FOLDER_VARIABLE, NAME_VARIABLE
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import s_to_ns

INTERPRETER_VARIABLE: Final = "PDPROOF_VLLM_PYTHON"
HOST: Final = "127.0.0.1"
MODEL: Final = "canary"
START_LIMIT_S: Final = 180.0
END_LIMIT_S: Final = 10.0
ANSWER_LIMIT_S: Final = 60.0
POLL_S: Final = 0.1
LEASE_S: Final = 6
POKE: Final = [1, 2, 3]
KEEP: Final = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


class Server:
    """One vLLM server, starting. End it by `end`."""

    def __init__(self, name: str, core: int, folder: Path, model: Path, faults: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        port, side_port = _free_port(), _free_port()
        self.url = f"http://{HOST}:{port}"
        transfer = {
            "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }  # fmt: skip
        command = [
            os.environ[INTERPRETER_VARIABLE], "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--served-model-name", MODEL, "--host", HOST, "--port", str(port), "--dtype", "float32",
            "--enforce-eager", "--block-size", "128", "--max-model-len", "36864",
            "--num-gpu-blocks-override", "600", "--kv-transfer-config", json.dumps(transfer),
        ]  # fmt: skip
        environment = {
            FOLDER_VARIABLE: str(faults), NAME_VARIABLE: name,
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
        }  # fmt: skip
        # The folder: in one that holds a `pdproof.egg-info`, that would hide the entry points of the one installed.
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(
                command, cwd=folder, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),  # noqa: PLW1509 # nothing else runs in this thread
            )  # fmt: skip

    def wait_until_it_serves(self) -> None:
        """Wait for its health. Raises AssertionError with the end of its log."""

        async def serves() -> None:
            deadline_ns = now_ns() + s_to_ns(START_LIMIT_S)
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
                while True:
                    assert self._child.poll() is None, f"{self.name} has ended: {self.log.read_text()[-3000:]}"
                    assert now_ns() < deadline_ns, f"{self.name} does not serve: {self.log.read_text()[-3000:]}"
                    with suppress(aiohttp.ClientError, TimeoutError):
                        async with session.get(self.url + "/health") as response:
                            if response.status == 200:
                                return
                    await asyncio.sleep(POLL_S)

        asyncio.run(serves())

    def end(self) -> None:
        """End its whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(END_LIMIT_S)


class Answer:
    """What a server answered to a completion."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        self.status = status
        self.body = body

    @property
    def handoff(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body["kv_transfer_params"]
        return found

    @property
    def tokens(self) -> list[int]:
        assert self.status == 200, self.body
        found: list[int] = self.body["choices"][0]["token_ids"]
        return found

    @property
    def logprobs(self) -> list[float]:
        found: list[float] = self.body["choices"][0]["logprobs"]["token_logprobs"]
        return found


class Client:
    """A client of both servers. Use it as an async context."""

    def __init__(self, prefill: Server, decode: Server) -> None:
        self._servers = {"p": prefill, "d": decode}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_LIMIT_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(self, name: str, prompt: list[int], tokens: int, params: object = None) -> Answer:
        """Ask one server for a completion."""
        assert self._session is not None
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "logprobs": 1,
        }  # fmt: skip
        if params is not None:
            body["kv_transfer_params"] = params
        async with self._session.post(self._servers[name].url + "/v1/completions", json=body) as response:
            return Answer(response.status, await response.json())

    async def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Prefill, as a router does, and return the hand-off."""
        answer = await self.ask("p", prompt, 1, KEEP)
        assert answer.status == 200, answer.body
        return answer.handoff

    async def decode(self, prompt: list[int], handoff: object, tokens: int = 4) -> Answer:
        """Hand over, as a router does."""
        return await self.ask("d", prompt, tokens, handoff)

    async def counts(self, name: str, *metrics: str) -> list[float]:
        """Return some of a server's counters, summed over labels, after a step that lets it bring them up to date."""
        assert self._session is not None
        assert (await self.ask(name, POKE, 1)).status == 200
        await asyncio.sleep(POLL_S)
        async with self._session.get(self._servers[name].url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        found = dict.fromkeys(metrics, 0.0)
        for line in lines:
            key, _, value = line.rpartition(" ")
            if (metric := key.partition("{")[0]) in found:
                found[metric] += float(value)
        return list(found.values())

    async def until_count(self, name: str, metric: str, least: float, limit_s: float) -> float:
        """Wait until a counter has grown so far; return it, as it is after the limit at the latest."""
        deadline_ns = now_ns() + s_to_ns(limit_s)
        while True:
            (value,) = await self.counts(name, metric)
            if value >= least or now_ns() > deadline_ns:
                return value
            await asyncio.sleep(5 * POLL_S)


class Pair:
    """Two servers that serve, and the folder of their faults."""

    def __init__(self, prefill: Server, decode: Server, faults: Path) -> None:
        self.prefill = prefill
        self.decode = decode
        self.faults = faults

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """Return a client of both."""
        async with Client(self.prefill, self.decode) as client:
            yield client


def skipped() -> str | None:
    """Return why there can be no pair here, or None."""
    if not os.environ.get(INTERPRETER_VARIABLE):
        return f"{INTERPRETER_VARIABLE} names no interpreter with vLLM"
    if len(os.sched_getaffinity(0)) < 2:
        return "two vLLM servers need two cores"
    return None


@contextmanager
def pair(folder: Path, model: Path, faults: Path) -> Iterator[Pair]:
    """Bring a pair up, and end it. Skips the test where there can be none."""
    reason = skipped()
    if reason:
        pytest.skip(reason)
    cores = sorted(os.sched_getaffinity(0))
    servers: list[Server] = []
    try:
        servers += [Server("p0", cores[0], folder, model, faults)]
        servers += [Server("d0", cores[1], folder, model, faults)]
        for server in servers:
            server.wait_until_it_serves()
        yield Pair(servers[0], servers[1], faults)
    finally:
        for server in servers:
            server.end()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        port: int = taken.getsockname()[1]
        return port
