"""Who may call: a tenant proves its name with a credential that only the deployment's secret can make.

A credential is HMAC-SHA256(secret, "tenant:" + name) in hexadecimal, so a node checks one without asking anybody. The
deployment itself is `DEPLOYMENT`, a name that no tenant can have: with it nodes talk to each other, and fail points are
armed. It is no tenant and reads no tenant's groups. Source: RPC document (keys of a service with many tenants carry
their scope); KVC-IDEM-008; issue 4, bad input.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

DEPLOYMENT: Final = ""
SECRET_BYTES_MIN: Final = 16

TENANT_KEY: Final = "x-pdproof-tenant"
CREDENTIAL_KEY: Final = "authorization"
REQUEST_ID_KEY: Final = "x-pdproof-request-id"
ATTEMPT_KEY: Final = "x-pdproof-attempt"
_SCHEME: Final = "Bearer "


def credential(secret: bytes, tenant: str) -> str:
    """Return the credential of a tenant (64 hexadecimal digits). Raises ValueError if the secret is too short."""
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(f"a deployment's secret has at least {SECRET_BYTES_MIN} bytes, this one {len(secret)}")
    return hmac.new(secret, b"tenant:" + tenant.encode(), hashlib.sha256).hexdigest()


def valid(secret: bytes, tenant: str, given: str) -> bool:
    """Return whether `given` is the tenant's credential. Takes as long for a wrong one as for a right one."""
    return hmac.compare_digest(credential(secret, tenant).encode(), given.encode(errors="replace"))


def metadata(
    tenant: str, tenant_credential: str, *, request_id: str = "", attempt: int = 1
) -> tuple[tuple[str, str], ...]:
    """Return what every call carries in its metadata: who calls, for which request, and at which attempt (from 1)."""
    pairs = [(TENANT_KEY, tenant), (CREDENTIAL_KEY, _SCHEME + tenant_credential), (ATTEMPT_KEY, str(attempt))]
    return (*pairs, (REQUEST_ID_KEY, request_id)) if request_id else tuple(pairs)


def bearer(value: str) -> str:
    """Return the credential in an `authorization` value, "" if it holds none."""
    return value.removeprefix(_SCHEME) if value.startswith(_SCHEME) else ""
