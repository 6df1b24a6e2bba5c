"""The engine's side of the registration connection."""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp
import msgspec

from reference_impl.router.protocol import MESSAGE_BYTES_MAX, REGISTER_PATH, TOKEN_HEADER, Answer, Register

CONNECT_LIMIT_S: Final = 5.0
ANSWER_LIMIT_S: Final = 2.0


class RegistrationError(Exception):
    """The router could not be reached, or refused; the message says which and why."""


class Registration:
    """A connection to the router, made early (a parked engine already has it) and used once awake."""

    def __init__(self, router_url: str, token: str) -> None:
        self._url = router_url
        self._token = token
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def connect(self) -> None:
        """Connect. Raises RegistrationError within `CONNECT_LIMIT_S`."""
        self._session = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                self._socket = await self._session.ws_connect(
                    self._url + REGISTER_PATH, headers={TOKEN_HEADER: self._token}, max_msg_size=MESSAGE_BYTES_MAX
                )
        except (aiohttp.ClientError, TimeoutError) as error:
            await self.close()
            raise RegistrationError(f"router {self._url}: no registration connection: {error!r}") from error

    async def register(self, message: Register) -> None:
        """Register, and return once the router has accepted. Raises RegistrationError."""
        if self._socket is None or self._socket.closed:
            await self.close()
            await self.connect()
        if self._socket is None:
            raise RegistrationError(f"router {self._url}: not connected")
        try:
            await self._socket.send_bytes(msgspec.json.encode(message))
            raw = await self._socket.receive_bytes(timeout=ANSWER_LIMIT_S)
            answer = msgspec.json.decode(raw, type=Answer)
        except (aiohttp.ClientError, TimeoutError, TypeError, ConnectionError, msgspec.DecodeError) as error:
            raise RegistrationError(f"router {self._url}: no answer to the registration: {error!r}") from error
        if not answer.accepted:
            raise RegistrationError(f"router {self._url} refused epoch {message.epoch}: {answer.reason}")

    async def wait_closed(self) -> None:
        """Return when the router has gone or dropped this engine."""
        while self._socket is not None and not self._socket.closed:
            message = await self._socket.receive()
            if message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR):
                return

    async def close(self) -> None:
        """Close the connection; the router drops the engine at once."""
        if self._session is not None:
            await self._session.close()
        self._session = self._socket = None
