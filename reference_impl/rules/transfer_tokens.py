"""Transfer tokens: a reader's permission to read one block group, once, until a moment (KVC-IDEM-016).

A token names its group, epoch and expiry under a seal that only the node can make. It is the id of the lease that the
node's engine grants with it, so a reader shows it in its claim, and it is used up when that lease has ended. What the
seal adds is the reason: whoever shows a token that stands for no lease is told why.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

PREFIX: Final = "xfer"
NONCE_CHARS: Final = 16
"""Hexadecimal digits of a nonce."""
_GROUP_CHARS: Final = 16
_SEAL_CHARS: Final = 32
_EXPIRY_CHARS_MAX: Final = 13
_PARTS: Final = 5


def node_key(secret: bytes, node: str) -> bytes:
    """Return the key with which a node seals: 32 bytes, of the deployment's secret and the node's name."""
    return hmac.digest(secret, f"node:{node}".encode(), hashlib.sha256)


def is_token(text: str) -> bool:
    """Return whether a lease's id is, or pretends to be, a transfer token."""
    return text.startswith(f"{PREFIX}-")


def issue(key: bytes, *, block_group_id: str, epoch: int, expires_ms: int, nonce: str) -> str:
    """Return a token of at most 90 characters. `nonce`: NONCE_CHARS hexadecimal digits, never the same twice."""
    open_part = f"{PREFIX}-{expires_ms:x}-{_named(block_group_id, epoch)}-{nonce}"
    return f"{open_part}-{_seal(key, open_part)}"


def why_not(key: bytes, token: str, now_ms: int, *, block_group_id: str = "", epoch: int = 0) -> str:
    """Return why a token gives no permission, "" if it does (or did: that it is used up, only its lease can tell).

    With `block_group_id` and `epoch` it must have been made for these.
    """
    parts = token.split("-")
    if len(parts) != _PARTS or len(token) > _EXPIRY_CHARS_MAX + _GROUP_CHARS + NONCE_CHARS + _SEAL_CHARS + 9:
        return "this is no transfer token"
    open_part, _, seal = token.rpartition("-")
    if not hmac.compare_digest(_bytes(seal), _bytes(_seal(key, open_part))):
        return "the transfer token is forged, or another node's"
    if block_group_id and parts[2] != _named(block_group_id, epoch):
        return "the transfer token was made for another block group or epoch"
    if int(parts[1], 16) <= now_ms:
        return "the transfer token has expired"
    return ""


def _named(block_group_id: str, epoch: int) -> str:
    name = f"{epoch} {block_group_id}".encode()
    return hashlib.blake2b(name, digest_size=_GROUP_CHARS // 2).hexdigest()


def _seal(key: bytes, open_part: str) -> str:
    return hmac.digest(key, _bytes(open_part), hashlib.sha256).hex()[:_SEAL_CHARS]


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # half characters come in by JSON's escapes
