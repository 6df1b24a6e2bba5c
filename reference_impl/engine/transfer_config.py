"""`--kv-transfer-config`: vLLM's JSON, read into our terms. What is not understood is refused by its name."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from reference_impl.rules.routing import Role
from reference_impl.rules.terms import KvTerms

EXTRA: Final = "kv_connector_extra_config"
CONNECTOR: Final = "NixlConnector"
_ROLES: Final = {"kv_both": tuple(Role), "kv_producer": (Role.PREFILL,), "kv_consumer": (Role.DECODE,)}
_DEVICE: Final = "cpu"


class BadTransferConfig(ValueError):
    """A configuration that cannot be kept; the message names the field."""


def terms_of(text: str, role: Role) -> KvTerms:
    """Return the terms that `text` gives an engine of this role. Raises BadTransferConfig with one line.

    The fields of `KvTerms` may stand at the top or, as vLLM has most of them, in `kv_connector_extra_config`.
    `kv_connector`, `kv_role` and `kv_buffer_device` are checked, and have no other effect.
    """
    fields = _object(text)
    _check_vllms(fields, role)
    extra = fields.pop(EXTRA, None)
    if extra is not None and not isinstance(extra, dict):
        raise BadTransferConfig(f"{EXTRA} must be an object, got {extra!r}")
    if twice := sorted(fields.keys() & (extra or {}).keys()):
        raise BadTransferConfig(f"{twice[0]} stands twice: at the top and in {EXTRA}")
    given = fields | (extra or {})
    known = [f.name for f in msgspec.structs.fields(KvTerms)]
    if unknown := [name for name in given if name not in known]:
        raise BadTransferConfig(f"{unknown[0]} is not known; there are {', '.join(known)}")
    try:
        return msgspec.convert(given, KvTerms)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        raise BadTransferConfig(f"{place.rstrip('`')}: {reason}" if place else reason) from error


def _object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadTransferConfig(f"it must be a JSON object: {error}") from error


def _check_vllms(fields: dict[str, Any], role: Role) -> None:
    """Take out the fields that say what is so here anyway. Raises BadTransferConfig for what is not."""
    connector = fields.pop("kv_connector", CONNECTOR)
    if connector != CONNECTOR:
        raise BadTransferConfig(f"kv_connector must be {CONNECTOR}, got {connector!r}")
    device = fields.pop("kv_buffer_device", _DEVICE)
    if device != _DEVICE:
        raise BadTransferConfig(f"kv_buffer_device must be {_DEVICE}: KV stands in host memory here; got {device!r}")
    kv_role = fields.pop("kv_role", "kv_both")
    roles = _ROLES.get(kv_role) if isinstance(kv_role, str) else None
    if roles is None:
        raise BadTransferConfig(f"kv_role must be one of {', '.join(_ROLES)}, got {kv_role!r}")
    if role not in roles:
        raise BadTransferConfig(f"kv_role {kv_role} does not go with --role {role}")
