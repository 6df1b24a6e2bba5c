"""What an engine needs to exchange KV with others: transport agents, the side channel, handshakes, the connector.

Made in two steps, so that a parked engine has the slow one behind it: `prepare` (half a second) before it parks,
`connect` once its KV pool is mapped.

The side channel is sealed with the deployment's secret, TOKEN_VARIABLE of the environment. An engine started by hand
without one has the empty secret, which guards against accident only: whoever reaches its side channel can end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from typing import TYPE_CHECKING, Final

import numpy as np

from reference_impl.content import BLOCK_BYTES, BLOCK_TOKENS
from reference_impl.engine.config import MODEL_NAME, EngineConfig
from reference_impl.engine.connector import Connector, Say
from reference_impl.engine.core import EngineCore
from reference_impl.engine.handshakes import BackgroundShaker
from reference_impl.engine.memory import EngineMemory
from reference_impl.realclock import now_ns
from reference_impl.rules.agreement import Hello
from reference_impl.secret import TOKEN_VARIABLE
from reference_impl.transport.hello import HandshakeServer

if TYPE_CHECKING:
    from reference_impl.transport.nixl import Agents, NixlTransport

RANKS_LOOK_S: Final = 0.2


class TransferUnavailable(Exception):
    """KV cannot be moved, or no longer; the message says why."""


class KvTransfer:
    """One engine's means of exchanging KV. `generations` is read by peers and raised by the engine's block pool."""

    def __init__(self, config: EngineConfig, say: Say) -> None:
        self.engine_id = f"{config.engine_id}.{secrets.token_hex(4)}"
        """Names this incarnation to its peers: a successor under the same name is another engine (S5)."""
        self.generations = np.zeros(config.profile.kv_blocks, np.uint64)
        self.connector: Connector | None = None
        self._config = config
        self._say = say
        self._agents: Agents | None = None
        self._transport: NixlTransport | None = None
        secret = os.environb.get(TOKEN_VARIABLE.encode(), b"")
        self._shaker = BackgroundShaker(self._introduction, secret)
        self._side_channel = HandshakeServer(self._hello, self._meet, now_ns, secret)

    async def prepare(self) -> None:
        """Start agents, ranks and the side channel. Raises TransferUnavailable where there is no NIXL."""
        self._agents = await asyncio.to_thread(_agents, self.engine_id, self._config.ranks)
        await self._side_channel.start(self._config.host)

    def connect(self, core: EngineCore, memory: EngineMemory) -> Connector:
        """Offer the mapped KV pool to peers, and return what moves KV from here on."""
        from reference_impl.transport.nixl import NixlTransport

        config = self._config
        self._transport = NixlTransport(
            self.engine_id, memory.kv, self.generations, config.ranks, memory.kv_descriptor, self._agents
        )
        self.connector = Connector(
            core, config.terms, self._transport, self._shaker, self._say, engine_id=self.engine_id, host=config.host,
            port=self._side_channel.port, ranks=config.ranks,
        )  # fmt: skip
        return self.connector

    async def watch(self) -> None:
        """Raise TransferUnavailable when a rank's process has ended: without it this engine must end as well."""
        while self._transport is None or not self._transport.broken:
            await asyncio.sleep(RANKS_LOOK_S)
        raise TransferUnavailable(f"a rank has ended: {self._transport.broken}")

    async def close(self) -> None:
        """End everything. Harmless at any time."""
        await self._side_channel.close()
        await self._shaker.close()
        with contextlib.suppress(OSError, RuntimeError):
            if self._transport is not None:
                self._transport.close()
            elif self._agents is not None:
                self._agents.close()

    def _hello(self) -> Hello | None:
        """Return how we answer a handshake, None while we do not serve."""
        return None if self.connector is None else self._introduction()

    def _introduction(self) -> Hello:
        config = self._config
        return Hello(
            engine_id=self.engine_id, role=config.role, model=MODEL_NAME, block_tokens=BLOCK_TOKENS,
            block_bytes=BLOCK_BYTES, blocks=config.profile.kv_blocks, ranks=config.ranks, terms=config.terms,
            addresses=self._transport.addresses() if self._transport else [],
        )  # fmt: skip

    def _meet(self, theirs: Hello) -> None:
        if self.connector is not None:
            self.connector.welcome(theirs.engine_id, theirs.addresses)


def _agents(engine_id: str, ranks: int) -> Agents:
    try:
        from reference_impl.transport.nixl import Agents

        return Agents(engine_id, ranks)
    except ImportError as error:
        raise TransferUnavailable(f"moving KV needs the package nixl ({error}): run `make setup` on Linux") from error
    except RuntimeError as error:
        raise TransferUnavailable(f"NIXL does not start: {error}") from error
