"""Right answers from an undisturbed computation on the same servers: what they let pass, and what they catch."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from harness.cases.makers import maker_of
from harness.cases.registry import chosen
from harness.cases.runner import Outcome as CaseOutcome
from harness.cases.runner import Plan, run_cases
from harness.cases.terms import SMALL
from harness.checks import judge
from harness.errors import BadRunFolder
from harness.golden import FILE, HANGS_MAX, IN_FLIGHT, Finding, GoldenRun, Limits, Told, compared, findings
from harness.run_folder import RunFolder
from harness.verdicts import CheckResult, Verdict
from workloads.prompts import prompt_tokens
from workloads.rows import Outcome, PromptSpec, RequestRecord

# -- the rule -------------------------------------------------------------------------------------------------------

RIGHT = Told(ids=[5, 6, 7], logprobs=[-0.1, -0.9, -2.0])
ROUNDED = Told(ids=[5, 6, 7], logprobs=[-0.12, -0.87, -2.04])
BARE = Told(ids=[5, 6, 7])
FIRM = Told(ids=[5, 6, 7], logprobs=[-0.1, -0.9, -2.0], margins=[2.0, 0.11, 0.5])
LOOSE = Told(ids=[5, 6, 7], logprobs=[-0.1, -0.9, -2.0], margins=[2.0, 0.09, 0.5])
BOTH = {"p0": RIGHT, "d0": ROUNDED}


def told(ids: list[int], logprobs: Sequence[float] = ()) -> Told:
    return Told(ids=ids, logprobs=list(logprobs))


@pytest.mark.parametrize(
    ("answer", "golden"),
    [
        (RIGHT, BOTH),
        (ROUNDED, BOTH),
        (told([5, 6, 7], [-0.1, -0.93, -2.08]), BOTH),  # beyond the tolerance from one server, within it from the other
        (told([5], [-0.1]), BOTH),  # broken off
        (BARE, BOTH),
        (RIGHT, {"p0": BARE, "d0": BARE}),
        (RIGHT, {"p0": RIGHT, "d0": BARE}),
        (told([5], [-0.1]), {"p0": told([5, 1], [-0.1, -1]), "d0": told([5, 2], [-0.1, -1])}),  # they part behind it
    ],
)
def test_an_answer_is_right_if_both_servers_say_the_same_as_far_as_it_goes(
    answer: Told, golden: dict[str, Told]
) -> None:
    assert compared(answer, golden, 0.05) == Finding(True)


@pytest.mark.parametrize(
    ("answer", "golden", "says"),
    [
        (told([5, 9, 7], [-0.1, -0.5, -2.0]), BOTH, "token 1 is 9 and not 6"),
        (told([9, 6, 7]), BOTH, "token 0"),
        (told([9, 6, 7], RIGHT.logprobs), {"p0": BARE, "d0": BARE}, "token 0"),
        (told([5, 6, 7], [-0.1, -1.5, -2.0]), BOTH, "token 1 came with log probability -1.5"),
        (told([5, 6, 7], [-0.1, math.nan, -2.0]), BOTH, "token 1"),
        (told([9, 6, 7], [-0.1, -0.9, -2.0]), BOTH, "token 0 is 9"),  # two tokens of one distribution, both at 90 %
        (told([5, 9, 1], RIGHT.logprobs), {"p0": FIRM, "d0": FIRM}, "token 1 is 9"),  # no other was as probable
        (told([5, 9, 1]), {"p0": FIRM, "d0": FIRM}, "token 1 is 9"),
        (told([5, 9, 1], [-0.1, -1.2, -9.0]), {"p0": LOOSE, "d0": LOOSE}, "token 1 is 9"),
        (told([9, 6], [-3.0, -0.9]), {"p0": told([5, 1]), "d0": told([5, 2])}, "token 0"),  # before they part
    ],
)
def test_an_answer_that_both_servers_contradict_is_wrong(answer: Told, golden: dict[str, Told], says: str) -> None:
    found = compared(answer, golden, 0.05)
    assert found.right is False
    assert says in found.why


@pytest.mark.parametrize(
    ("answer", "golden", "says"),
    [
        (told([5, 9, 1], [-0.1, -0.92, -9.0]), BOTH, "near tie"),
        (told([5, 9, 1], RIGHT.logprobs), {"p0": FIRM, "d0": LOOSE}, "near tie"),
        (told([5, 9, 1]), {"p0": LOOSE, "d0": FIRM}, "near tie"),
        (RIGHT, {"p0": RIGHT, "d0": told([5, 6, 8], RIGHT.logprobs)}, "part at token 2"),
        (RIGHT, {"p0": RIGHT, "d0": told([5, 6, 7], [-0.1, -1.2, -2.0])}, "part at token 1"),
        (RIGHT, {"p0": RIGHT, "d0": told([5, 6])}, "d0 ends after 2 tokens"),
        (RIGHT, {"p0": Told(error="HTTP 500: no"), "d0": RIGHT}, "p0 gave no golden answer: HTTP 500"),
    ],
)
def test_nothing_is_said_where_it_cannot_be_told(answer: Told, golden: dict[str, Told], says: str) -> None:
    found = compared(answer, golden, 0.05)
    assert found.right is None
    assert says in found.why


def test_the_tolerance_is_the_targets_own() -> None:
    off = told([5, 6, 7], [-0.1, -1.2, -2.0])
    assert compared(off, BOTH, 0.05).right is False
    assert compared(off, BOTH, 0.5).right is True


def test_servers_that_answer_from_their_caches_are_named_where_they_disagree() -> None:
    cached = Told(ids=[5, 6, 8], cached_tokens=96)
    assert "prefix cache of d0" in compared(BARE, {"p0": BARE, "d0": cached}, 0.05).why


# -- the servers ----------------------------------------------------------------------------------------------------

MARGIN = 0.5


def model(prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Return an answer that hangs on every token of the prompt, and its log probabilities."""
    state = hashlib.sha256(str(list(prompt)).encode()).digest()
    ids, logprobs = list[int](), list[float]()
    for _ in range(count):
        state = hashlib.sha256(state).digest()
        ids.append(int.from_bytes(state[:2]) % 4096)
        logprobs.append(-state[2] / 64)
    return ids, logprobs


class Fake:
    """A server under vLLM's API. `plain`: how it answers where no KV is to move. `foreign`: it reads other KV."""

    def __init__(self, plain: str = "right", *, foreign: bool = False) -> None:
        self.asked: list[dict[str, Any]] = []
        self.most_at_once = 0
        self._plain = plain
        self._foreign = foreign
        self._at_once = 0

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await asyncio.sleep(0.001)
            params = body.get("kv_transfer_params")
            if params is None and self._plain not in ("right", "parts"):
                return await self._badly(request)
            return await self._answer(request, body, params or {})
        finally:
            self._at_once -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], params: dict[str, Any]) -> web.StreamResponse:
        read = params.get("do_remote_prefill") and self._foreign
        ids, logprobs = model(body["prompt"][1:] if read else body["prompt"], body["max_tokens"])
        if self._plain == "parts" and not params:
            ids = [*ids[:1], *((token + 1) % 4096 for token in ids[1:])]
        tops = [{"this": p, "that": p - MARGIN} for p in logprobs] if body["logprobs"] else None
        told = {"token_logprobs": logprobs, "top_logprobs": tops}
        said: dict[str, Any] = {
            "choices": [{"token_ids": ids, "logprobs": told, "finish_reason": "length"}],
            "kv_transfer_params": {"do_remote_prefill": True} if params.get("do_remote_decode") else None,
        }
        if not body["stream"]:
            return web.json_response(said)
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(b"data: " + msgspec.json.encode(said) + b"\n\ndata: [DONE]\n\n")
        return stream

    async def _badly(self, request: web.Request) -> web.StreamResponse:
        if self._plain == "hangs":
            await asyncio.sleep(60)
        if self._plain == "error":
            return web.json_response({"error": {"message": "no salt here\nnor there"}}, status=400)
        stream = web.StreamResponse()
        await stream.prepare(request)
        if self._plain == "cut":
            await stream.write(b'{"choices":[{"token_ids":[1,')
            assert request.transport is not None
            request.transport.abort()
        with contextlib.suppress(ConnectionError):
            while self._plain in ("huge", "drips"):
                await stream.write(b" " * (100_000 if self._plain == "huge" else 1))
                await asyncio.sleep(0 if self._plain == "huge" else 0.05)
        if self._plain in ODD_BODIES:
            await stream.write(ODD_BODIES[self._plain])
        return stream

    @property
    def salts(self) -> list[str]:
        return [body["cache_salt"] for body in self.asked if "cache_salt" in body]


ODD_BODIES = {
    "no JSON": b"<html>",
    "no object": b"[" * 50_000,
    "too deep": b'{"x":' + b"[" * 50_000,
    "no choice": b"{}",
    "no ids": b'{"choices":[{"text":"a"}]}',
    "no token": b'{"choices":[{"token_ids":[99999999999999999999]}]}',
    "no number": b'{"choices":[{"token_ids":[1],"logprobs":{"token_logprobs":[1e999]}}]}',
    "a surrogate": b'{"error":{"message":"\\ud800"}}',
    "gave up": b'{"choices":[{"token_ids":[1],"finish_reason":"abort"}]}',
    "an error": b'{"error":{"message":"out of blocks"}}',
}


@contextlib.asynccontextmanager
async def served(fake: Fake) -> AsyncIterator[str]:
    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "some-model"}]})

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text="vllm:kv_cache_usage_perc 0\nvllm:num_requests_running 0\n")

    app = web.Application(client_max_size=2**24)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", metrics)
    app.router.add_post("/v1/completions", fake.completions)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def record(number: int, tokens: int = 4, prompt: PromptSpec | None = None, **more: Any) -> RequestRecord:
    """Return a right answer of so many tokens to a prompt; `more` breaks it."""
    spec = prompt or PromptSpec(seed=1, index=number, input_tokens=20)
    ids, logprobs = ([], []) if spec.after else model(prompt_tokens(spec).tolist(), tokens)
    fields: dict[str, Any] = {
        "request_id": f"r{number}", "prompt": spec, "max_tokens": tokens, "intended_ns": 1, "sent_ns": 1,
        "send_began_ns": 1, "end_ns": 2, "output_ids": ids, "logprobs": logprobs, "kv_handed": True,
        "outcome": Outcome.OK,
    }  # fmt: skip
    return RequestRecord(**fields | more)


async def judged(
    folder: Path, p: Fake, d: Fake, records: list[RequestRecord], limits: Limits | None = None
) -> list[bool | None]:
    async with served(p) as p_url, served(d) as d_url:
        run = GoldenRun("some-model", {"p0": p_url, "d0": d_url}, {"Authorization": "Bearer k"}, limits=limits)
        return await run.judge(records, folder)


async def test_every_prompt_is_asked_of_both_servers_once_and_what_they_say_is_kept(tmp_path: Path) -> None:
    p, d = Fake(), Fake()
    same = PromptSpec(seed=1, index=0, input_tokens=20)
    turn = PromptSpec(seed=1, index=9, input_tokens=40, after="r0", turn=1)
    said = [*prompt_tokens(same).tolist(), *model(prompt_tokens(same).tolist(), 4)[0]]
    whole = [*said, *prompt_tokens(turn, msgspec_array(said)).tolist()[len(said) :]]
    ids, logprobs = model(whole, 4)
    records = [
        record(0),
        record(1, 9, same),
        record(2, output_ids=[1, 2, 3, 4]),
        record(3, output_ids=[]),
        record(4, 4, turn, output_ids=ids, logprobs=logprobs),
        record(5, 4, PromptSpec(seed=1, index=9, input_tokens=40, after="unknown", turn=1), output_ids=[1]),
        record(6, 4, PromptSpec(seed=1, index=9, input_tokens=10, after="r0", turn=1), output_ids=[1]),
        record(7, max_tokens=5),  # a token of it was lost
        *(record(number) for number in range(10, 30)),
    ]
    assert await judged(tmp_path, p, d, records) == [True, True, False, None, True, None, None, False, *[True] * 20]
    for fake in (p, d):
        assert len(fake.asked) == len(fake.salts) == len(set(fake.salts)) == 24
        assert fake.most_at_once == IN_FLIGHT
        assert sorted(body["max_tokens"] for body in fake.asked) == [*[4] * 23, 9]
        assert all("kv_transfer_params" not in body and body["temperature"] == 0 for body in fake.asked)
        assert [body["max_tokens"] for body in fake.asked if body["prompt"] == said[:20]] == [9]
    assert not set(p.salts) & set(d.salts)
    lines = [msgspec.json.decode(line) for line in (tmp_path / FILE).read_bytes().splitlines()]
    first = next(line for line in lines if "r0" in line["answers"])
    assert set(first["answers"]) == {"r0", "r1"}
    assert first["servers"]["p0"]["ids"] == first["servers"]["d0"]["ids"] == model(said[:20], 9)[0]
    kept = findings(tmp_path)
    assert "token 0 is 1" in kept["r2"].why
    assert "a turn before it has no record" in kept["r5"].why
    assert "cannot follow" in kept["r6"].why
    assert "4 tokens of 5" in kept["r7"].why


def msgspec_array(tokens: list[int]) -> Any:
    import numpy as np

    return np.asarray(tokens, np.int64)


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        ("error", "HTTP 400"),
        ("hangs", "no end within 0.3 s"),
        ("drips", "no end within 0.3 s"),
        ("huge", "is longer than"),
        ("cut", "d0 gave no golden answer: Client"),
        *((name, "d0 gave no golden answer") for name in ODD_BODIES),
    ],
)
async def test_a_server_that_gives_no_golden_answer_leaves_the_question_open(
    tmp_path: Path, plain: str, says: str
) -> None:
    records = [record(number) for number in range(12)]
    never = plain in ("hangs", "drips")
    p, d = (
        Fake(plain if never else "right"),
        Fake(plain),
    )  # both, or a busy machine would decide which is said to be late
    begun = time.monotonic()
    assert await judged(tmp_path, p, d, records, Limits(request_s=0.3 if never else 30)) == [None] * 12
    assert time.monotonic() - begun < 20
    assert {says in finding.why for finding in findings(tmp_path).values() if "any more" not in finding.why} == {True}
    assert len(d.asked) in (range(HANGS_MAX + IN_FLIGHT) if never else (12,))  # some may not have got through


async def test_servers_that_are_away_leave_it_open(tmp_path: Path) -> None:
    run = GoldenRun("some-model", {"p0": "http://127.0.0.1:9", "d0": "http://127.0.0.1:9"}, {})
    assert await run.judge([record(0)], tmp_path) == [None]
    assert "p0 gave no golden answer: ClientConnector" in findings(tmp_path)["r0"].why
    assert await run.judge([], tmp_path) == []


async def test_the_whole_has_an_end(tmp_path: Path) -> None:
    records = [record(number) for number in range(5)]
    assert await judged(tmp_path, Fake("hangs"), Fake("hangs"), records, Limits(whole_s=0.3)) == [None] * 5
    assert {"it was not asked within 0.3 s" in finding.why for finding in findings(tmp_path).values()} == {True}


async def test_what_kv_moved_for_is_asked_first_and_long_answers_before_short_ones(tmp_path: Path) -> None:
    d = Fake()
    pokes = [record(number, number, kv_handed=False) for number in range(1, 10)]
    await judged(tmp_path, Fake(), d, [*pokes, record(20), record(21, 9)])
    assert {body["max_tokens"] for body in d.asked[:IN_FLIGHT]} == {4, 9}
    assert {body["max_tokens"] for body in d.asked[-IN_FLIGHT:]} == {1, 2}


def test_a_damaged_file_is_said_to_be_one(tmp_path: Path) -> None:
    assert findings(tmp_path) == {}
    (tmp_path / FILE).write_text('{"prompt": 1}\n')
    with pytest.raises(BadRunFolder, match=FILE):
        findings(tmp_path)


# -- a case on servers that somebody else runs ----------------------------------------------------------------------


async def undisturbed(folder: Path, p: Fake, d: Fake, *, twin: bool = False) -> tuple[CaseOutcome, CheckResult]:
    """Run the case, or a twin, on these servers; return what came of it, and the verdict on its content."""
    async with served(p) as p_url, served(d) as d_url:
        description = folder / "theirs.toml"
        description.write_text(
            f'name = "theirs"\nmodel = "some-model"\nprefill_url = "{p_url}"\ndecode_url = "{d_url}"\n'
            f'prefill_metrics_url = "{p_url}/metrics"\ndecode_metrics_url = "{d_url}/metrics"\n'
            '[terms]\nlease_s = 6\nload_failure_policy = "recompute"\nbidirectional = false\n'
        )
        plan = Plan(size=SMALL, seed=4, out=folder / "out", twins=twin, command=[])
        maker = maker_of(str(description))
        outcomes = await run_cases(chosen(("undisturbed",)), maker, plan, lambda _: None, lambda _: None)
    (outcome,) = [outcome for outcome in outcomes if outcome.folder]  # most twins ask for what cannot be had here
    run = RunFolder(Path(outcome.folder))
    assert run.incomplete is None
    assert judge(run) == outcome.results
    return outcome, next(result for result in outcome.results if result.check == "content")


async def test_right_answers_pass_and_it_is_said_what_they_were_compared_with(tmp_path: Path) -> None:
    p, d = Fake(), Fake()
    outcome, content = await undisturbed(tmp_path, p, d)
    assert content.verdict is Verdict.PASS
    assert "were compared with a golden run on both servers" in content.found
    answers = RunFolder(Path(outcome.folder)).requests
    assert len(p.salts) == len(d.salts) == len({str(body["prompt"]) for body in [*p.asked, *d.asked]})
    assert len(findings(Path(outcome.folder))) == len(answers)
    assert answers.content_ok.all()


async def test_answers_from_foreign_kv_are_caught(tmp_path: Path) -> None:
    outcome, content = await undisturbed(tmp_path, Fake(), Fake(foreign=True))
    assert content.verdict is Verdict.FAIL
    assert "-decode for one: token 0 is " in content.found
    kept = findings(Path(outcome.folder))
    assert {name for name, finding in kept.items() if finding.right is False} == {
        name for name in kept if name.endswith("-decode")
    }
    assert all(finding.right is not None for finding in kept.values())


async def test_a_token_that_is_changed_on_its_way_is_caught(tmp_path: Path) -> None:
    twin, content = await undisturbed(tmp_path, Fake(), Fake(), twin=True)
    assert (twin.twin, twin.verdict, content.verdict) == ("wrong_token", Verdict.PASS, Verdict.FAIL)


async def test_servers_that_do_not_agree_with_each_other_leave_what_the_decode_side_said_open(tmp_path: Path) -> None:
    _, content = await undisturbed(tmp_path, Fake(), Fake("parts"))
    assert content.verdict is Verdict.INCONCLUSIVE
    assert "no answer of the decode side could be judged" in content.found
    assert "the golden answers part at token 1" in content.found
