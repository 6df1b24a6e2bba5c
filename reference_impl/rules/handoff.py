"""The hand-off: what a holder tells a reader through router and client, checked at the door (KVC-XFER-005).

It is vLLM's `kv_transfer_params`, field by field. No value in it can end an engine (R1).
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from reference_impl.rules.clock import NS_PER_S
from reference_impl.rules.messages import ID_CHARS_MAX

BLOCKS_MAX: Final = 1 << 20
_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=ID_CHARS_MAX, pattern=r"^[!-~]+\Z")]
"""One byte a character, so that a client cannot make a heartbeat longer than a notification may be."""
_Block = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_GROUPS: Final = 1
"""KV-cache groups of our model: all layers share one."""


class BadHandOff(Exception):
    """`kv_transfer_params` that cannot be used. `param` is the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class HandOff(msgspec.Struct, frozen=True, kw_only=True):
    """Where the blocks of a request lie. `blocks[i]` holds tokens 16 i and following."""

    engine_id: str
    request_id: str
    """The holder's id (C1)."""
    host: str
    port: int
    blocks: list[int]
    tokens: int
    ranks: int
    expiry_ns: int = 0
    """On the holder's clock; 0: a lease that heartbeats renew, so its end is nobody else's business."""

    slot: int = -1
    """Which of several readers this one is (ours: `remote_reader`); -1: the only one, or not said."""
    block_group: str = ""
    """The blocks are this group's, on loan (ours: `remote_block_group`): a prefix of the prompt, of full blocks."""

    @property
    def turn(self) -> bool:
        """Whether these are decode-side blocks of a finished turn."""
        return self.expiry_ns > 0

    def params(self) -> dict[str, Any]:
        """Return the `kv_transfer_params` that say the same."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_block_ids": [self.blocks],
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": self.ranks,
            "remote_num_tokens": self.tokens,
            "remote_blocks_expiry_time": self.expiry_ns / NS_PER_S if self.expiry_ns else None,
            "transfer_mode": "read",
        } | ({"remote_block_group": self.block_group} if self.block_group else {})


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a request's `kv_transfer_params` ask of an engine."""

    keep: bool = False
    """Keep the prefilled blocks for a remote decode (`do_remote_decode`)."""
    load: HandOff | None = None
    """Load what the hand-off names, and compute the rest (`do_remote_prefill`)."""
    readers: int = 1
    """Distinct readers that will come for the blocks (ours: `remote_readers`)."""


class _Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_engine_id: _Id | None = None
    remote_request_id: _Id | None = None
    remote_block_ids: list[list[_Block]] | None = None
    remote_host: Annotated[str, msgspec.Meta(min_length=1, max_length=253)] | None = None
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65_535)] | None = None
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    remote_blocks_expiry_time: Annotated[float, msgspec.Meta(ge=0, lt=1e9)] | None = None
    transfer_mode: str | None = None
    remote_readers: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    remote_reader: Annotated[int, msgspec.Meta(ge=0, le=1023)] | None = None
    remote_block_group: Annotated[str, msgspec.Meta(max_length=ID_CHARS_MAX, pattern=r"^[!-~]*\Z")] = ""


def parse(params: object, *, block_tokens: int, hosts: tuple[str, ...]) -> Asked:
    """Return what `params` asks. Raises BadHandOff naming the field; `hosts` are those we may connect to."""
    try:
        given = msgspec.convert(params, _Params)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadHandOff(_told(str(error)), _field(str(error))) from error
    if not given.do_remote_prefill:
        return Asked(keep=given.do_remote_decode, readers=given.remote_readers)
    return Asked(keep=given.do_remote_decode, load=_hand_off(given, block_tokens, hosts), readers=given.remote_readers)


def _hand_off(given: _Params, block_tokens: int, hosts: tuple[str, ...]) -> HandOff:
    for name in ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port", "tp_size",
                 "remote_num_tokens"):  # fmt: skip
        if getattr(given, name) is None:
            raise _bad(name, "is missing: do_remote_prefill needs it")
    groups, tokens = given.remote_block_ids or [], given.remote_num_tokens or 0
    if given.transfer_mode not in (None, "read"):
        raise _bad("transfer_mode", f"must be 'read', got {given.transfer_mode!r}")
    if given.tp_size not in (1, 2, 4, 8):
        raise _bad("tp_size", f"must be 1, 2, 4 or 8, got {given.tp_size}")
    if given.remote_host not in hosts:
        raise _bad("remote_host", f"{given.remote_host!r} is not a host that this engine may connect to")
    if len(groups) != _GROUPS:
        raise _bad("remote_block_ids", f"must hold {_GROUPS} list (one a KV-cache group), got {len(groups)}")
    blocks = groups[0]
    wanted = -(-tokens // block_tokens)
    if len(blocks) != wanted or wanted > BLOCKS_MAX:
        raise _bad("remote_block_ids", f"names {len(blocks)} blocks; {tokens} tokens lie in {wanted}")
    if len(set(blocks)) != len(blocks):
        raise _bad("remote_block_ids", "names a block twice")
    return HandOff(
        engine_id=given.remote_engine_id or "", request_id=given.remote_request_id or "", host=given.remote_host or "",
        port=given.remote_port or 0, blocks=blocks, tokens=tokens, ranks=given.tp_size or 1,
        expiry_ns=round((given.remote_blocks_expiry_time or 0) * NS_PER_S),
        slot=-1 if given.remote_reader is None else given.remote_reader,
        block_group=given.remote_block_group,
    )  # fmt: skip


def _bad(name: str, message: str) -> BadHandOff:
    return BadHandOff(f"kv_transfer_params.{name} {message}", f"kv_transfer_params.{name}")


def _told(message: str) -> str:
    """Return a msgspec error with its path from the request's root, where `kv_transfer_params` is a field."""
    reason, at, path = message.rpartition(" - at `$")
    if at and not message.startswith("Object contains unknown field `"):  # a name that a client made up has no path
        return f"{reason} - at `$.kv_transfer_params{path}"
    return f"kv_transfer_params: {message}"


def _field(message: str) -> str:
    """Return the field that a msgspec error names: "... unknown field `x`" or "... - at `$.x`"."""
    if "unknown field `" in message:
        return "kv_transfer_params." + message.rpartition("unknown field `")[2].split("`")[0]
    if "`$." in message:
        return "kv_transfer_params." + message.rpartition("`$.")[2].split("`")[0].split("[")[0]
    return "kv_transfer_params"
