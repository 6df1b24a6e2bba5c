"""The rows of a load: what the client saw of each request, raw, and the derived columns of `requests.parquet`.

The client appends one `RequestRecord` as a JSON line when a request ends, however it ends.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

NS_PER_MS = 1e6
PARENT_VARIABLE = "PDPROOF_PARENT_PID"
"""Environment variable: the process whose death ends the client."""
ENOUGH = signal.SIGUSR1
"""Tells the client that no more requests are to start."""


class Outcome(enum.StrEnum):
    """How a request ended, as far as the client can know."""

    OK = "ok"
    FAIL = "fail"
    UNKNOWN = "unknown"
    """Timed out, or the load was stopped while it ran: the server may or may not have done the work."""


class PromptSpec(msgspec.Struct, frozen=True):
    """What a prompt is made from, so that it can be made again and its right answer computed.

    A first turn: `prefix_tokens` leading tokens are drawn from the stream (`seed`, "prefix", `prefix_group`), the rest
    from (`seed`, "prompt", `index`).

    A prompt of blocks (`block_ids`, one for each `block_tokens` tokens): a block's tokens are drawn from (`seed`,
    "block", its id), so equal ids are equal tokens; the last block is cut short.

    A later turn (`after` is the request id of the turn before): that turn's prompt, the tokens that it was answered,
    and then tokens of its own from (`seed`, "turn", `index`, `turn`).
    """

    seed: int
    index: int
    """Number in the plan: of the request, or of the session that it is a turn of."""
    input_tokens: int
    """Of the whole prompt."""
    prefix_group: int = -1
    prefix_tokens: int = 0
    block_ids: list[int] = []
    block_tokens: int = 0
    after: str = ""
    turn: int = 0


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """One streamed chunk with content: its arrival (monotonic ns) and how many tokens it held."""

    t_ns: int
    tokens: int


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of one request, as the client saw it. Times are CLOCK_MONOTONIC nanoseconds; 0 means never."""

    request_id: str
    attempt: int = 1
    prompt: PromptSpec
    session: int = -1
    """Which session of the plan it belongs to; a request without turns is a session of its own. -1: not known."""
    turn: int = 0
    """Which turn of its session, 0 for the first."""
    think_ms: float = 0.0
    """Planned time from the end of the turn before to `intended_ns`."""
    max_tokens: int
    intended_ns: int
    sent_ns: int
    """When the last byte of the request was handed to the kernel (before it: `send_began_ns`)."""
    send_began_ns: int
    first_byte_ns: int = 0
    end_ns: int
    chunks: list[Chunk] = []
    output_ids: list[int] = []
    """The tokens of the answer, in order, as far as they came."""
    logprobs: list[float] = []
    """The logarithms of their probabilities, one a token; none if they were not asked for."""
    cached_tokens: int | None = None
    """Prompt tokens that the server found in its cache, as its usage says; None: it did not say."""
    kv_handed: bool = False
    """Whether it sent the hand-off (`kv_transfer_params`) that ended the turn before."""
    renewals: int = 0
    """Renewals of that hand-off during the think time that were answered well, and, below, that were not."""
    renewals_failed: int = 0
    outcome: Outcome
    http_status: int = 0
    error: str = ""
    node_d: str = ""
    """The worker and engine that served it, as its response headers say (`x-pdproof-worker/x-pdproof-engine`)."""
    node_p: str = ""
    spoilt: str = ""
    """Why the client's own lateness makes this row's times untrustworthy; empty: they are good."""

    @property
    def first_token_ns(self) -> int:
        """Arrival of the first chunk with content, 0 if none came."""
        return self.chunks[0].t_ns if self.chunks else 0

    @property
    def output_tokens(self) -> int:
        """Tokens received."""
        return sum(c.tokens for c in self.chunks)

    @property
    def schedule_lag_ms(self) -> float:
        """Send began - intended start."""
        return (self.send_began_ns - self.intended_ns) / NS_PER_MS

    @property
    def ttft_ms(self) -> float | None:
        """First content chunk - sent; None if none came (censored)."""
        return (self.first_token_ns - self.sent_ns) / NS_PER_MS if self.chunks else None

    @property
    def ttft_from_intended_ms(self) -> float | None:
        """First content chunk - intended start; None if none came (censored)."""
        return (self.first_token_ns - self.intended_ns) / NS_PER_MS if self.chunks else None

    @property
    def mean_decode_gap_ms(self) -> float | None:
        """(end - first token) / (N - 1) of a whole answer; None for a broken or one-token answer (censored).

        The end is the last content chunk's arrival: what follows it (usage, DONE) is no decoding.
        """
        if self.outcome is not Outcome.OK or self.output_tokens < 2:
            return None
        return (self.chunks[-1].t_ns - self.chunks[0].t_ns) / NS_PER_MS / (self.output_tokens - 1)

    @property
    def e2e_ms(self) -> float | None:
        """End - sent of a whole answer; None otherwise (censored)."""
        return (self.end_ns - self.sent_ns) / NS_PER_MS if self.outcome is Outcome.OK else None


def read_records(path: Path) -> Iterator[RequestRecord]:
    """Yield the records of a client's row file. A last line cut short by a crash is left out."""
    decoder = msgspec.json.Decoder(RequestRecord)
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield decoder.decode(line)
