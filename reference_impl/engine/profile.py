"""Compute profiles: how long a model's work takes on hardware that is not here.

A profile is data (`profiles/*.toml`). Everything that a profile times is emulated, and says so; everything else in the
engine (processes, sockets, memory, files, locks, content) is real.
"""

from __future__ import annotations

from typing import Final

import msgspec

from reference_impl import named_toml

MIB: Final = 2**20
PACKAGE: Final = "reference_impl.engine.profiles"


class ProfileError(Exception):
    """A profile cannot be used; the message says which one, which field and why."""


class InitPhase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stretch of cold initialisation that is slept through."""

    name: str
    seconds: float


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates, sizes and emulated durations of one model on one machine.

    A step that runs `d` decodes and `t` prefill tokens takes
    `decode_base_s + decode_per_request_s * d` (if d > 0) `+ t / prefill_tokens_per_s` seconds.
    """

    name: str
    about: str = ""
    prefill_tokens_per_s: float
    decode_base_s: float
    decode_per_request_s: float
    chunk_tokens: int = 2048
    requests_max: int = 256
    context_tokens_max: int = 40_960
    kv_blocks: int = 65_536
    weights_mib: int = 1024
    stream_interval_tokens: int = 1
    """Tokens a streamed chunk holds (the last may hold fewer)."""
    reserve: bool = True
    """Whether a request's whole length is reserved when it is admitted. If not, it grows a block at a time, and the
    newest request is preempted when none is free."""
    init: list[InitPhase] = []
    detection_s: float = 0.0
    """Emulated time between a death and its notice, on top of the real one."""
    promotion_s: float = 0.0
    """Emulated time of a wake, on top of the real one."""

    def __post_init__(self) -> None:
        """Refuse values that no engine could run with."""
        for field in ("prefill_tokens_per_s", "chunk_tokens", "requests_max", "context_tokens_max", "kv_blocks",
                      "weights_mib", "stream_interval_tokens"):  # fmt: skip
            if getattr(self, field) <= 0:
                raise ValueError(f"{field} must be positive, got {getattr(self, field)}")
        for field in ("decode_base_s", "decode_per_request_s", "detection_s", "promotion_s"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must not be negative, got {getattr(self, field)}")

    @property
    def weights_bytes(self) -> int:
        """Size of the weights."""
        return self.weights_mib * MIB

    def step_s(self, decodes: int, prefill_tokens: int) -> float:
        """Return how long one step takes on the emulated hardware, in seconds."""
        decode_s = self.decode_base_s + self.decode_per_request_s * decodes if decodes else 0.0
        return decode_s + prefill_tokens / self.prefill_tokens_per_s

    def scaled(self, time_scale: float) -> Profile:
        """Return this profile with every emulated duration divided by `time_scale`.

        Chunks hold `time_scale` times the tokens, so that as many chunks a second are sent as at full scale: the
        machine's own work for a chunk does not shrink with the emulated durations.
        """
        return msgspec.structs.replace(
            self,
            prefill_tokens_per_s=self.prefill_tokens_per_s * time_scale,
            decode_base_s=self.decode_base_s / time_scale,
            decode_per_request_s=self.decode_per_request_s / time_scale,
            stream_interval_tokens=max(1, round(self.stream_interval_tokens * time_scale)),
            init=[InitPhase(phase.name, phase.seconds / time_scale) for phase in self.init],
            detection_s=self.detection_s / time_scale,
            promotion_s=self.promotion_s / time_scale,
        )

    def emulated(self) -> list[str]:
        """Return what is not real when an engine runs this profile, one line each."""
        parts = [
            f"compute time: prefill {self.prefill_tokens_per_s:,.0f} tokens/s; "
            f"decode step {self.decode_base_s * 1e3:g} ms + {self.decode_per_request_s * 1e3:g} ms a request",
            "model arithmetic: tokens come from the content oracle, computed from the real bytes of KV and weights",
        ]
        parts += [f"cold start: {phase.name}, {phase.seconds:g} s" for phase in self.init]
        parts += [f"detection: {self.detection_s:g} s added"] if self.detection_s else []
        parts += [f"promotion: {self.promotion_s:g} s added"] if self.promotion_s else []
        return parts


def profile_names() -> list[str]:
    """Return the names of the profiles that come with the package."""
    return named_toml.names(PACKAGE)


def load_profile(name: str) -> Profile:
    """Return the profile of this name, or of the TOML file at this path. Raises ProfileError with one clear line."""
    try:
        return named_toml.load("profile", name, PACKAGE, Profile)
    except named_toml.BadToml as error:
        raise ProfileError(str(error)) from error
