"""The bodies of a request's two legs, prefill and decode: the client's own, with a few fields of it changed.

A field that is not changed stays the bytes that the client sent: a prompt of 32,000 ids is looked over once, by the
decoder, and never becomes a Python object.
"""

from __future__ import annotations

from typing import Final

import msgspec

PARAMS: Final = "kv_transfer_params"
Fields = dict[str, msgspec.Raw]

_FIELDS: Final = msgspec.json.Decoder(Fields)
_TRUE: Final = msgspec.Raw(b"true")
_FALSE: Final = msgspec.Raw(b"false")
_NULL: Final = msgspec.Raw(b"null")
_ONE: Final = msgspec.Raw(b"1")
_NOTHING_REMOTE: Final = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"), _NULL)
_COUNTS: Final = ("max_completion_tokens", "min_tokens")


class BadBody(Exception):
    """A body that cannot be split into legs. `param` is the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def fields_of(body: bytes) -> Fields:
    """Return the fields of a JSON object, undecoded. Raises BadBody."""
    try:
        return _FIELDS.decode(body)
    except msgspec.ValidationError as error:
        raise BadBody("the body must be a JSON object") from error
    except msgspec.DecodeError as error:
        raise BadBody(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise BadBody("the body is nested too deeply") from error


def params_of(fields: Fields) -> Fields:
    """Return the fields of `kv_transfer_params`, none if it is missing or null. Raises BadBody."""
    given = _given(fields, PARAMS)
    if given is None:
        return {}
    try:
        return _FIELDS.decode(given)
    except msgspec.DecodeError as error:
        raise BadBody(f"{PARAMS} must be an object", PARAMS) from error


def prefill_body(fields: Fields, loan: msgspec.Raw | None = None) -> bytes:
    """Return the body of the first leg: one token, not streamed, its KV kept for a remote decode. Raises BadBody.

    What the client sent as `kv_transfer_params` is the hand-off of its last turn (two-turn mode), and goes along; if it
    sent none, that of a `loan` does.
    """
    before = params_of(fields)
    if loan is not None and not before:
        before = params_of({PARAMS: loan})
    params = _NOTHING_REMOTE | before
    params["do_remote_decode"] = _TRUE
    params["do_remote_prefill"] = _given(before, "do_remote_prefill") or _FALSE
    leg = fields | {"max_tokens": _ONE, "stream": _FALSE, PARAMS: msgspec.Raw(msgspec.json.encode(params))}
    leg |= dict.fromkeys((name for name in _COUNTS if _given(fields, name) is not None), _ONE)
    leg.pop("stream_options", None)
    return msgspec.json.encode(leg)


def handoff_of(answer: bytes) -> msgspec.Raw | None:
    """Return the hand-off in the prefill side's answer, None if it gave none. Raises BadBody."""
    return _given(fields_of(answer), PARAMS)


def decode_body(fields: Fields, handoff: msgspec.Raw | None) -> bytes:
    """Return the body of the second leg: the client's, with the hand-off in place of its own `kv_transfer_params`."""
    leg = {name: value for name, value in fields.items() if name != PARAMS}
    if handoff is not None:
        leg[PARAMS] = handoff
    return msgspec.json.encode(leg)


def holder_of(body: bytes) -> str:
    """Return the engine that holds what a renewal's `kv_transfer_params` name. Raises BadBody."""
    given = _given(params_of(fields_of(body)), "remote_engine_id")
    try:
        return msgspec.json.decode(given or b"null", type=str)
    except msgspec.DecodeError as error:
        raise BadBody(f"{PARAMS}.remote_engine_id must be a text", PARAMS) from error


def _given(fields: Fields, name: str) -> msgspec.Raw | None:
    """Return a field, None if it is missing or null."""
    value = fields.get(name)
    return None if value is None or bytes(value) == b"null" else value
