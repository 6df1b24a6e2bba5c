"""How a subject is named: by a Python function, by vLLM's own JSON, or as the reference implementation."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from harness.conformance.exits import Exit
from harness.conformance.subject import Capability, Params, Subject
from harness.errors import BadInput

REFERENCE: Final = "reference"
_PLACE: Final = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


class BadSubject(BadInput):
    """A subject cannot be had."""

    exit_code = Exit.CONFIGURATION


class SubjectName(msgspec.Struct, frozen=True, kw_only=True):
    """One of both is given; neither: the reference implementation."""

    connector: str = ""
    """`package.module:function`; the function takes nothing and returns a `Subject`."""
    kv_transfer_config: Params | None = None

    def configuration(self) -> dict[str, Any]:
        """Return what a header says of it."""
        if self.kv_transfer_config is not None:
            return {"kv_transfer_config": msgspec.json.encode(self.kv_transfer_config).decode()}
        return {"connector": self.connector or REFERENCE}

    @property
    def is_vllm(self) -> bool:
        """Whether vLLM is needed for it."""
        return self.kv_transfer_config is not None


def named(connector: str, kv_transfer_config: str) -> SubjectName:
    """Return the subject that the options name. Raises BadSubject with one clear line."""
    if kv_transfer_config:
        return SubjectName(kv_transfer_config=_parsed(kv_transfer_config))
    if connector in ("", REFERENCE):
        return SubjectName()
    if not _PLACE.match(connector):
        raise BadSubject(f"--connector {connector}: must be reference, or package.module:function")
    return SubjectName(connector=connector)


def _parsed(text: str) -> Params:
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise BadSubject(f"--kv-transfer-config: is no JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("kv_connector"), str) or not found["kv_connector"]:
        raise BadSubject('--kv-transfer-config: must be an object with "kv_connector", as vLLM takes it')
    return found


def made(name: SubjectName) -> Subject:
    """Return the subject: imports what it is made of. Raises BadSubject, or whatever its module raises."""
    if name.kv_transfer_config is not None:
        from harness.conformance.subjects.vllm.subject import VllmSubject

        return VllmSubject(name.kv_transfer_config)
    if not name.connector:
        from harness.conformance.subjects.reference import ReferenceSubject

        return ReferenceSubject()
    module_name, _, function = name.connector.partition(":")
    make = getattr(importlib.import_module(module_name), function, None)
    if not callable(make):
        raise BadSubject(f"--connector {name.connector}: {module_name} has no function {function}")
    subject: Subject = make()
    lacking = [part for part in ("name", "versions", "capabilities", "engine", "meaning") if not hasattr(subject, part)]
    if lacking:
        raise BadSubject(f"--connector {name.connector}: what it returns is no subject; it has no {', '.join(lacking)}")
    problem = _unfit(subject)
    if problem:
        raise BadSubject(f"--connector {name.connector}: {problem}")
    return subject


def _unfit(subject: Any) -> str:
    """Return what of a stranger's subject is not as it should be, "" if all is well."""
    if not isinstance(subject.name, str) or not subject.name:
        return "its name must be a text"
    versions = subject.versions
    if not isinstance(versions, dict) or not all(isinstance(part, str) for pair in versions.items() for part in pair):
        return "its versions must be texts by the names of packages"
    if isinstance(subject.capabilities, str) or not isinstance(subject.capabilities, Iterable):
        return "its capabilities must be a set"
    strange = [str(claim) for claim in subject.capabilities if claim not in list(Capability)]
    return f"it claims {', '.join(strange)}; there are {', '.join(Capability)}" if strange else ""
