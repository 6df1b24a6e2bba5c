"""What is sent: the tokens of a prompt, made again at will from its `PromptSpec`, and the body of its request."""

from __future__ import annotations

import enum
import functools
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from reference_impl import tokens
from workloads.chance import generator
from workloads.rows import PromptSpec

BLOCKS_KEPT: Final = 4096
"""Blocks of traces that are remembered (16 MiB at 512 tokens): drawing one takes 50 us, and most come again."""
_WORDS_A_DRAW: Final = 4
"""One 64-bit draw holds four 16-bit words; a token is the low bits of one."""


class Api(enum.StrEnum):
    """Which of the two OpenAI streams is asked for."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """Path below the host."""
        return "/v1/completions" if self is Api.COMPLETIONS else "/v1/chat/completions"


class PromptFormat(enum.StrEnum):
    """How a prompt travels."""

    IDS = "ids"
    TEXT = "text"


NO_TOKENS: Final[NDArray[np.int64]] = np.zeros(0, np.int64)


def prompt_tokens(spec: PromptSpec, before: NDArray[np.int64] = NO_TOKENS) -> NDArray[np.int64]:
    """Return the prompt's tokens, shape (`input_tokens`,), each in [0, 4096).

    `before` is what a later turn repeats: the prompt of the turn before, and the tokens that it was answered. Raises
    ValueError if it is missing or does not fit, if the prefix is longer than the prompt, or if blocks do not fill it.
    """
    if spec.after:
        return _later_turn(spec, before)
    if spec.block_ids:
        return _of_blocks(spec)
    prefix_tokens = spec.prefix_tokens if spec.prefix_group >= 0 else 0
    if prefix_tokens > spec.input_tokens:
        raise ValueError(f"a prefix of {prefix_tokens} tokens does not fit in a prompt of {spec.input_tokens}")
    own = _drawn(spec.input_tokens - prefix_tokens, spec.seed, "prompt", spec.index)
    if not prefix_tokens:
        return own
    return np.concatenate([_drawn(prefix_tokens, spec.seed, "prefix", spec.prefix_group), own])


def _later_turn(spec: PromptSpec, before: NDArray[np.int64]) -> NDArray[np.int64]:
    if not 0 < len(before) <= spec.input_tokens:
        raise ValueError(
            f"a prompt of {spec.input_tokens} tokens cannot follow {spec.after}, which left {len(before)} tokens"
        )
    own = _drawn(spec.input_tokens - len(before), spec.seed, "turn", spec.index, spec.turn)
    return np.concatenate([before, own])


def _of_blocks(spec: PromptSpec) -> NDArray[np.int64]:
    last_tokens = spec.input_tokens - (len(spec.block_ids) - 1) * spec.block_tokens
    if not 0 < last_tokens <= spec.block_tokens:
        raise ValueError(
            f"{len(spec.block_ids)} blocks of {spec.block_tokens} tokens do not make a prompt of {spec.input_tokens}"
        )
    return np.concatenate([_block(spec.block_tokens, spec.seed, b) for b in spec.block_ids])[: spec.input_tokens]


@functools.lru_cache(maxsize=BLOCKS_KEPT)
def _block(count: int, seed: int, block: int) -> NDArray[np.int64]:
    return _drawn(count, seed, "block", block)


def _drawn(count: int, seed: int, *stream: str | int) -> NDArray[np.int64]:
    # Raw bits, because only these are promised to stay the same in every version of numpy: an old run folder must
    # stay judgeable.
    raw = generator(seed, *stream).bit_generator.random_raw(-(-count // _WORDS_A_DRAW))
    words = np.asarray(raw, dtype="<u8").view("<u2")[:count]
    return (words % tokens.VOCABULARY).astype(np.int64)


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = True


class _Message(msgspec.Struct, frozen=True):
    content: str
    role: str = "user"


class _Body(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Both requests. What has a default here and keeps it is left out."""

    model: str
    max_tokens: int
    prompt: list[int] | str | None = None
    messages: list[_Message] | None = None
    temperature: float
    stream: bool
    stream_options: _StreamOptions
    # vLLM's own: answer to the full length, and say which tokens a chunk holds.
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    logprobs: int | bool | None = None
    kv_transfer_params: msgspec.Raw | None = None


def request_body(
    prompt: NDArray[np.int64],
    *,
    model: str,
    max_tokens: int,
    api: Api,
    prompt_format: PromptFormat,
    strict_openai: bool = False,
    logprobs: bool = False,
    hand_off: bytes = b"",
) -> bytes:
    """Return the JSON body of a streamed request.

    With `logprobs` each token comes with the logarithm of its probability. `strict_openai` leaves out what only vLLM
    and its kin know. `hand_off` is the JSON of the `kv_transfer_params` that the turn before ended with, sent on byte
    for byte.
    """
    ids: list[int] = prompt.tolist()
    own: dict[str, Any]
    if api is Api.CHAT:
        own = {"messages": [_Message(tokens.decode(ids))]}
    else:
        own = {"prompt": ids if prompt_format is PromptFormat.IDS else tokens.decode(ids)}
    if not strict_openai:
        own |= {"ignore_eos": True, "return_token_ids": True}
    if logprobs:
        own["logprobs"] = True if api is Api.CHAT else 0  # of the chosen token alone
    if hand_off:
        own["kv_transfer_params"] = msgspec.Raw(hand_off)
    return msgspec.json.encode(
        _Body(
            model=model, max_tokens=max_tokens, temperature=0, stream=True, stream_options=_StreamOptions(True), **own
        )
    )
