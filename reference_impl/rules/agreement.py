"""What two engines tell each other when they meet, and whether they suit each other (KVC-HSK-001)."""

from __future__ import annotations

import enum
from typing import Annotated, Final

import msgspec

from reference_impl.rules.messages import ID_CHARS_MAX
from reference_impl.rules.terms import KvTerms

PROTOCOL_VERSION: Final = 1
RANKS: Final = (1, 2, 4, 8)
"""How many ranks an engine may have: a block's eight head groups are shared out evenly."""

AGREED_TERMS: Final = ("design", "kv_lease_duration", "bidirectional_kv_xfer", "decoder_kv_blocks_ttl", "read_limit")
"""Terms that both sides must have alike (C3): each acts on what the other one promises."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=ID_CHARS_MAX)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Address = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class RankAddress(msgspec.Struct, frozen=True):
    """What a peer needs to reach one rank: its agent's metadata, and where its memory lies."""

    metadata: Annotated[bytes, msgspec.Meta(max_length=64 * 1024)]
    kv_address: _Address
    """Of the whole pool's first byte, as this rank maps it."""
    generations_address: _Address
    """Of the array of block generations (uint64 each); 0 on every rank but the first."""
    blocks: _Count
    """How many blocks the pool has; no read goes past them."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """One side's introduction. Unknown fields are let through, so that a newer peer can be refused by its version."""

    protocol: int = PROTOCOL_VERSION
    engine_id: _Name
    role: _Name
    model: _Name
    block_tokens: _Count
    block_bytes: _Count
    blocks: _Count
    ranks: int
    terms: KvTerms
    addresses: Annotated[list[RankAddress], msgspec.Meta(max_length=max(RANKS))]


def incompatible(mine: Hello, theirs: Hello) -> str:
    """Return why the two engines cannot exchange KV, with the field and both its values; "" if they can."""
    pairs = {
        "protocol": (mine.protocol, theirs.protocol),
        "model": (mine.model, theirs.model),
        "block_tokens": (mine.block_tokens, theirs.block_tokens),
        "block_bytes": (mine.block_bytes, theirs.block_bytes),
        **{name: (getattr(mine.terms, name), getattr(theirs.terms, name)) for name in AGREED_TERMS},
    }
    for field, (ours, other) in pairs.items():
        if ours != other:
            return f"{field} differs: {_shown(ours)} here, {_shown(other)} there"
    for hello in (mine, theirs):
        if hello.ranks not in RANKS:
            return f"ranks must be one of {RANKS}, and {hello.engine_id} has {hello.ranks}"
        if len(hello.addresses) != hello.ranks:
            return f"{hello.engine_id} has {hello.ranks} ranks and {len(hello.addresses)} addresses"
        if any(address.blocks != hello.blocks for address in hello.addresses):
            return f"{hello.engine_id} has {hello.blocks} blocks and addresses that say otherwise"
    if mine.engine_id == theirs.engine_id:
        return f"engine_id is the same on both sides: {mine.engine_id!r}"
    return ""


def _shown(value: object) -> str:
    return repr(value.value if isinstance(value, enum.Enum) else value)
