"""Errors as OpenAI's API words them, for the engine and the router alike."""

from __future__ import annotations

import msgspec


def error_body(message: str, kind: str, param: str | None = None, code: int | str | None = None) -> bytes:
    """Return an error as OpenAI's API words it."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
