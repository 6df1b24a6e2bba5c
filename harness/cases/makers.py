"""The targets of black-box cases: the reference implementation, real vLLM, and servers that somebody else runs.

The only place that knows how a target's servers are started.
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from harness.cases.bench import Deployment, Described, Maker, Misfit, Pair
from harness.cases.terms import Need, PairTerms, Pool, Size, pool_tokens
from harness.content import Oracle
from harness.errors import BadInput
from harness.golden import SOURCE, GoldenRun
from reference_impl.announcement import Announcement
from reference_impl.failover.worker import ProcessInfo
from workloads.rows import RequestRecord

if TYPE_CHECKING:
    from harness.targets.remote import RemotePair


class LocalMaker:
    """What targets have in common whose servers this machine runs, on the terms that a case asks for."""

    def adapted(self, terms: PairTerms) -> PairTerms:
        """Any terms can be had."""
        return terms

    def pair(self, deployment: Deployment, said: Announcement, folder: Path, faults: Path, blocker_tokens: int) -> Pair:
        """Return the deployment's servers."""
        return Pair(deployment, said, self.oracle(said), folder, faults, blocker_tokens)

    def oracle(self, announcement: Announcement) -> Oracle | None:
        """Each has its own."""
        raise NotImplementedError


class ReferenceMaker(LocalMaker):
    """The reference implementation's deployment, without shadows, under a compute profile."""

    name = "reference"

    def __init__(self, profile: str = "pd") -> None:
        from reference_impl.engine.profile import load_profile

        self._profile = load_profile(profile)

    def offers(self) -> set[Need]:
        """It can do everything, where the kernel gives clocks."""
        return set(Need) - _clockless() - _faultless()

    def deployment(self, terms: PairTerms, size: Size, folder: Path, faults: Path) -> Deployment:  # noqa: ARG002
        """Its pool is as large as the terms say; everything else is as the profile says."""
        from harness.targets.deployment import DeploymentTarget

        profile = folder / "profile.toml"
        blocks = pool_tokens(terms.pool, size) // 16
        profile.write_text(_toml(msgspec.structs.replace(self._profile, kv_blocks=blocks)))
        options = {
            "prefill": 1, "decode": 1, "profile": profile, "folder": folder, "probe-silent-s": 86_400,
            "kv-lease-duration": terms.lease_s, "kv-load-failure-policy": terms.load_failure_policy,
            "decoder-kv-blocks-ttl": terms.ttl_s, "decode-slots": terms.decode_slots, "design": terms.design,
            "single-timeout": terms.single_timeout_s, "decode-clock-offset-s": terms.decode_clock_offset_s,
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in options.items()]
        words += ["--no-shadow", "--announce", "--end-with-stdin"]
        words += ["--bidirectional"] if terms.bidirectional else []
        words += [] if terms.clock_correction else ["--no-clock-correction"]
        return DeploymentTarget(lambda run_dir: ["reference_impl.deployment", *words, f"--run-dir={run_dir}"])

    def oracle(self, announcement: Announcement) -> Oracle | None:
        """Return the content oracle of its weights."""
        from harness.content import ReferenceOracle

        return None if announcement.weights is None else ReferenceOracle(announcement.weights)

    def describe(self) -> Described:
        """Say what is emulated."""
        return Described(
            configuration={"profile": msgspec.to_builtins(self._profile)}, emulated=self._profile.emulated(),
            profile=self._profile.name,
        )  # fmt: skip

    def environment(self, faults: Path) -> dict[str, str]:
        """Wrap its NIXL agents."""
        return {"PDPROOF_FAULTS_DIR": str(faults), "PDPROOF_NIXL_WRAPPER": "faults.nixl.agent:wrapped_reference"}


class VllmMaker(LocalMaker):
    """Real vLLM, as the interpreter that PDPROOF_VLLM_PYTHON names has it. Raises BadInput where there is none."""

    def __init__(self, config: str = "nixl") -> None:
        from harness.targets.vllm.config import installed, load_config

        self._config = load_config(config)
        self._installed = installed()
        self.name = self._config.name

    def offers(self) -> set[Need]:
        """Everything but designs that vLLM has left behind."""
        return set(Need) - {Need.DESIGNS} - _clockless() - _faultless()

    def deployment(self, terms: PairTerms, size: Size, folder: Path, faults: Path) -> Deployment:
        """Two servers with the connector's JSON as the terms say."""
        from harness.targets.vllm.shape import Shape, Terms, vllm_target

        tokens = pool_tokens(terms.pool, size)
        longest = [] if terms.pool is Pool.ROOMY else ["--max-model-len", str(min(36_864, tokens - 1_024))]
        shape = Shape(
            prefill=1, decode=1, decode_slots=terms.decode_slots, decode_clock_offset_s=terms.decode_clock_offset_s,
            pool_blocks=tokens // 128, arguments=longest,
            environment={"PDPROOF_FAULTS_DIR": str(faults), "PDPROOF_FAULTS_NAME": "{worker}-vllm"},
            terms=Terms(
                lease_s=round(terms.lease_s), bidirectional=terms.bidirectional, ttl_s=round(terms.ttl_s),
                load_failure_policy=terms.load_failure_policy,
            ),
        )  # fmt: skip
        return vllm_target(self._config, self._installed, shape, folder)

    def oracle(self, announcement: Announcement) -> Oracle | None:  # noqa: ARG002 # the canary's is the same everywhere
        """Return the canary's oracle; nobody knows another model's answers."""
        from workloads.canary.oracle import CanaryOracle
        from workloads.canary.spec import CANARY

        return None if self._config.model else CanaryOracle(CANARY)

    def describe(self) -> Described:
        """Say what is not as in production."""
        from harness.targets.vllm.system import VllmSystem

        system = VllmSystem(self._config)
        return Described(
            configuration={"vllm": msgspec.to_builtins(self._config)}, emulated=system.unlike_production(),
            versions=self._installed.versions, profile=self.name,
        )  # fmt: skip

    def environment(self, faults: Path) -> dict[str, str]:  # noqa: ARG002
        """Each server is told its own, by `deployment`."""
        return {}


class RemotePart(Pair):
    """Servers that somebody else runs: no process, no log, no new life of theirs can be told from the old one."""

    def __init__(self, remote: RemotePair, deployment: Deployment, said: Announcement, folder: Path, faults: Path,
                 blocker_tokens: int) -> None:  # fmt: skip
        super().__init__(deployment, said, None, folder, faults, blocker_tokens)
        self._remote = remote

    def url_of(self, worker: str) -> str:
        """Return a server's address."""
        return self._remote.url_of(worker)

    def metrics_url(self, worker: str) -> str:
        """Return where a server's metrics are."""
        return self._remote.metrics_url(worker)

    def headers(self) -> dict[str, str]:
        """Return the key, if there is one."""
        return self._remote.headers()

    def engine_of(self, worker: str) -> str:  # noqa: ARG002
        """Nobody can tell."""
        return ""

    async def serves(self, worker: str, *, after: str = "") -> bool:  # noqa: ARG002
        """Whether a server answers, and names the model."""
        async with aiohttp.ClientSession() as session:
            return await self._remote.serves(session, worker)

    async def until_registered(self) -> None:
        """Wait until both serve. Raises BadInput."""
        await self._remote.until_serves()

    def parts_of(self, worker: str, roles: tuple[str, ...]) -> list[str]:  # noqa: ARG002
        """Return none."""
        return []

    async def judged(self, records: Sequence[RequestRecord], folder: Path) -> list[bool | None]:
        """Hold the answers against what both servers answer when nothing disturbs them."""
        config = self._remote.config
        urls = {worker: self.url_of(worker) for worker in (self.prefill, self.decode)}
        run = GoldenRun(config.model, urls, self.headers(), config.content.logprob_tolerance)
        return await run.judge(records, folder)


class _Others:
    """A deployment that is somebody else's: there is nothing to start and nothing to end."""

    token = ""

    def __init__(self, remote: RemotePair) -> None:
        self._remote = remote

    async def start(self, progress: Callable[[str], None]) -> Announcement:
        """Wait until both servers serve. Raises BadInput."""
        progress("waiting for servers that somebody else runs")
        await self._remote.until_serves()
        roles = self._remote.roles
        return Announcement(
            url=self._remote.config.router_url, model=self._remote.config.model, run_dir="", workers=list(roles),
            roles=roles,
        )  # fmt: skip

    async def stop(self) -> None:
        """Leave them alone."""

    def processes(self) -> list[tuple[str, ProcessInfo]]:
        """Return none."""
        return []


class RemoteMaker:
    """Servers that somebody else runs, known by a file (`harness.targets.remote`). Raises BadInput."""

    def __init__(self, path: Path) -> None:
        from harness.targets.remote import RemotePair, load_remote

        self._remote = RemotePair(load_remote(path))
        self.name = self._remote.config.name

    def offers(self) -> set[Need]:
        """Return what cases may ask of it."""
        return self._remote.offers()

    def adapted(self, terms: PairTerms) -> PairTerms:
        """Put its own terms in the place of those that a case leaves open. Raises Misfit."""
        known = self._remote.config.terms
        own = {name: getattr(known, name) for name in ("lease_s", "load_failure_policy", "ttl_s")}
        ours = msgspec.structs.replace(terms, **{name: value for name, value in own.items() if value is not None})
        if (reason := self._remote.misfit(ours)) is not None:
            raise Misfit(reason)
        return ours

    def deployment(self, terms: PairTerms, size: Size, folder: Path, faults: Path) -> Deployment:  # noqa: ARG002
        """Nothing is started."""
        return _Others(self._remote)

    def pair(self, deployment: Deployment, said: Announcement, folder: Path, faults: Path, blocker_tokens: int) -> Pair:
        """Return its servers."""
        return RemotePart(self._remote, deployment, said, folder, faults, blocker_tokens)

    def oracle(self, announcement: Announcement) -> Oracle | None:  # noqa: ARG002
        """Nobody here knows its model's answers; a golden run finds them (`RemotePart.judged`)."""
        return None

    def describe(self) -> Described:
        """Say where it is; the key is written nowhere."""
        return Described(
            configuration={"remote": msgspec.to_builtins(self._remote.config), "right_answers": SOURCE}, emulated=[],
            profile=self.name,
        )  # fmt: skip

    def environment(self, faults: Path) -> dict[str, str]:  # noqa: ARG002
        """There is nothing to be told to anybody."""
        return {}


def _is_remote(path: Path) -> bool:
    """Whether a file tells where servers are, and not how to start some."""
    try:
        return "prefill_url" in tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return False  # whoever loads it says what is wrong


def maker_of(target: str) -> Maker:
    """Return the target of this name, or the vLLM or remote servers of a TOML file. Raises BadInput."""
    if target == ReferenceMaker.name:
        return ReferenceMaker()
    if target == "vllm":
        return VllmMaker()
    if target.endswith(".toml"):
        return RemoteMaker(Path(target)) if _is_remote(Path(target)) else VllmMaker(target)
    raise BadInput(f"target {target!r}: unknown; there are reference and vllm, or give a .toml file")


def _clockless() -> set[Need]:
    from reference_impl.time_namespace import available

    return set() if available() is None else {Need.CLOCK}


def _faultless() -> set[Need]:
    return set() if importlib.util.find_spec("faults.nixl.agent") else {Need.NOTIFICATIONS}


def _toml(profile: msgspec.Struct) -> str:
    """Return a profile as TOML: its fields are texts, numbers and truths, and a list that is empty here."""
    lines = []
    for name, value in msgspec.to_builtins(profile).items():
        if isinstance(value, list):
            continue
        lines.append(f"{name} = {msgspec.json.encode(value).decode()}")
    return "\n".join(lines) + "\n"
