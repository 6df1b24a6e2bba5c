"""How a prefill/decode run was set up, as its manifest tells."""

from __future__ import annotations

import msgspec

from harness.errors import BadRunFolder
from harness.holding import terms_of
from harness.run_folder import RunFolder
from reference_impl.rules.terms import KvTerms

PREFILL = "prefill"
DECODE = "decode"
LEASE_ARM = "lease"
"""The arm that must pass; every other is there to be compared with."""


class _Kv(msgspec.Struct, frozen=True):
    """The part of a scenario's `kv` that a page names; all at full scale."""

    prefill: int = 1
    decode: int = 1
    prefill_ranks: int = 1
    decode_ranks: int = 1
    decode_slots: int = 0
    decode_clock_offset_s: float = 0.0


class _Scenario(msgspec.Struct, frozen=True):
    kv: _Kv = _Kv()


class _Profile(msgspec.Struct, frozen=True):
    kv_blocks: int | None = None


class _Configuration(msgspec.Struct, frozen=True):
    roles: dict[str, str]
    scenario: _Scenario = _Scenario()
    profile: _Profile = _Profile()
    clock_offsets_s: dict[str, float] | None = None


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a page needs of a manifest."""

    terms: KvTerms
    """As they were in the run: divided by its time scale."""
    roles: dict[str, str]
    """Worker id -> prefill or decode."""
    deployment: str
    pool_blocks: int | None
    """KV blocks of all prefill engines together; None where the manifest does not tell."""
    clock_offsets_s: dict[str, float]
    """Worker id -> how far its clock was set ahead of the host's; workers that are not named: not at all."""

    def workers(self, role: str) -> set[str]:
        """Return the workers of a role."""
        return {worker for worker, its in self.roles.items() if its == role}

    def offset_s(self, worker_id: str) -> float:
        """Return how far a worker's clock was set ahead."""
        return self.clock_offsets_s.get(worker_id, 0.0)


def moves_kv(run: RunFolder) -> bool:
    """Whether this is a run for this page."""
    return "terms" in run.manifest.configuration


def must_pass(run: RunFolder) -> bool:
    """Whether this is the design that has to hold what it promises, and no baseline or twin."""
    return run.manifest.arm == LEASE_ARM


def setup(run: RunFolder) -> Setup:
    """Return the setup of `run`. Raises `BadRunFolder` where the manifest holds none that can be used."""
    terms = terms_of(run)
    if terms is None:
        raise BadRunFolder(run.path, "manifest.json: configuration.terms is missing: no KV moved in this run")
    try:
        found = msgspec.convert(run.manifest.configuration, _Configuration)
    except msgspec.ValidationError as error:
        raise BadRunFolder(run.path, f"manifest.json: configuration: {error}") from error
    kv, blocks = found.scenario.kv, found.profile.kv_blocks
    offsets = found.clock_offsets_s
    if offsets is None:
        offsets = {w: kv.decode_clock_offset_s for w, role in found.roles.items() if role == DECODE}
    prefills = sum(role == PREFILL for role in found.roles.values())
    return Setup(
        terms=terms, roles=found.roles, deployment=_deployment(kv), clock_offsets_s=offsets,
        pool_blocks=None if blocks is None else blocks * prefills,
    )  # fmt: skip


def _deployment(kv: _Kv) -> str:
    def part(count: int, name: str, ranks: int) -> str:
        return f"{count} {name}" + (f" of {ranks} ranks" if ranks > 1 else "")

    slots = f", {kv.decode_slots} requests at once each" if kv.decode_slots else ""
    return f"{part(kv.prefill, 'prefill', kv.prefill_ranks)}, {part(kv.decode, 'decode', kv.decode_ranks)}{slots}"
