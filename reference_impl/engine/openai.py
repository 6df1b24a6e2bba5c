"""The OpenAI-compatible bodies that the engine reads and writes.

What is understood: `prompt` (text, or token ids) or `messages`, `max_tokens`, `stream`, `stream_options.include_usage`,
and as in vLLM `return_token_ids` and `kv_transfer_params`. What would change the answer and is not understood is
refused; sampling parameters are accepted and have no effect, because the right answer is a function of the prompt.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
import numpy as np

from reference_impl import tokens
from reference_impl.content import Ints

DEFAULT_MAX_TOKENS: Final = 16


class RequestError(Exception):
    """A request that must be answered with HTTP 400. `param` is the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool = False


class Part(msgspec.Struct, frozen=True):
    """A part of a chat message; only text is understood."""

    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True):
    """One chat message."""

    role: str
    content: str | list[Part]

    def text(self) -> str:
        """Return its text. Raises RequestError for a part that is none."""
        if isinstance(self.content, str):
            return self.content
        if other := [part.type for part in self.content if part.type != "text"]:
            raise RequestError(f"a part of type {other[0]!r} is not supported: only text is", "messages")
        return " ".join(part.text for part in self.content)


class Body(msgspec.Struct, frozen=True):
    """The fields that both endpoints share."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    n: int | None = 1
    stop: str | list[str] | None = None
    echo: bool | None = False
    prompt: str | list[int | str | list[int]] | None = None
    messages: list[Message] | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class Parsed(msgspec.Struct, frozen=True):
    """A request that the engine can run."""

    prompt: Ints
    max_tokens: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    chat: bool
    kv_transfer_params: object = None
    """As sent; its own rules check it (`rules.handoff`)."""


_BODY: Final = msgspec.json.Decoder(Body)


def parse(raw: bytes, *, chat: bool, model: str) -> Parsed:
    """Return the request in `raw`. Raises RequestError naming the field at fault."""
    try:
        body = _BODY.decode(raw)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), _field(str(error))) from error
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    if body.model is not None and body.model != model:
        raise RequestError(f"model {body.model!r} is not served here; {model!r} is", "model")
    if body.n not in (None, 1):
        raise RequestError(f"n must be 1, got {body.n}", "n")
    if body.stop:
        raise RequestError("stop is not supported: every answer has max_tokens tokens", "stop")
    if body.echo:
        raise RequestError("echo is not supported", "echo")
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    max_tokens = DEFAULT_MAX_TOKENS if wanted is None else wanted
    if max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, got {max_tokens}", "max_tokens")
    return Parsed(
        prompt=_chat_prompt(body) if chat else _prompt(body.prompt),
        max_tokens=max_tokens,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        return_token_ids=bool(body.return_token_ids),
        chat=chat,
        kv_transfer_params=_params(body.kv_transfer_params),
    )


class _OnlyParams(msgspec.Struct, frozen=True):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def kv_transfer_params(raw: bytes) -> object:
    """Return the `kv_transfer_params` of a body whatever else is wrong with it, None if there are none to be read."""
    try:
        return _params(msgspec.json.decode(raw, type=_OnlyParams).kv_transfer_params)
    except (msgspec.DecodeError, RecursionError, RequestError):
        return None


def _params(raw: msgspec.Raw) -> object:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"kv_transfer_params is not JSON: {error}", "kv_transfer_params") from error


def _field(message: str) -> str | None:
    """Return the field that a msgspec error such as "... - at `$.max_tokens`" names."""
    path = message.rpartition("`$.")[2]
    return path.split("`")[0].split("[")[0] if "`$." in message else None


def _prompt(prompt: str | list[int | str | list[int]] | None) -> Ints:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0] if isinstance(prompt[0], str) else list(prompt[0])
    if isinstance(prompt, str):
        prompt = list(tokens.encode(prompt))
    if not prompt:
        raise RequestError("prompt must be a text or a list of token ids, and not empty", "prompt")
    if not all(isinstance(token, int) for token in prompt):
        raise RequestError("prompt must be one text or one list of token ids; batches are not supported", "prompt")
    try:
        ids = np.array(prompt, np.int64)
    except OverflowError as error:
        raise RequestError("prompt holds a token id outside 64 bits", "prompt") from error
    outside = ids[(ids < 0) | (ids >= tokens.VOCABULARY)]
    if outside.size:
        raise RequestError(f"prompt holds token id {outside[0]}, outside 0 .. {tokens.VOCABULARY - 1}", "prompt")
    return ids


def _chat_prompt(body: Body) -> Ints:
    if not body.messages:
        raise RequestError("messages must not be empty", "messages")
    text = " ".join(f"<{m.role}> {m.text()}" for m in body.messages)
    return np.array(tokens.encode(text), np.int64)


class Writer:
    """Writes the answer to one request: whole, or event by event."""

    def __init__(self, request_id: str, parsed: Parsed, model: str, created_s: int) -> None:
        self._parsed = parsed
        kind = "chat.completion" if parsed.chat else "text_completion"
        chunk_kind = "chat.completion.chunk" if parsed.chat else kind
        fields = f'"id":{json.dumps(request_id)},"created":{created_s},"model":{json.dumps(model)}'
        self._whole_head = f'{{{fields},"object":"{kind}",'
        self._event_head = f'data: {{{fields},"object":"{chunk_kind}","choices":[{{"index":0,'
        self._event_usage = f'data: {{{fields},"object":"{chunk_kind}","choices":[],'

    def event(self, delta: list[int], *, finished: bool, params: dict[str, Any] | None = None) -> bytes:
        """Return the server-sent event that carries `delta`. Token text needs no escaping."""
        text = tokens.decode(delta)
        content = f'"delta":{{"content":"{text}"}}' if self._parsed.chat else f'"text":"{text}"'
        ids = f',"token_ids":{delta}' if self._parsed.return_token_ids else ""
        reason = '"length"' if finished else "null"
        end = f'"finish_reason":{reason}}}]{_handed_over(params)}}}'
        return f'{self._event_head}{content},"logprobs":null{ids},{end}\n\n'.encode()

    def usage_event(self, output_tokens: int, cached_tokens: int, params: dict[str, Any] | None = None) -> bytes:
        """Return the event with the usage."""
        usage = self._usage(output_tokens, cached_tokens)
        return f"{self._event_usage}{usage}{_handed_over(params)}}}\n\n".encode()

    def whole(self, answer: list[int], cached_tokens: int, params: dict[str, Any] | None = None) -> bytes:
        """Return the body of an answer that is not streamed."""
        text = tokens.decode(answer)
        content = f'"message":{{"role":"assistant","content":"{text}"}}' if self._parsed.chat else f'"text":"{text}"'
        ids = f',"token_ids":{answer}' if self._parsed.return_token_ids else ""
        choice = f'{{"index":0,{content},"logprobs":null{ids},"finish_reason":"length"}}'
        usage = self._usage(len(answer), cached_tokens)
        return f'{self._whole_head}"choices":[{choice}],{usage}{_handed_over(params)}}}'.encode()

    def _usage(self, output_tokens: int, cached_tokens: int) -> str:
        prompt = len(self._parsed.prompt)
        return (
            f'"usage":{{"prompt_tokens":{prompt},"completion_tokens":{output_tokens},'
            f'"total_tokens":{prompt + output_tokens},"prompt_tokens_details":{{"cached_tokens":{cached_tokens}}}}}'
        )


def _handed_over(params: dict[str, Any] | None) -> str:
    """Return the field with the hand-off, to be put behind others; "" if there is none."""
    return "" if params is None else f',"kv_transfer_params":{msgspec.json.encode(params).decode()}'


DONE: Final = b"data: [DONE]\n\n"
