"""Which interpreter runs a subject, and what it is to find in its environment."""

from __future__ import annotations

import sys
from typing import Final

from harness.conformance.naming import BadSubject, SubjectName
from harness.errors import BadInput

_VLLM: Final = {
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONHASHSEED": "0",
}  # fmt: skip
"""It is to tell nobody what it does, and to hash the same way every time."""


def interpreter_of(subject: SubjectName) -> tuple[str, dict[str, str]]:
    """Return the interpreter that has what a subject needs, and its environment. Raises BadSubject."""
    if not subject.is_vllm:
        return sys.executable, {}
    from harness.targets.vllm.config import installed

    try:
        return installed().python, dict(_VLLM)
    except BadInput as error:
        raise BadSubject(f"--kv-transfer-config needs vLLM: {error}") from error
