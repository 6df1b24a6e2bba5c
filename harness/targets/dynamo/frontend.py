"""What Dynamo's front end says when it is asked from outside: whom it knows, and who answered a request.

`GET /health` lists instances as discovery knows them. A mocker is listed before its engine answers (with its option
`--startup-time` by the whole of that time, in which requests are sent to it and wait), and one that was killed stays
listed until its discovery lease ends. So the list shows neither that a worker serves nor that it does not.
"""

from __future__ import annotations

from typing import Final

import aiohttp
import msgspec

GENERATE: Final = "generate"
"""The endpoint that answers requests; an instance has others beside it."""
HEALTH_LIMIT_S: Final = 2.0
CANARY_LIMIT_S: Final = 30.0
CANARY_PROMPT: Final = [1, 2, 3, 4]
NAMED_FIELD: Final = "worker_id"
"""Of `nvext.extra_fields`: have each event say which instance it is from."""


class _Transport(msgspec.Struct, frozen=True):
    tcp: str = ""


class _Instance(msgspec.Struct, frozen=True):
    instance_id: int
    endpoint: str = ""
    transport: _Transport = _Transport()

    @property
    def port(self) -> int:
        """The port of its address `host:port/...`, 0 if it has none."""
        port = self.transport.tcp.partition("/")[0].rpartition(":")[2]
        return int(port) if port.isdecimal() else 0


class _Health(msgspec.Struct, frozen=True):
    instances: list[_Instance] = []


class _WorkerIds(msgspec.Struct, frozen=True):
    decode_worker_id: int | None = None


class _Nvext(msgspec.Struct, frozen=True):
    worker_id: _WorkerIds | None = None


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class _Answer(msgspec.Struct, frozen=True):
    """A whole answer, or an event of a streamed one."""

    choices: list[_Choice] = []
    nvext: _Nvext | None = None


def listed_at(health: bytes, port: int) -> int | None:
    """Return the id of the instance that answers requests at `port`, as /health says; None: none is listed."""
    try:
        instances = msgspec.json.decode(health, type=_Health).instances
    except msgspec.DecodeError:
        return None
    return next((i.instance_id for i in instances if i.endpoint == GENERATE and i.port == port), None)


def answered_by(answer: bytes) -> int | None:
    """Return the id of the instance that an answer, or one event of it, is from; None: it does not say."""
    try:
        nvext = msgspec.json.decode(answer, type=_Answer).nvext
    except msgspec.DecodeError:
        return None
    return nvext.worker_id.decode_worker_id if nvext and nvext.worker_id else None


def is_whole(answer: bytes) -> bool:
    """Whether an answer that did not stream came to its end."""
    try:
        choices = msgspec.json.decode(answer, type=_Answer).choices
    except msgspec.DecodeError:
        return False
    return bool(choices) and choices[0].finish_reason == "length"


class Frontend:
    """Asks the front end at `url`. What cannot be answered now is None or false, and never an error."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self._model = model

    async def health(self) -> bytes | None:
        """Return what /health says, None while it does not answer."""
        try:
            limit = aiohttp.ClientTimeout(total=HEALTH_LIMIT_S)
            async with self._session.get(f"{self._url}/health", timeout=limit) as response:
                return await response.read()
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def instance_at(self, port: int) -> int | None:
        """Return the id of the instance listed at `port`."""
        health = await self.health()
        return None if health is None else listed_at(health, port)

    async def serves(self, instance_id: int) -> bool:
        """Have the front end send a request of one token to this instance: whether it answered it, whole.

        Its words are not looked at: a mocker's are drawn by chance.
        """
        body = {
            "model": self._model, "prompt": CANARY_PROMPT, "max_tokens": 1, "temperature": 0,
            "nvext": {"backend_instance_id": instance_id, "extra_fields": [NAMED_FIELD]},
        }  # fmt: skip
        try:
            limit = aiohttp.ClientTimeout(total=CANARY_LIMIT_S)
            async with self._session.post(f"{self._url}/v1/completions", json=body, timeout=limit) as response:
                answer = await response.read()
                return response.status == 200 and answered_by(answer) == instance_id and is_whole(answer)
        except (aiohttp.ClientError, TimeoutError):
            return False
