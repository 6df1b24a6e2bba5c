"""How a run with a control plane was set up, as its manifest and its rows tell."""

from __future__ import annotations

from typing import Final

import msgspec

from harness.errors import BadRunFolder
from harness.run_folder import RunFolder
from reference_impl.rules.events import Event
from reports import words

SERVICE: Final = "block-service"
"""The role of a block service's process."""
_SUFFIX: Final = "-blocks"
"""What stands behind the node's name in the name of its service."""


class _Kv(msgspec.Struct, frozen=True):
    prefill: int = 1
    decode: int = 1


class _Control(msgspec.Struct, frozen=True):
    clients: int = 0
    rate_per_s: float = 0.0
    tenants: int = 0


class _Scenario(msgspec.Struct, frozen=True):
    kv: _Kv | None = None
    control: _Control | None = None


class _Configuration(msgspec.Struct, frozen=True):
    scenario: _Scenario = _Scenario()
    client_policy: ClientPolicy | None = None


class ClientPolicy(msgspec.Struct, frozen=True):
    """How the run's clients retry, as far as the manifest tells."""

    attempts_max: int | None = None
    initial_s: float | None = None
    multiplier: float | None = None
    max_s: float | None = None
    jitter: float | None = None
    attempt_timeout_s: float | None = None
    call_timeout_s: float | None = None


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What the page needs of the manifest; `nodes` are those with a block service, in their order."""

    nodes: list[str]
    about: str
    policy: ClientPolicy | None


def has_control(run: RunFolder) -> bool:
    """Whether this is a run for this page."""
    scenario = run.manifest.configuration.get("scenario")
    return isinstance(scenario, dict) and scenario.get("control") is not None


def setup(run: RunFolder) -> Setup:
    """Return the set-up of `run`. Raises `BadRunFolder` where the manifest holds none that can be used."""
    try:
        found = msgspec.convert(run.manifest.configuration, _Configuration)
    except msgspec.ValidationError as error:
        raise BadRunFolder(run.path, f"manifest.json: configuration: {error}") from error
    kv, control = found.scenario.kv, found.scenario.control
    planned = [*(f"p{n}" for n in range(kv.prefill)), *(f"d{n}" for n in range(kv.decode))] if kv else []
    seen = {i.node for i in run.control.invocations} | {row.node for row in run.control.groups}
    return Setup(nodes=[*planned, *sorted(seen - set(planned))], about=_about(kv, control), policy=found.client_policy)


def _about(kv: _Kv | None, control: _Control | None) -> str:
    parts = [f"{kv.prefill} prefill, {kv.decode} decode"] if kv else []
    if control is not None and control.clients:
        tenants = f" of {words.plural(control.tenants, 'tenant')}" if control.tenants else ""
        parts.append(f"{words.plural(control.clients, 'client')}{tenants}, {control.rate_per_s:g} operations/s asked")
    return " · ".join(parts)


def node_of(event: Event) -> str:
    """Return the node that an event of a block service, or of its process, is about; "" if it names none."""
    named = event.detail.get("node") or event.detail.get("worker_id")
    if named:
        return str(named)
    return event.actor.removesuffix(_SUFFIX) if event.actor.endswith(_SUFFIX) else ""


def is_service(name: str) -> bool:
    """Whether a process's name is that of a block service."""
    return name.endswith(_SUFFIX)
