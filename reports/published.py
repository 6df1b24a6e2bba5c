"""The published measurement that a comparison is set beside: NVIDIA Dynamo's shadow-engine recovery.

GLM-5.2 NVFP4, two workers of eight B200 GPUs each, 32,000 tokens in, 1,000 out, 0.7 requests/s, SIGKILL of one worker
at steady state, 600 s watched. Ratios may be compared; absolute times belong to other machines.
"""

from __future__ import annotations

from typing import Final

import msgspec

TTFT_LIMIT_S: Final = 5.0
DECODE_LIMIT_TOKENS_S: Final = 20.0
WINDOW_S: Final = 10.0
"""Width of the windows whose median TTFT says whether service is back in its band."""


class PublishedArm(msgspec.Struct, frozen=True, kw_only=True):
    """One column of the published table."""

    recovery_s: float
    detection_s: float | None
    promotion_s: float | None
    ttft_ms_p50: float
    decode_rate_tokens_s_p50: float
    ttft_over_limit: int
    decode_under_limit: int
    requests: int


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """The published table, and the load that it was measured under."""

    source: str
    cold: PublishedArm
    shadow: PublishedArm
    ratio_recovery: float
    ratio_ttft_p50: float
    ratio_decode_rate_p50: float
    ttft_limit_s: float
    decode_limit_tokens_s: float
    requests_per_s: float
    input_tokens: int
    output_tokens: int


PUBLISHED: Final = Published(
    source="NVIDIA Dynamo, shadow-engine recovery: GLM-5.2 NVFP4, two workers, each TP=8 on one B200 node",
    cold=PublishedArm(
        recovery_s=283.0, detection_s=None, promotion_s=None, ttft_ms_p50=23_815.0, decode_rate_tokens_s_p50=12.0,
        ttft_over_limit=201, decode_under_limit=226, requests=399,
    ),
    shadow=PublishedArm(
        recovery_s=7.3, detection_s=1.7, promotion_s=5.6, ttft_ms_p50=1_311.0, decode_rate_tokens_s_p50=46.0,
        ttft_over_limit=1, decode_under_limit=0, requests=398,
    ),
    ratio_recovery=39.0,
    ratio_ttft_p50=18.0,
    ratio_decode_rate_p50=3.8,
    ttft_limit_s=TTFT_LIMIT_S,
    decode_limit_tokens_s=DECODE_LIMIT_TOKENS_S,
    requests_per_s=0.7,
    input_tokens=32_000,
    output_tokens=1_000,
)  # fmt: skip
