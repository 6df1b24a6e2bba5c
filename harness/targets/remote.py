"""The target `remote`: a prefill and a decode server that somebody else runs, known by their addresses alone.

Its configuration is a TOML file:

    name = "staging"
    prefill_url = "http://p.example:8000"
    decode_url = "http://d.example:8000"
    model = "meta-llama/Llama-3.1-8B"
    prefill_metrics_url = "http://p.example:8000/metrics"   # these two, router and key: only where there are any
    decode_metrics_url = "http://d.example:8000/metrics"
    router_url = "http://router.example:8080"
    api_key_variable = "STAGING_KEY"   # the environment variable that holds it

    [terms]   # as far as they are known
    lease_s = 30
    load_failure_policy = "recompute"

    [content]   # answers are judged by a golden run: what both servers answer to the same prompts when nothing disturbs
    logprob_tolerance = 0.05   # how far the logarithms of equal probabilities may lie apart
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec

from faults.fault import ProcessRef
from harness.cases.terms import Need, PairTerms
from harness.errors import BadInput
from harness.golden import TOLERANCE
from reference_impl import named_toml
from reference_impl.rules.events import Event
from reference_impl.rules.routing import Role

PREFILL: Final = "p0"
DECODE: Final = "d0"
ASK_LIMIT_S: Final = 5.0
SERVES_LIMIT_S: Final = 60.0
LOOK_S: Final = 0.25
_LACKS: Final = {
    Need.PROCESSES: "its processes run where the harness may not touch them",
    Need.NOTIFICATIONS: "the harness cannot put its plugin into servers that somebody else starts",
    Need.CLOCK: "whoever starts its servers gives them their clock",
    Need.RESTART: "nobody here could start its servers again",
    Need.LOGS: "its logs cannot be read over HTTP",
    Need.TERMS: "whoever runs it chose its terms",
    Need.DESIGNS: "only the reference implementation has the older designs",
}
"""What no remote target can do, and why."""
_NO_METRICS: Final = "its configuration names no metrics_url for both servers"
_PACKAGE: Final = "harness.targets"
"""There are no such files with the package: every remote target is somebody's own."""
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class KnownTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """On which terms its servers exchange KV, as far as is known; None: not known."""

    lease_s: _Seconds | None = None
    load_failure_policy: Literal["recompute", "fail"] | None = None
    bidirectional: bool | None = None
    ttl_s: _Seconds | None = None


class ContentRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How its answers are compared with those of a golden run (`harness.golden`)."""

    logprob_tolerance: Annotated[float, msgspec.Meta(gt=0, le=10)] = TOLERANCE


class RemoteConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the servers are. An address is that of the server's root, before `/v1`."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,80}$")]
    prefill_url: str
    decode_url: str
    model: Annotated[str, msgspec.Meta(min_length=1)]
    router_url: str = ""
    prefill_metrics_url: str = ""
    decode_metrics_url: str = ""
    api_key_variable: Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")] = ""
    """The environment variable that holds the key; the key itself is written nowhere."""
    terms: KnownTerms = KnownTerms()
    content: ContentRules = ContentRules()

    def __post_init__(self) -> None:
        """Refuse addresses that cannot be asked."""
        for field in ("prefill_url", "decode_url", "router_url", "prefill_metrics_url", "decode_metrics_url"):
            url = getattr(self, field)
            if url or field in ("prefill_url", "decode_url"):
                _check_url(field, url)


def _check_url(field: str, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{field}: must be http://HOST or https://HOST, got {url!r}")
    if parts.username or parts.password:
        raise ValueError(f"{field}: holds a password, which would be written into every run folder; use a key")
    if parts.query or parts.fragment:
        raise ValueError(f"{field}: must end with its path, got {url!r}")
    if not field.endswith("metrics_url") and parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"{field}: is the server's root, without /v1, got {url!r}")
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


def load_remote(path: Path) -> RemoteConfig:
    """Return the configuration in this file. Raises BadInput with one clear line."""
    if path.suffix != ".toml":
        raise BadInput(f"remote target {path}: must be a .toml file")
    try:
        return named_toml.load("remote target", str(path), _PACKAGE, RemoteConfig)
    except named_toml.BadToml as error:
        raise BadInput(str(error)) from error


class RemotePair:
    """What a black-box case may ask of the servers: addresses, metrics, and whether they serve. No process, no log."""

    prefill = PREFILL
    decode = DECODE

    def __init__(self, config: RemoteConfig) -> None:
        self.config = config
        self._urls = {PREFILL: config.prefill_url.rstrip("/"), DECODE: config.decode_url.rstrip("/")}
        self._metrics = {PREFILL: config.prefill_metrics_url, DECODE: config.decode_metrics_url}

    @property
    def roles(self) -> dict[str, Role]:
        """The servers, and which part of a request each does."""
        return {PREFILL: Role.PREFILL, DECODE: Role.DECODE}

    def url_of(self, worker: str) -> str:
        """Return a server's address. Raises KeyError for another worker than `p0` and `d0`."""
        return self._urls[worker]

    def metrics_url(self, worker: str) -> str:
        """Return where a server's metrics are, "" if nobody said."""
        return self._metrics[worker]

    def headers(self) -> dict[str, str]:
        """Return what each request must carry besides. Raises BadInput if the key is not in the environment."""
        variable = self.config.api_key_variable
        if not variable:
            return {}
        key = os.environ.get(variable, "")
        if not key or not key.isprintable():
            raise BadInput(f"remote target {self.config.name}: the environment variable {variable} holds no key")
        return {"Authorization": f"Bearer {key}"}

    def offers(self) -> set[Need]:
        """Return what cases may ask of it."""
        return set(Need) - set(self.lacks())

    def lacks(self) -> dict[Need, str]:
        """Return what it cannot do, with a sentence that says why."""
        return _LACKS if all(self._metrics.values()) else _LACKS | {Need.METRICS: _NO_METRICS}

    def misfit(self, terms: PairTerms) -> str | None:
        """Return why a case that wants these terms cannot be run here; None: its own are known, and are these.

        How many requests the decode server runs at once, and how large the pools are, nobody need know: a case that
        builds on them finds out.
        """
        known = self.config.terms
        pairs = {
            "lease_s": (known.lease_s, float(terms.lease_s)),
            "load_failure_policy": (known.load_failure_policy, terms.load_failure_policy),
            "bidirectional": (known.bidirectional, terms.bidirectional),
        }
        if terms.bidirectional:
            pairs["ttl_s"] = (known.ttl_s, float(terms.ttl_s))
        for name, (has, wants) in pairs.items():
            if has is None:
                return f"its {name} is not known, and the case needs {wants}"
            if has != wants:
                return f"its {name} is {has}, and the case needs {wants}"
        return None

    async def metrics_text(self, session: aiohttp.ClientSession, worker: str) -> str | None:
        """Return what a server's metrics say now; None: there are none, or they cannot be had."""
        url = self.metrics_url(worker)
        return await self._text(session, url) if url else None

    async def serves(self, session: aiohttp.ClientSession, worker: str) -> bool:
        """Whether a server answers now, and names the model."""
        text = await self._text(session, f"{self.url_of(worker)}/v1/models")
        if text is None:
            return False
        try:
            models = msgspec.json.decode(text, type=_Models).data
        except msgspec.DecodeError:
            return False
        return any(model.id == self.config.model for model in models)

    async def until_serves(self, limit_s: float = SERVES_LIMIT_S) -> None:
        """Wait until both servers serve. Raises BadInput that names the one that does not."""
        async with aiohttp.ClientSession() as session:
            for worker, url in self._urls.items():
                try:
                    async with asyncio.timeout(limit_s):
                        while not await self.serves(session, worker):
                            await asyncio.sleep(LOOK_S)
                except TimeoutError as error:
                    raise BadInput(
                        f"remote target {self.config.name}: {url}/v1/models did not name the model "
                        f"{self.config.model} within {limit_s:g} s"
                    ) from error

    async def _text(self, session: aiohttp.ClientSession, url: str) -> str | None:
        timeout = aiohttp.ClientTimeout(total=ASK_LIMIT_S)
        try:
            async with session.get(url, headers=self.headers(), timeout=timeout) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError):
            return None

    def parts_of(self, worker: str, roles: tuple[str, ...]) -> list[str]:  # noqa: ARG002 # a pair's interface
        """It has no processes that anybody here could name."""
        return []

    def process_of(self, worker: str, role: str) -> ProcessRef | None:  # noqa: ARG002 # a pair's interface
        """It has no processes that anybody here could name."""
        return None

    def logs(self) -> list[Path]:
        """It has no logs here."""
        return []

    def events(self, since_ns: int, until_ns: int) -> list[Event]:  # noqa: ARG002 # a pair's interface
        """It says no events."""
        return []


class _Model(msgspec.Struct, frozen=True):
    id: str = ""


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model] = []
