"""The golden run: the right answers of servers whose model nobody here can compute, from the servers themselves.

After a case, both servers are asked once more for every prompt, each alone: no KV moves between them, and a random salt
keeps each request away from what their prefix caches hold. Where the two agree, what they answer is the right answer.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from harness.content import is_whole, sent_prompt
from harness.errors import BadRunFolder
from workloads.answer import BROKEN_FINISHES
from workloads.rows import RequestRecord
from workloads.sse import decode_event

FILE: Final = "golden.jsonl"
SOURCE: Final = "a golden run on both servers"
"""What a manifest calls it."""
TOLERANCE: Final = 0.05
"""Of the logarithm of a probability, unless the target's file says another: kernels round differently from one batch to
the next, and damage to a block of a prompt moves it by more."""
IN_FLIGHT: Final = 2
HANGS_MAX: Final = 2
"""A server that has let so many requests wait for too long is not asked any more: each would wait as long."""
ANSWER_TOKENS_MAX: Final = 4_096
"""What only kept a slot busy may be far longer; nobody need compute all of it again."""
ERROR_CHARS_MAX: Final = 300
_BODY_BYTES: Final = 64 * 1024
_TOKEN_BYTES: Final = 2 * 1024
_PROMPT_TOKEN_BYTES: Final = 16
"""How large a body may be: in any case, for each token asked for, and for each of the prompt, which may come back."""
_TOKEN_END: Final = 2**31
_LN_HALF: Final = math.log(0.5)


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a server answered to a prompt, or the `error` for which there is no answer."""

    ids: list[int] = []
    logprobs: list[float] = []
    """The logarithms of the tokens' probabilities, one a token; none if it told none."""
    margins: list[float] = []
    """How far the next probable token's lay below, one a token; none if it told none."""
    cached_tokens: int | None = None
    """As in the rows. More than 0: the server heeds no salt, so its own cache vouches for it."""
    error: str = ""

    def logprob(self, index: int) -> float | None:
        """Return what was told of a token, None if nothing was."""
        return self.logprobs[index] if len(self.logprobs) == len(self.ids) else None

    def margin(self, index: int) -> float | None:
        """Return how far the next probable token lay below, None if that was not told."""
        return self.margins[index] if len(self.margins) == len(self.ids) else None


class Finding(msgspec.Struct, frozen=True):
    """Whether an answer is right as far as it came, None if that cannot be told; and why, unless it is right."""

    right: bool | None
    why: str = ""


class GoldenLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `golden.jsonl`: a prompt, what each server answers to it, and what that says of those that came."""

    prompt: str
    """The digest of its tokens; "" for answers whose prompt cannot be made again."""
    input_tokens: int = 0
    max_tokens: int = 0
    servers: dict[str, Told] = {}
    answers: dict[str, Finding]
    """By request id."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How long a golden run may take: one request, and all of it."""

    request_s: float = 60.0
    whole_s: float = 300.0


def compared(answer: Told, golden: Mapping[str, Told], tolerance: float) -> Finding:
    """Return whether an answer is, as far as it came, what all servers answer when nothing disturbs them.

    The first token at fault decides: another one, or another probability, than all servers tell. Nothing can be told
    from where the golden answers end or part, nor from a near tie on: after it, right answers differ as well.
    """
    if missing := [f"{server} gave no golden answer: {told.error}" for server, told in golden.items() if told.error]:
        return Finding(None, "; ".join(missing))
    for index in range(len(answer.ids)):
        if (finding := _at(index, answer, golden, tolerance)) is not None:
            return finding
    return Finding(True)


def _at(index: int, answer: Told, golden: Mapping[str, Told], tolerance: float) -> Finding | None:
    """Return what one token of an answer decides, None if it is right."""
    if short := [server for server, told in golden.items() if len(told.ids) <= index]:
        return Finding(None, f"the golden answer of {short[0]} ends after {index} tokens")
    tokens = {told.ids[index] for told in golden.values()}
    theirs = [p for told in golden.values() if (p := told.logprob(index)) is not None]
    if len(tokens) > 1 or any(not _near(p, theirs[0], tolerance) for p in theirs):
        return Finding(None, f"the golden answers part at token {index}{_of_caches(golden)}")
    token, ours, right = answer.ids[index], answer.logprob(index), tokens.pop()
    if token != right:
        margins = [margin for told in golden.values() if (margin := told.margin(index)) is not None]
        if _near_tie(ours, theirs, margins, tolerance):
            return Finding(None, f"token {index} is {token}, and {right} may be just as probable: a near tie")
        return Finding(False, f"token {index} is {token} and not {right}")
    if ours is not None and theirs and not any(_near(ours, p, tolerance) for p in theirs):
        return Finding(False, f"token {index} came with log probability {ours:.4f} and not {theirs[0]:.4f}")
    return None


def _near(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance  # false for NaN, which no right answer has


def _near_tie(ours: float | None, theirs: Sequence[float], margins: Sequence[float], tolerance: float) -> bool:
    """Whether rounding alone may have put another token before the golden one.

    No if the next probable one lay too far below: each of the two may be off by the tolerance. And two tokens of one
    distribution cannot both be more probable than a half.
    """
    if margins and min(margins) > 2 * tolerance:
        return False
    if ours is None:
        return bool(margins)
    return any(_near(ours, p, tolerance) and min(ours, p) <= _LN_HALF + tolerance for p in theirs)


def _of_caches(golden: Mapping[str, Told]) -> str:
    cached = [server for server, told in golden.items() if told.cached_tokens]
    return f" (in spite of its salt, the prompt was in the prefix cache of {' and '.join(cached)})" if cached else ""


@dataclass
class _Prompt:
    """A prompt that was sent, the answers to it that came, and the golden ones as far as they are here."""

    tokens: NDArray[np.int64]
    records: list[RequestRecord] = field(default_factory=list)
    golden: dict[str, Told] = field(default_factory=dict)

    @property
    def max_tokens(self) -> int:
        return min(ANSWER_TOKENS_MAX, max(len(record.output_ids) for record in self.records))

    @property
    def rank(self) -> tuple[bool, int]:
        """What KV moved for comes first, so that time is short for pokes and blockers if it is short."""
        return not any(record.kv_handed for record in self.records), -self.max_tokens


class GoldenRun:
    """Asks servers for right answers, and judges by them. Whatever the servers do, it comes to an end without an error.

    `urls`: each server's root by its name.
    """

    def __init__(
        self, model: str, urls: Mapping[str, str], headers: Mapping[str, str], tolerance: float = TOLERANCE,
        limits: Limits | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._urls = dict(urls)
        self._headers = dict(headers)
        self._tolerance = tolerance
        self._limits = limits or Limits()
        self._hangs: collections.Counter[str] = collections.Counter()

    async def judge(self, records: Sequence[RequestRecord], folder: Path) -> list[bool | None]:
        """Return for each record whether its answer is right, None where that cannot be told; writes `golden.jsonl`."""
        prompts, unmade = _prompts(records)
        await self._ask_all(sorted(prompts.values(), key=lambda prompt: prompt.rank))
        lines = [self._line(digest, prompt) for digest, prompt in prompts.items()]
        lines += [GoldenLine(prompt="", answers=unmade)] if unmade else []
        (folder / FILE).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        found = {request_id: finding for line in lines for request_id, finding in line.answers.items()}
        return [found[r.request_id].right if r.request_id in found else None for r in records]

    def _line(self, digest: str, prompt: _Prompt) -> GoldenLine:
        late = Told(error=f"it was not asked within {self._limits.whole_s:g} s, or did not answer")
        golden = {server: prompt.golden.get(server, late) for server in self._urls}
        return GoldenLine(
            prompt=digest, input_tokens=len(prompt.tokens), max_tokens=prompt.max_tokens, servers=golden,
            answers={record.request_id: self._finding(record, golden) for record in prompt.records},
        )  # fmt: skip

    def _finding(self, record: RequestRecord, golden: Mapping[str, Told]) -> Finding:
        answer = Told(ids=record.output_ids, logprobs=record.logprobs)
        finding = compared(answer, golden, self._tolerance)
        if finding.right and not is_whole(record):
            return Finding(False, f"it ended well with {len(record.output_ids)} tokens of {record.max_tokens}")
        return finding

    async def _ask_all(self, prompts: Sequence[_Prompt]) -> None:
        gates = {server: asyncio.Semaphore(IN_FLIGHT) for server in self._urls}
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0), timeout=aiohttp.ClientTimeout(total=None),
            headers=self._headers,
        ) as session:  # fmt: skip
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.whole_s):
                    await asyncio.gather(
                        *(self._ask(session, gates[server], server, prompt) for prompt in prompts for server in gates)
                    )

    async def _ask(
        self, session: aiohttp.ClientSession, gate: asyncio.Semaphore, server: str, prompt: _Prompt
    ) -> None:  # fmt: skip
        async with gate:
            prompt.golden[server] = await self._told(session, server, prompt)

    async def _told(self, session: aiohttp.ClientSession, server: str, prompt: _Prompt) -> Told:
        if self._hangs[server] >= HANGS_MAX:
            return Told(error=f"it was not asked any more: {HANGS_MAX} requests before had no end")
        try:
            async with asyncio.timeout(self._limits.request_s):
                return await self._answer(session, server, prompt)
        except TimeoutError:
            self._hangs[server] += 1
            return Told(error=f"no end within {self._limits.request_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
            what = str(error) if isinstance(error, _Unfit) else f"{type(error).__name__}: {error}"
            return Told(error=" ".join(what.split())[:ERROR_CHARS_MAX])

    async def _answer(self, session: aiohttp.ClientSession, server: str, prompt: _Prompt) -> Told:
        body = {
            "model": self._model, "prompt": prompt.tokens.tolist(), "max_tokens": prompt.max_tokens, "temperature": 0,
            "stream": False, "ignore_eos": True, "return_token_ids": True, "logprobs": 2,
            "cache_salt": secrets.token_hex(16),
        }  # fmt: skip
        most = _BODY_BYTES + _TOKEN_BYTES * prompt.max_tokens + _PROMPT_TOKEN_BYTES * len(prompt.tokens)
        headers = {"Content-Type": "application/json"}
        url = f"{self._urls[server]}/v1/completions"
        async with session.post(url, data=msgspec.json.encode(body), headers=headers) as response:
            if response.status != 200:
                said = await response.content.read(ERROR_CHARS_MAX)
                raise _Unfit(f"HTTP {response.status}: {said.decode('utf-8', 'replace')}")
            came = bytearray()
            async for piece in response.content.iter_any():
                came += piece
                if len(came) > most:
                    raise _Unfit(f"its answer is longer than {most} bytes")
        return _read(bytes(came))


class _Unfit(ValueError):
    """What came is no golden answer; the message says why."""


class _TopLogprobs(msgspec.Struct, frozen=True):
    top_logprobs: list[dict[str, float] | None] | None = None


class _TopChoice(msgspec.Struct, frozen=True):
    logprobs: _TopLogprobs | None = None


class _Tops(msgspec.Struct, frozen=True):
    choices: list[_TopChoice] = []


def _margins(body: bytes) -> list[float]:
    """Return by how much each token was more probable than the next, as far as that was told. Raises DecodeError."""
    logprobs = msgspec.json.decode(body, type=_Tops).choices[0].logprobs
    tops = [sorted((top or {}).values()) for top in (logprobs.top_logprobs if logprobs else None) or []]
    return [top[-1] - top[-2] for top in tops if len(top) > 1]


def _read(body: bytes) -> Told:
    """Return the answer that a body holds. Raises ValueError, DecodeError."""
    whole = decode_event(body)  # an event of a stream has the same fields
    if whole.error_text:
        raise _Unfit(whole.error_text)
    if not whole.choices or not (ids := whole.choices[0].token_ids):
        raise _Unfit("it named no tokens")
    choice = whole.choices[0]
    if choice.finish_reason in BROKEN_FINISHES:
        raise _Unfit(f'the engine gave up: finish_reason "{choice.finish_reason}"')
    if not all(0 <= token < _TOKEN_END for token in ids):
        raise _Unfit("it named what is no token")
    told = (choice.logprobs.token_logprobs if choice.logprobs else None) or []
    logprobs, margins = [p for p in told if p is not None], _margins(body)
    details = whole.usage.prompt_tokens_details if whole.usage else None
    return Told(
        ids=ids, logprobs=logprobs if len(logprobs) == len(ids) else [],
        margins=margins if len(margins) == len(ids) else [],
        cached_tokens=details.cached_tokens if details else None,
    )  # fmt: skip


def _prompts(records: Sequence[RequestRecord]) -> tuple[dict[str, _Prompt], dict[str, Finding]]:
    """Return the prompts of all answers by their digests, and the answers whose prompts cannot be made again."""
    by_id = {record.request_id: record for record in records}
    prompts: dict[str, _Prompt] = {}
    unmade: dict[str, Finding] = {}
    for record in records:
        if not record.output_ids:
            continue
        try:
            tokens = sent_prompt(record, by_id)
        except (ValueError, OverflowError) as error:
            unmade[record.request_id] = Finding(None, f"its prompt cannot be made again: {error}")
            continue
        if tokens is None:
            unmade[record.request_id] = Finding(None, "its prompt cannot be made again: a turn before it has no record")
            continue
        digest = hashlib.sha256(tokens.astype("<i8").tobytes()).hexdigest()
        prompts.setdefault(digest, _Prompt(tokens)).records.append(record)
    return prompts, unmade


def findings(folder: Path) -> dict[str, Finding]:
    """Return what a run folder's golden run found, by request id; {} if there was none. Raises BadRunFolder."""
    path = folder / FILE
    if not path.is_file():
        return {}
    decode = msgspec.json.Decoder(GoldenLine).decode
    try:
        lines = [decode(line) for line in path.read_bytes().splitlines()]
    except (OSError, msgspec.DecodeError) as error:
        raise BadRunFolder(folder, f"{FILE}: {error}") from error
    return {request_id: finding for line in lines for request_id, finding in line.answers.items()}
