"""What an engine and the router say to each other over the registration connection (JSON over a WebSocket).

The connection is the registration: when it closes, and the kernel closes it when the engine dies, the worker is gone.
"""

from __future__ import annotations

from typing import Final

import msgspec

from reference_impl.rules.routing import Role

REGISTER_PATH: Final = "/internal/register"
HOLD_PATH: Final = "/internal/hold"
RENEW_PATH: Final = "/v1/kv/renew"
TOKEN_HEADER: Final = "x-pdproof-token"
MESSAGE_BYTES_MAX: Final = 64 * 1024


class Register(msgspec.Struct, frozen=True):
    """Engine to router: choose me from now on. Sent only by an engine that holds the lock and is awake."""

    worker_id: str
    engine_id: str
    url: str
    epoch: int
    role: Role = Role.BOTH
    kv_engine_id: str = ""
    """Its name among its peers, where that is another: `remote_engine_id` of its hand-offs."""


class Answer(msgspec.Struct, frozen=True):
    """Router to engine. A refusal says why, and which epoch the router has seen."""

    accepted: bool
    epoch: int
    reason: str = ""
