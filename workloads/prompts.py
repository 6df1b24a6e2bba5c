"""What is sent: the tokens of a prompt, made again at will from its `PromptSpec`, and the body of its request."""

from __future__ import annotations

import enum
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from reference_impl import tokens
from workloads.chance import generator
from workloads.rows import PromptSpec

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


def prompt_tokens(spec: PromptSpec) -> NDArray[np.int64]:
    """Return the prompt's tokens, shape (`input_tokens`,), each in [0, 4096).

    Raises ValueError if the prefix is longer than the prompt.
    """
    prefix_tokens = spec.prefix_tokens if spec.prefix_group >= 0 else 0
    if prefix_tokens > spec.input_tokens:
        raise ValueError(f"a prefix of {prefix_tokens} tokens does not fit in a prompt of {spec.input_tokens}")
    own = _drawn(spec.input_tokens - prefix_tokens, spec.seed, "prompt", spec.index)
    if not prefix_tokens:
        return own
    return np.concatenate([_drawn(prefix_tokens, spec.seed, "prefix", spec.prefix_group), own])


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


def request_body(
    spec: PromptSpec, *, model: str, max_tokens: int, api: Api, prompt_format: PromptFormat, strict_openai: bool = False
) -> bytes:
    """Return the JSON body of a streamed request. `strict_openai` leaves out what only vLLM and its kin know."""
    ids: list[int] = prompt_tokens(spec).tolist()
    own: dict[str, Any]
    if api is Api.CHAT:
        own = {"messages": [_Message(tokens.decode(ids))]}
    else:
        own = {"prompt": ids if prompt_format is PromptFormat.IDS else tokens.decode(ids)}
    if not strict_openai:
        own |= {"ignore_eos": True, "return_token_ids": True}
    return msgspec.json.encode(
        _Body(
            model=model, max_tokens=max_tokens, temperature=0, stream=True, stream_options=_StreamOptions(True), **own
        )
    )
