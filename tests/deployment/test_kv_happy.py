"""Prefill here, decode there, over real NIXL: the answers are the oracle's, and every counter counts once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from reference_impl import tokens
from reference_impl.rules.events import EventKind
from tests.deployment.split import KEEP, Split, prompt_of, split

pytestmark = [pytest.mark.nixl]

EXPOSED = {
    "pdproof:lease_blocks_held", "pdproof:leases_live", "vllm:nixl_num_kv_expired_reqs_total",
    "pdproof:leases_extended_total", "pdproof:leases_released_total", "pdproof:reads_after_expiry_total",
    "vllm:nixl_num_failed_transfers_total", "vllm:nixl_num_failed_notifications_total",
    "pdproof:heartbeats_sent_total", "pdproof:heartbeats_failed_total", "pdproof:notifications_malformed_total",
    "pdproof:handshakes_failed_total", "pdproof:recomputed_tokens_total", "vllm:kv_cache_usage_perc",
    "vllm:num_requests_waiting",
}  # fmt: skip
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 300, 1000, 2047, 4000]
FAULTLESS = ("vllm:nixl_num_kv_expired_reqs_total", "pdproof:reads_after_expiry_total", "pdproof:claims_refused_total",
             "vllm:nixl_num_failed_transfers_total", "vllm:nixl_num_failed_notifications_total",
             "pdproof:heartbeats_failed_total", "pdproof:handshakes_failed_total", "pdproof:loads_failed_total",
             "pdproof:notifications_malformed_total", "pdproof:recomputed_tokens_total")  # fmt: skip
WORKERS = ("p0", "p1", "d0", "d1")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    options = ["--prefill", "2", "--decode", "2", "--prefill-ranks", "2", "--decode-ranks", "2"]
    with split(tmp_path_factory.mktemp("happy"), *options, "--kv-lease-duration", "6", profile="tiny") as found:
        yield found


@pytest.mark.rule("KVC-XFER-001", "KVC-LEASE-001", "KVC-REL-001")
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_answers_are_the_oracles_whatever_the_length(served: Split, streamed: bool) -> None:
    """All at once, over two prefill and two decode engines in turn."""
    async with served.client() as client:
        prompts = [prompt_of(length + 5000 * streamed, length) for length in LENGTHS]
        usage = {"stream_options": {"include_usage": True}} if streamed else {}
        answers = await asyncio.gather(*(client.complete(p, 20, stream=streamed, **usage) for p in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == client.right(prompt, 20), len(prompt)
            assert bool(answer.events) is streamed
        assert {a.headers["x-pdproof-worker"] for a in answers} == {"d0", "d1"}
        assert {a.headers["x-pdproof-prefill-worker"].partition("/")[0] for a in answers} == {"p0", "p1"}
        await client.until_free(*WORKERS)


@pytest.mark.rule("KVC-XFER-001")
async def test_chat_is_answered_over_two_legs(served: Split) -> None:
    async with served.client() as client:
        text = " ".join(["what", "a", "day"] * 40)
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "return_token_ids": True}
        prompt = tokens.encode(f"<user> {text}")
        whole = await client.post("", body, "/v1/chat/completions")
        assert whole.body["choices"][0]["message"]["content"] == tokens.decode(client.right(prompt, 12))
        streamed = await client.post("", body | {"stream": True}, "/v1/chat/completions")
        said = "".join(event["choices"][0]["delta"]["content"] for event in streamed.events)
        assert said == tokens.decode(client.right(prompt, 12))
        await client.until_free(*WORKERS)


@pytest.mark.rule("KVC-LEASE-001")
async def test_the_hand_off_is_complete(served: Split) -> None:
    async with served.client() as client:
        prompt = prompt_of(21, 100)
        params = await client.prefilled(prompt)
        assert params.keys() == {
            "do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_request_id", "remote_block_ids",
            "remote_host", "remote_port", "tp_size", "remote_num_tokens", "remote_blocks_expiry_time", "transfer_mode",
        }  # fmt: skip
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        assert (len(params["remote_block_ids"]), len(params["remote_block_ids"][0])) == (1, 7)
        assert (params["tp_size"], params["remote_num_tokens"]) == (2, 100)
        granted = served.event_of(EventKind.LEASE_GRANTED, params["remote_request_id"])
        assert (granted.detail["blocks"], granted.detail["duration_s"]) == (7, 6.0)
        held = await client.metrics("p0")
        assert (held["pdproof:leases_live"], held["pdproof:lease_blocks_held"]) == (1, 7)
        assert (await client.decoded(prompt, 4, params)).tokens == client.right(prompt, 4)
        await client.until_free("p0", timeout_s=2)
        assert served.event_of(EventKind.LEASE_RELEASED, params["remote_request_id"]).detail["how"] == "read"


@pytest.mark.rule("KVC-LEASE-002")
async def test_a_prefill_that_nobody_is_to_read_gets_no_hand_off(served: Split) -> None:
    async with served.client() as client:
        prompt = prompt_of(22, 100)
        before = await client.metrics("p0")
        for params in (None, {}, {"do_remote_decode": False}):
            answer = await client.complete(prompt, 1, worker_id="p0", params=params)
            assert answer.tokens == client.right(prompt, 1)
            assert "kv_transfer_params" not in answer.body
        await client.until_free("p0", timeout_s=2)
        assert await client.grown("p0", before, "pdproof:leases_granted_total") == [0]


async def test_the_same_prompt_again_is_found_on_the_prefill_side(served: Split) -> None:
    async with served.client() as client:
        prompt = prompt_of(23, 330)
        for number, cached in enumerate([0, 320]):
            answer = await client.complete(prompt, 1, worker_id="p0", params=KEEP)
            assert answer.cached_tokens == cached
            decoded = await client.decoded(prompt, 8, answer.params, f"d{number}")
            assert decoded.tokens == client.right(prompt, 8)
            assert decoded.cached_tokens == 0, "loaded from a peer, not found here"
        await client.until_free(*WORKERS)


@pytest.mark.rule("KVC-REL-003")
async def test_a_full_hit_on_the_decode_side_tells_the_holder_and_reads_nothing(served: Split) -> None:
    async with served.client() as client:
        prompt = prompt_of(24, 330)
        assert (await client.decoded(prompt, 8, await client.prefilled(prompt), "d0")).tokens == client.right(prompt, 8)
        before = await client.metrics("d0")
        params = await client.prefilled(prompt)
        answer = await client.decoded(prompt, 8, params, "d0")
        assert answer.tokens == client.right(prompt, 8)
        assert answer.cached_tokens == 320
        assert await client.grown("d0", before, "pdproof:loads_done_total", "pdproof:loads_failed_total") == [0, 0]
        await client.until_free("p0", timeout_s=2)
        assert served.event_of(EventKind.LEASE_RELEASED, params["remote_request_id"]).detail["how"] == "hit"


@pytest.mark.rule("KVC-XFER-001")
async def test_of_a_prefix_that_is_here_only_the_rest_is_read(served: Split) -> None:
    async with served.client() as client:
        short, long = prompt_of(25, 160), prompt_of(25, 490)
        await client.decoded(short, 4, await client.prefilled(short), "d1")
        params = await client.prefilled(long)
        answer = await client.decoded(long, 8, params, "d1")
        assert answer.tokens == client.right(long, 8)
        assert answer.cached_tokens == 160
        loads = [(e.detail["remote_request_id"], e.detail["blocks"]) for e in served.events(EventKind.LOAD_DONE)]
        assert loads[-1] == (params["remote_request_id"], 31 - 10)
        await client.until_free(*WORKERS)


@pytest.mark.rule("KVC-REL-005")
async def test_two_readers_of_one_prefill_are_both_waited_for(served: Split) -> None:
    async with served.client() as client:
        prompt = prompt_of(26, 200)
        params = await client.prefilled(prompt, remote_readers=2)
        assert (await client.decoded(prompt, 8, params, "d0")).tokens == client.right(prompt, 8)
        assert (await client.metrics("p0"))["pdproof:leases_live"] == 1
        assert (await client.decoded(prompt, 8, params, "d1")).tokens == client.right(prompt, 8)
        await client.until_free("p0", timeout_s=2)


@pytest.mark.rule("KVC-OBS-001")
async def test_each_event_counts_once_whatever_the_ranks(served: Split) -> None:
    async with served.client() as client:
        before = {worker: await client.metrics(worker) for worker in ("p1", "d1")}
        assert before["p1"].keys() >= EXPOSED
        assert before["d1"].keys() >= EXPOSED
        prompts = [prompt_of(30 + n, 200) for n in range(6)]
        for prompt in prompts:
            await client.decoded(prompt, 4, await client.prefilled(prompt, "p1"), "d1")
        await client.until_free("p1", "d1")
        holder = ("pdproof:leases_granted_total", "pdproof:leases_released_total")
        assert await client.grown("p1", before["p1"], *holder) == [6, 6]
        reader = ("pdproof:loads_done_total", "pdproof:loads_failed_total", "vllm:request_success_total")
        assert await client.grown("d1", before["d1"], *reader) == [6, 0, 6]


@pytest.mark.rule("KVC-OBS-002")
async def test_without_faults_nothing_expires_and_nothing_fails(served: Split) -> None:
    """After everything above, in the same engines."""
    async with served.client() as client:
        await asyncio.gather(*(client.assert_serves(100 + n, 500) for n in range(12)))
        await client.until_free(*WORKERS)
        for worker in WORKERS:
            metrics = await client.metrics(worker)
            assert {name: metrics[name] for name in FAULTLESS if metrics[name]} == {}, worker
        assert served.events(EventKind.LEASE_EXPIRED, EventKind.CLAIM_REFUSED, EventKind.LOAD_FAILED) == []


@pytest.mark.slow
@pytest.mark.rule("KVC-XFER-001", "KVC-HB-007", "KVC-OBS-001")
@pytest.mark.parametrize(("prefill", "decode"), [(4, 1), (1, 4)])
async def test_unequal_numbers_of_ranks(tmp_path: Path, prefill: int, decode: int) -> None:
    options = ["--prefill", "1", "--decode", "1", "--decode-slots", "1", "--kv-lease-duration", "1.5"]
    ranks = ["--prefill-ranks", str(prefill), "--decode-ranks", str(decode)]
    with split(tmp_path, *options, *ranks, profile="tiny") as found:
        async with found.client() as client:
            prompts = [prompt_of(n, 20 + 300 * n) for n in range(7)]
            # One at a time fits, each takes a quarter of a second: the last ones wait for more than a lease length.
            answers = await asyncio.gather(*(client.complete(p, 200) for p in prompts))
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.tokens == client.right(prompt, 200)
            await client.until_free("p0", "d0")
            metrics = await client.metrics("p0")
            counted = {
                name: metrics[f"pdproof:{name}_total"] for name in ("leases_granted", "leases_released", "loads_done")
            }
            assert counted == {"leases_granted": 7, "leases_released": 7, "loads_done": 0}
            assert (await client.metrics("d0"))["pdproof:loads_done_total"] == 7
            assert metrics["vllm:nixl_num_kv_expired_reqs_total"] == 0
            assert metrics["pdproof:leases_extended_total"] > 0, "nobody waited"
