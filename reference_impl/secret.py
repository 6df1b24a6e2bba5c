"""Where the secret of a deployment stands: in the environment of its processes, and nowhere else."""

from __future__ import annotations

from typing import Final

TOKEN_VARIABLE: Final = "PDPROOF_ROUTER_TOKEN"
