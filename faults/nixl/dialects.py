"""What engines say to each other: of which kind a message is, which requests it names, and how one is taken out of it.

vLLM's words are those of its NIXL connector (0.32): `HB:id,id` keeps leases, `id:readers` says that one of so many
readers has read, `PUSH_REG:` and msgpack asks to be written to. The reference's are `reference_impl.rules.messages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from faults.nixl.flights import Piece
from faults.nixl.orders import TEXT_CHARS_MAX, Kind
from reference_impl.rules.messages import BadMessage, Claim, Heartbeat, Report, decode, encode

_HEARTBEAT: Final = b"HB:"
_REGISTRATION: Final = b"PUSH_REG:"


class Meaning(NamedTuple):
    """What a message says."""

    kind: Kind
    requests: tuple[str, ...] = ()


class Dialect(Protocol):
    """How one kind of engine talks."""

    name: str

    def meaning(self, message: bytes) -> Meaning:
        """Return what `message` says, whatever its bytes are."""
        ...

    def heartbeat(self, requests: tuple[str, ...]) -> bytes:
        """Return a heartbeat for `requests`, one at least."""
        ...

    def holds_kv(self, regions: Sequence[Piece], address: int) -> bool:
        """Whether KV lies at `address`, if this engine has registered `regions`."""
        ...


class Vllm:
    """vLLM's NIXL connector."""

    name = "vllm"

    def meaning(self, message: bytes) -> Meaning:
        """Tell by the prefix; what has none and ends in `:number` is a completion."""
        if message.startswith(_REGISTRATION):
            return Meaning(Kind.REGISTRATION, _registered(message.removeprefix(_REGISTRATION)))
        try:
            text = message.decode()
        except UnicodeDecodeError:
            return Meaning(Kind.UNKNOWN)
        if text.startswith(_HEARTBEAT.decode()):
            return Meaning(Kind.HEARTBEAT, tuple(text.removeprefix(_HEARTBEAT.decode()).split(",")))
        request, _, readers = text.rpartition(":")
        return Meaning(Kind.COMPLETION, (request,)) if request and readers.isdecimal() else Meaning(Kind.UNKNOWN)

    def heartbeat(self, requests: tuple[str, ...]) -> bytes:
        """Return `HB:id,id`."""
        return _HEARTBEAT + ",".join(requests).encode()

    def holds_kv(self, regions: Sequence[Piece], address: int) -> bool:  # noqa: ARG002 # so is the interface
        """It reads nothing else."""
        return True


class Reference:
    """The reference implementation."""

    name = "reference"

    def meaning(self, message: bytes) -> Meaning:
        """Decode it."""
        try:
            match decode(message):
                case Heartbeat(requests):
                    return Meaning(Kind.HEARTBEAT, tuple(requests))
                case Report(request):
                    return Meaning(Kind.COMPLETION, (request,))
                case Claim(request):
                    return Meaning(Kind.CLAIM, (request,))
                case answer:
                    return Meaning(Kind.ANSWER, (answer.request,))
        except BadMessage:
            return Meaning(Kind.UNKNOWN)

    def heartbeat(self, requests: tuple[str, ...]) -> bytes:
        """Encode one."""
        return encode(Heartbeat(list(requests)))

    def holds_kv(self, regions: Sequence[Piece], address: int) -> bool:
        """Its pool is the largest region; beside it, it reads the blocks' generations."""
        if not regions:
            return False
        first, size_bytes = max(regions, key=lambda region: region.size_bytes)
        return first <= address < first + size_bytes


class _Registration(msgspec.Struct):
    request_id: str
    remote_request_id: str = ""


def _registered(data: bytes) -> tuple[str, ...]:
    try:
        found = msgspec.msgpack.decode(data, type=_Registration)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return ()
    return (found.request_id,)


def apart(dialect: Dialect, message: bytes, request: str) -> tuple[bytes | None, bytes | None]:
    """Return the part of `message` that names `request` (part of an id; "" is any), and the rest; None: there is none.

    Only a heartbeat has parts: any other message is struck whole, or not at all.
    """
    kind, requests = dialect.meaning(message)
    named = tuple(each for each in requests if request in each)
    if not request or (named and len(named) == len(requests)):
        return message, None
    if not named:
        return None, message
    if kind is not Kind.HEARTBEAT:
        return message, None
    others = tuple(each for each in requests if each not in named)
    return dialect.heartbeat(named), dialect.heartbeat(others)


def damaged(message: bytes) -> bytes:
    """Return `message` with the lowest bit of its middle byte changed: text remains text. An empty one stays empty."""
    middle = len(message) // 2
    return message[:middle] + bytes([each ^ 1 for each in message[middle : middle + 1]]) + message[middle + 1 :]


def garbled(message: bytes) -> bytes:
    """Return `message` with the highest bit of every byte set."""
    return bytes([each | 0x80 for each in message])


def shortened(message: bytes) -> str:
    """Return a message as text for a report."""
    text = message.decode("ascii", errors="backslashreplace")
    return text if len(text) <= TEXT_CHARS_MAX else text[: TEXT_CHARS_MAX - 1] + "…"
