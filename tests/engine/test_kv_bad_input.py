"""Bad hand-offs at the door of a live decode engine: a 4xx with the field's name, or the policy; it goes on (R1)."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from reference_impl.engine.cli import EngineAnnouncement
from reference_impl.realclock import now_ns
from reference_impl.rules.events import EventKind
from tests.deployment.split import KEEP, Client, History, lone_engine, prompt_of

pytestmark = [pytest.mark.nixl]

PROMPT = prompt_of(1, 100)
OTHER = prompt_of(2, 100)
NEEDED = ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port", "tp_size",
          "remote_num_tokens")  # fmt: skip
LEASE_S = 6.0
POOL_BLOCKS = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad-input")


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[dict[str, EngineAnnouncement]]:
    """A prefill engine, and two decode engines that differ in what they do when a load fails."""
    terms: dict[str, dict[str, object]] = {
        "p0": {"kv_lease_duration": LEASE_S},
        "d0": {"kv_lease_duration": LEASE_S, "load_limit": 10},
        "fails": {"kv_lease_duration": LEASE_S, "load_limit": 10, "kv_load_failure_policy": "fail"},
    }
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        lives = {name: lone_engine(folder, "prefill" if name == "p0" else "decode", t) for name, t in terms.items()}
        starting = {name: pool.submit(stack.enter_context, life) for name, life in lives.items()}
        yield {name: started.result() for name, started in starting.items()}


@pytest.fixture
def history(folder: Path) -> History:
    return History(folder)


@pytest_asyncio.fixture
async def client(engines: dict[str, EngineAnnouncement]) -> AsyncIterator[Client]:
    urls = {name: said.url for name, said in engines.items()}
    async with Client("", engines["p0"].weights, urls) as found:
        yield found
        await assert_all_well(found)


async def assert_all_well(client: Client) -> None:
    """Every engine still lives, and the next good request is served as if nothing had happened."""
    before = await client.metrics("d0")
    prompt = prompt_of(now_ns() % 99_991, 120)
    for name in ("d0", "fails"):
        answer = await client.decoded(prompt, 5, await client.prefilled(prompt), name)
        assert answer.tokens == client.right(prompt, 5)
    assert await client.grown("d0", before, "pdproof:loads_done_total") == [1]


async def refused(client: Client, params: object, field: str, **more: Any) -> None:
    answer = await client.complete(more.pop("prompt", PROMPT), 5, worker_id="d0", params=params, **more)
    assert 400 <= answer.status < 500, (params, answer.text)
    assert answer.error["param"].startswith("kv_transfer_params"), (params, answer.text)
    assert answer.error["param"].removeprefix("kv_transfer_params").removeprefix(".") == field, (params, answer.text)
    assert field in answer.error["message"], (params, answer.text)


@pytest.mark.rule("KVC-XFER-005")
async def test_each_field_that_is_missing_is_named(client: Client) -> None:
    good = await client.prefilled(PROMPT)
    for name in NEEDED:
        await refused(client, {k: v for k, v in good.items() if k != name}, name)
        await refused(client, {**good, name: None}, name)
    await refused(client, {"do_remote_prefill": True}, "remote_engine_id")
    assert (await client.decoded(PROMPT, 5, good)).tokens == client.right(PROMPT, 5)


@pytest.mark.rule("KVC-XFER-005")
async def test_each_field_that_is_wrong_is_named(client: Client) -> None:
    good = await client.prefilled(PROMPT)
    blocks = good["remote_block_ids"][0]
    wrong: dict[str, list[Any]] = {
        "do_remote_prefill": ["yes", 1, [], {}],
        "do_remote_decode": ["no", 0],
        "remote_engine_id": ["", 5, [], {}, "x" * 121, "a b", "a\n", "ä", "\0"],
        "remote_request_id": ["", 5, [], "x" * 121, "a\x7f"],
        "remote_block_ids": [[], {}, 3, "blocks", [[]], blocks, [blocks, blocks], [blocks[:-1]], [[*blocks, 900]],
                             [[*blocks[:-1], blocks[0]]], [[-1, *blocks[1:]]], [[2**31, *blocks[1:]]],
                             [[1.5, *blocks[1:]]], [["1", *blocks[1:]]], [[None, *blocks[1:]]], [[True, *blocks[1:]]],
                             [[2**70, *blocks[1:]]]],
        "remote_host": ["", 5, "8.8.8.8", "example.com", "127.0.0.2", "x" * 254, "localhost:80", "[::1]"],
        "remote_port": [0, -1, 65_536, 2**70, "80", 80.5, True],
        "tp_size": [0, -1, 3, 16, 65, "1", 1.5],
        "remote_num_tokens": [0, -5, 2**31, 1e300, "100", 100.5],
        "remote_blocks_expiry_time": [-1, 1e9, 1e300, "soon", []],
        "transfer_mode": ["write", "", 5, []],
        "remote_readers": [0, -1, 1025, "2"],
    }  # fmt: skip
    for name, values in wrong.items():
        for value in values:
            await refused(client, {**good, name: value}, name)
    await refused(client, {**good, "remote_blocks": 3}, "remote_blocks")
    await refused(client, {**good, "": 3}, "")
    for nonsense in ([], [1], "x", 5, True, 1.5):
        await refused(client, nonsense, "")
    assert (await client.decoded(PROMPT, 5, good)).tokens == client.right(PROMPT, 5)


@pytest.mark.rule("KVC-XFER-005")
async def test_numbers_of_tokens_that_are_not_the_prompts_are_refused(client: Client) -> None:
    good = await client.prefilled(PROMPT)
    for tokens in (97, 99, 101, 112):
        await refused(client, {**good, "remote_num_tokens": tokens}, "remote_num_tokens")
    for prompt in (PROMPT[:-1], [*PROMPT, 5], [5]):
        await refused(client, await client.prefilled(PROMPT), "remote_num_tokens", prompt=prompt)
    await refused(client, {**good, "remote_blocks_expiry_time": 5000.5}, "remote_blocks_expiry_time")


@pytest.mark.rule("KVC-XFER-005")
async def test_an_engines_own_hand_off_and_one_for_an_engine_without_kv_are_refused(client: Client) -> None:
    good = await client.prefilled(PROMPT)
    answer = await client.decoded(PROMPT, 5, good, "p0")
    assert (answer.status, answer.error["param"]) == (400, "kv_transfer_params.remote_engine_id")
    assert "names this engine itself" in answer.error["message"]
    assert (await client.decoded(PROMPT, 5, good)).tokens == client.right(PROMPT, 5)


@pytest.mark.rule("KVC-REL-002")
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": 4096}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "x"}, "max_tokens"),
        ({"prompt": [5000] * 100}, "prompt"),
        ({"n": 2}, "n"),
        ({"stop": ["."]}, "stop"),
        ({"model": "another"}, "model"),
        ({"prompt": PROMPT[:-1]}, "kv_transfer_params.remote_num_tokens"),
    ],
)
async def test_what_is_refused_at_the_door_lets_go_of_the_holders_blocks(
    client: Client, history: History, change: dict[str, Any], param: str
) -> None:
    params = await client.prefilled(PROMPT)
    body = {"prompt": PROMPT, "max_tokens": 5, "kv_transfer_params": params}
    answer = await client.post("d0", body | change)
    assert (answer.status, answer.error["param"]) == (400, param)
    released = history.event_of(EventKind.LEASE_RELEASED, params["remote_request_id"], LEASE_S / 3)
    assert released.detail["how"] == "abort"


@pytest.mark.rule("KVC-XFER-005", "KVC-XFER-002", "KVC-XFER-001")
@pytest.mark.parametrize("which", ["beyond the pool", "far beyond", "another's", "in another order"])
async def test_other_blocks_than_the_leases_are_not_read(client: Client, which: str) -> None:
    """A hand-off passes through the client's hands. What lies in other blocks must not be believed, nor be cached."""
    prompt = prompt_of(200 + len(which), 160)
    good = await client.prefilled(prompt)
    (blocks,) = good["remote_block_ids"]
    other = {
        "beyond the pool": [*blocks[:-1], POOL_BLOCKS],
        "far beyond": [*blocks[:-1], 2**31 - 1],
        "another's": (await client.prefilled(prompt_of(40, 160)))["remote_block_ids"][0],
        "in another order": blocks[::-1],
    }[which]
    wrong = good | {"remote_block_ids": [other]}
    before = {name: await client.metrics(name) for name in ("d0", "fails")}
    assert (await client.decoded(prompt, 5, wrong)).tokens == client.right(prompt, 5)
    assert (await client.decoded(prompt, 5, wrong, "fails")).status == 500
    assert (await client.decoded(prompt, 5, good, "fails")).tokens == client.right(prompt, 5), "the lease still stands"
    assert (await client.decoded(prompt, 5, wrong)).tokens == client.right(prompt, 5), "and from the cache"
    for name, loaded in (("d0", 0), ("fails", 1)):
        grown = await client.grown(name, before[name], "pdproof:loads_failed_total", "pdproof:loads_done_total")
        assert grown == [1, loaded]


@pytest.mark.rule("KVC-REL-007", "KVC-XFER-001")
async def test_a_hand_off_of_another_prompt_is_refused_by_its_holder_and_computed(client: Client) -> None:
    params = await client.prefilled(PROMPT)
    other = prompt_of(60, 100)
    before = {name: await client.metrics(name) for name in ("p0", "d0")}
    assert (await client.decoded(other, 5, params)).tokens == client.right(other, 5)
    assert await client.grown("p0", before["p0"], "pdproof:claims_refused_total") == [1]
    assert await client.grown("d0", before["d0"], "pdproof:loads_failed_total", "pdproof:recomputed_tokens_total") == [
        1,
        100,
    ]


@pytest.mark.rule("KVC-REL-007")
async def test_a_used_hand_off_sent_again_is_never_anothers_content(client: Client, history: History) -> None:
    """Used, its blocks given to another prompt since, and sent again: to the same engine and to another one."""
    prompt = prompt_of(70, 200)
    params = await client.prefilled(prompt)
    assert (await client.decoded(prompt, 5, params)).tokens == client.right(prompt, 5)
    history.event_of(EventKind.LEASE_RELEASED, params["remote_request_id"], LEASE_S / 3)
    fillers = [prompt_of(71 + n, 4000) for n in range(5)]  # 250 blocks each: more than the pool has
    for filler in fillers:
        await client.complete(filler, 1, worker_id="p0")
    before = await client.metrics("p0")
    again = await client.decoded(prompt, 5, params)
    assert again.tokens == client.right(prompt, 5)
    used = await client.decoded(prompt, 5, params, "fails")
    assert used.status == 500
    assert "no lease" in used.error["message"]
    assert "could not be loaded" in used.error["message"]
    assert await client.grown("p0", before, "pdproof:reads_after_expiry_total") == [1], "the first found all of it here"


@pytest.mark.rule("KVC-HSK-002", "KVC-XFER-002")
@pytest.mark.parametrize("dead", ["nobody", "silent"])
async def test_a_holder_that_cannot_be_reached_costs_only_its_own_request(client: Client, dead: str) -> None:
    good = await client.prefilled(PROMPT)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if dead == "silent":
            listener.listen()
        foreign = {**good, "remote_engine_id": f"nobody-{dead}", "remote_port": listener.getsockname()[1]}
        prompt = prompt_of(80 + (dead == "silent"), 100)
        began_ns = now_ns()
        before = {name: await client.metrics(name) for name in ("d0", "fails")}
        answered, failed = await asyncio.gather(
            client.decoded(prompt, 5, foreign), client.decoded(prompt, 5, foreign, "fails")
        )
        assert now_ns() - began_ns < 6e9
    assert answered.tokens == client.right(prompt, 5)
    assert failed.status == 500
    assert f"no connection to nobody-{dead}" in failed.error["message"]
    for name, recomputed in (("d0", 100), ("fails", 0)):
        assert await client.grown(
            name, before[name], "pdproof:loads_failed_total", "pdproof:recomputed_tokens_total"
        ) == [1, recomputed]  # fmt: skip
        (failures,) = await client.grown(name, before[name], "pdproof:handshakes_failed_total")
        assert failures >= 1, "there is something to report, so it is tried again"
    assert (await client.decoded(PROMPT, 5, good)).tokens == client.right(PROMPT, 5)


@pytest.mark.rule("KVC-HSK-003")
async def test_another_engine_at_the_address_is_recognised(client: Client) -> None:
    prompt = prompt_of(90, 100)
    good = await client.prefilled(prompt)
    foreign = {**good, "remote_engine_id": "p0-that-was-here-before"}
    assert (await client.decoded(prompt, 5, foreign)).tokens == client.right(prompt, 5)
    failed = await client.decoded(prompt, 5, foreign, "fails")
    assert failed.status == 500
    assert "restarted since the hand-off" in failed.error["message"]


@pytest.mark.rule("KVC-XFER-005")
async def test_deep_and_huge_json_is_refused(client: Client) -> None:
    start = b'{"prompt":[1,2,3],"max_tokens":5,"kv_transfer_params":'
    ids = b"[[" + b",".join(b"%d" % n for n in range(400_000)) + b"]]"
    good = json.dumps(await client.prefilled(PROMPT)).encode()
    bodies = {
        "deep list": start + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "deep object": start + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        "deep field": start + good[:-1] + b',"remote_host":' + b"[" * 50_000 + b"]" * 50_000 + b"}}",
        "many blocks": start + good[:-1] + b',"remote_block_ids":' + ids + b"}}",
        "long id": start + good[:-1] + b',"remote_engine_id":"' + b"x" * 4_000_000 + b'"}}',
        "cut short": start + good[:-10],
        "too large": start + b" " * (8 << 20) + b"null}",
    }
    for what, body in bodies.items():
        answer = await client.post("d0", body)
        assert 400 <= answer.status < 500, (what, answer.text[:200])
        assert len(answer.text) < 2000, what
        if what in ("many blocks", "long id"):
            assert answer.error["param"].startswith("kv_transfer_params"), (what, answer.text)


@pytest.mark.rule("KVC-XFER-005")
async def test_renewals_that_make_no_sense_are_refused(client: Client) -> None:
    good = await client.prefilled(PROMPT)
    for params, status in (({"do_remote_prefill": True}, 400), ([], 400), (None, 400), ({**good, "tp_size": 3}, 400),
                           (KEEP, 404), (good, 404)):  # fmt: skip
        answer = await client.post("p0", {"kv_transfer_params": params}, "/v1/kv/renew")
        assert answer.status == status, (params, answer.text)
    assert (await client.post("p0", b"{", "/v1/kv/renew")).status == 400
    assert (await client.decoded(PROMPT, 5, good)).tokens == client.right(PROMPT, 5)
