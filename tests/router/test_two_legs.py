"""A request in two legs, against fake prefill and decode workers: what each is sent, and every way it can go wrong."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from reference_impl.engine.registration import Registration
from reference_impl.event_log import EventLog
from reference_impl.router.protocol import HOLD_PATH, RENEW_PATH, TOKEN_HEADER, Register
from reference_impl.router.server import Router
from reference_impl.rules.routing import Role

TOKEN = "the deployment's secret"
BODY = {"prompt": [1, 2, 3], "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
EVENTS = b"data: 0\n\ndata: [DONE]\n\n"


class FakeWorker:
    """Keeps what it was sent, and answers as `ending` says: "right", "hang" (until `release`), "break" or a status."""

    def __init__(self, worker_id: str, role: Role) -> None:
        self.worker_id, self.role = worker_id, role
        self.engine_id = f"{worker_id}-e1"
        self.ending: str | int = "right"
        self.kv_engine_id = f"{self.engine_id}.5eed"
        self.params = {"do_remote_prefill": True, "remote_engine_id": self.kv_engine_id, "remote_block_ids": [[7]]}
        self.extra: dict[str, Any] = {"kv_transfer_params": self.params}
        self.got: list[tuple[str, dict[str, Any]]] = []
        self.arrived = asyncio.Event()
        self.release = asyncio.Event()
        self.abandoned = asyncio.Event()
        self.registration: Registration | None = None
        app = web.Application()
        app.add_routes([web.post("/{path:.*}", self._answer), web.get("/v1/models", self._models)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        self.url = ""

    async def start(self, router: str) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self.registration = Registration(router, TOKEN)
        await self.registration.register(
            Register(self.worker_id, self.engine_id, self.url, 1, self.role, self.kv_engine_id)
        )

    async def leave(self) -> None:
        if self.registration is not None:
            await self.registration.close()

    async def close_port(self) -> None:
        await self._runner.cleanup()

    async def stop(self) -> None:
        self.release.set()
        await self.leave()
        await self.close_port()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.got.append((request.path, json.loads(await request.read())))
        self.arrived.set()
        if self.ending == "hang":
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.abandoned.set()
                raise
        if self.ending == "break":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        headers = {"x-pdproof-worker": self.worker_id, "x-pdproof-engine": self.engine_id}
        if isinstance(self.ending, int):
            error = {"error": {"message": f"{self.worker_id} says no", "param": "prompt"}}
            return web.json_response(error, status=self.ending, headers=headers)
        if self.role is Role.PREFILL:
            return web.json_response({"choices": []} | self.extra, headers=headers)
        return web.Response(body=EVENTS, headers=headers | {"Content-Type": "text/event-stream"})

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [self.worker_id]})


class Split:
    """A router and the workers that a test starts."""

    def __init__(self) -> None:
        self._runner = web.AppRunner(
            Router(TOKEN, EventLog(None, "router")).app, handler_cancellation=True, shutdown_timeout=0.1
        )
        self.session = aiohttp.ClientSession()
        self.workers: list[FakeWorker] = []
        self.url = ""

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        for worker in self.workers:
            await worker.stop()
        await self.session.close()
        await self._runner.cleanup()

    async def worker(self, worker_id: str) -> FakeWorker:
        role = {"p": Role.PREFILL, "d": Role.DECODE, "w": Role.BOTH}[worker_id[0]]
        worker = FakeWorker(worker_id, role)
        self.workers.append(worker)
        await worker.start(self.url)
        return worker

    async def pair(self) -> tuple[FakeWorker, FakeWorker]:
        return await self.worker("p0"), await self.worker("d0")

    async def ask(self, body: object = BODY, path: str = "/v1/completions") -> tuple[int, bytes, dict[str, str]]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=raw) as response:
            return response.status, await response.read(), dict(response.headers)

    async def hold(self, order: object, token: str = TOKEN) -> tuple[int, dict[str, Any]]:
        async with self.session.post(self.url + HOLD_PATH, json=order, headers={TOKEN_HEADER: token}) as response:
            return response.status, await response.json()

    async def held(self) -> dict[str, Any]:
        async with self.session.get(self.url + HOLD_PATH) as response:
            report: dict[str, Any] = await response.json()
            return report

    async def metric(self, name: str) -> float:
        async with self.session.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(name + " ")))


@pytest_asyncio.fixture
async def split() -> AsyncIterator[Split]:
    running = Split()
    await running.start()
    yield running
    await running.stop()


async def test_a_request_is_prefilled_by_one_and_decoded_by_another(split: Split) -> None:
    prefill, decode = await split.pair()
    status, body, headers = await split.ask()
    assert (status, body) == (200, EVENTS)
    ((path, first),) = prefill.got
    assert path == "/v1/completions"
    assert (first["prompt"], first["max_tokens"], first["stream"]) == ([1, 2, 3], 1, False)
    assert "stream_options" not in first
    assert first["kv_transfer_params"] == {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
        "remote_host": None, "remote_port": None,
    }  # fmt: skip
    assert decode.got == [(path, BODY | {"kv_transfer_params": prefill.params})]
    assert (headers["x-pdproof-worker"], headers["x-pdproof-engine"]) == ("d0", "d0-e1")
    assert headers["x-pdproof-prefill-worker"] == "p0/p0-e1"
    assert await split.metric("pdproof:router_handoffs_total") == 1


async def test_each_part_goes_round(split: Split) -> None:
    for worker in ("p0", "p1", "d0", "d1", "d2"):
        await split.worker(worker)
    pairs = Counter()
    for _ in range(6):
        _, _, headers = await split.ask()
        pairs[headers["x-pdproof-prefill-worker"][:2]] += 1
        pairs[headers["x-pdproof-worker"]] += 1
    assert pairs == {"p0": 3, "p1": 3, "d0": 2, "d1": 2, "d2": 2}


async def test_chat_goes_the_same_way(split: Split) -> None:
    prefill, decode = await split.pair()
    await split.ask({"messages": []}, "/v1/chat/completions")
    assert prefill.got[0][0] == decode.got[0][0] == "/v1/chat/completions"


async def test_workers_that_do_both_are_asked_once_and_with_the_clients_own_body(split: Split) -> None:
    worker = await split.worker("w0")
    raw = b'{"prompt": [1], "kv_transfer_params": 5}'
    _, _, headers = await split.ask(raw)
    assert worker.got == [("/v1/completions", json.loads(raw))]
    assert "x-pdproof-prefill-worker" not in headers


async def test_the_models_are_asked_of_a_decode_worker(split: Split) -> None:
    await split.pair()
    async with split.session.get(split.url + "/v1/models") as response:
        assert await response.json() == {"data": ["d0"]}


async def test_the_last_turns_hand_off_goes_to_the_prefill_side_only(split: Split) -> None:
    prefill, decode = await split.pair()
    turn = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "d0-e1",
        "remote_block_ids": [[4]],
    }
    await split.ask(BODY | {"kv_transfer_params": turn})
    params = prefill.got[0][1]["kv_transfer_params"]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, True)
    assert (params["remote_engine_id"], params["remote_block_ids"]) == ("d0-e1", [[4]])
    assert decode.got[0][1]["kv_transfer_params"] == prefill.params


@pytest.mark.parametrize("extra", [{}, {"kv_transfer_params": None}])
async def test_without_a_hand_off_the_decode_worker_computes_all_itself(split: Split, extra: dict[str, Any]) -> None:
    prefill, decode = await split.pair()
    prefill.extra = extra
    status, _, headers = await split.ask(BODY | {"kv_transfer_params": {"remote_engine_id": "d0-e1"}})
    assert status == 200
    assert decode.got == [("/v1/completions", BODY)]
    assert headers["x-pdproof-prefill-worker"] == "p0/p0-e1"
    assert await split.metric("pdproof:router_handoffs_total") == 0


@pytest.mark.parametrize(("present", "missing"), [("p0", "decode"), ("d0", "prefill")])
async def test_where_one_part_has_nobody_the_answer_is_503_and_nobody_is_asked(
    split: Split, present: str, missing: str
) -> None:
    worker = await split.worker(present)
    status, body, headers = await split.ask()
    assert (status, headers["Retry-After"]) == (503, "1")
    assert f"no {missing} worker".encode() in body
    assert worker.got == []


async def test_the_prefill_sides_refusal_is_passed_on_as_it_is(split: Split) -> None:
    prefill, decode = await split.pair()
    prefill.ending = 422
    status, body, headers = await split.ask()
    assert (status, json.loads(body)["error"]["param"]) == (422, "prompt")
    assert headers["x-pdproof-prefill-worker"] == "p0/p0-e1"
    assert decode.got == []


@pytest.mark.rule("KVC-ROUT-002")
@pytest.mark.parametrize("ending", ["break", 500, 503])
async def test_a_prefill_worker_that_fails_is_named(split: Split, ending: str | int) -> None:
    prefill, decode = await split.pair()
    prefill.ending = ending
    status, body, headers = await split.ask()
    assert status == 502
    assert b"prefill worker p0 failed" in body
    assert headers["x-pdproof-prefill-worker"] == "p0/p0-e1"
    assert "x-pdproof-worker" not in headers
    assert decode.got == []


async def test_a_prefill_worker_whose_port_is_closed_is_dropped(split: Split) -> None:
    prefill, decode = await split.pair()
    await prefill.close_port()
    assert (await split.ask())[0] == 502
    assert (await split.ask())[0] == 503
    assert decode.got == []


async def test_an_answer_of_the_prefill_side_that_is_none_is_its_failure(split: Split) -> None:
    await split.worker("p0")
    await split.worker("d0")
    split.workers[0].role = Role.DECODE  # answers the first leg with events
    status, body, _ = await split.ask()
    assert status == 502
    assert b"its answer is none" in body


async def test_a_decode_worker_that_cannot_be_connected_to_is_passed_over(split: Split) -> None:
    """Nothing was sent, so the same hand-off goes to the next one."""
    prefill, first = await split.pair()
    second = await split.worker("d1")
    await first.close_port()
    for _ in range(2):
        status, _, headers = await split.ask()
        assert (status, headers["x-pdproof-worker"]) == (200, "d1")
    assert len(prefill.got) == len(second.got) == 2
    assert second.got[0][1]["kv_transfer_params"] == prefill.params


async def test_it_is_passed_over_once_and_no_more(split: Split) -> None:
    await split.worker("p0")
    for worker in ("d0", "d1", "d2"):
        await (await split.worker(worker)).close_port()
    status, body, headers = await split.ask()
    assert status == 502
    assert b"decode worker" in body
    assert headers["x-pdproof-prefill-worker"] == "p0/p0-e1"
    assert await split.metric("pdproof:router_workers") == 2
    assert await split.metric("pdproof:router_handoffs_dropped_total") == 1


@pytest.mark.rule("KVC-ROUT-002")
async def test_a_decode_worker_that_fails_after_it_was_asked_is_named_and_nobody_else_asked(split: Split) -> None:
    """KVC-ROUT-002."""
    _, first = await split.pair()
    second = await split.worker("d1")
    first.ending = second.ending = "break"
    status, _, headers = await split.ask()
    assert status == 502
    assert headers["x-pdproof-worker"] in {"d0", "d1"}
    assert len(first.got) + len(second.got) == 1
    assert await split.metric("pdproof:router_handoffs_dropped_total") == 0  # it was handed on


async def test_the_decode_sides_refusal_is_passed_on_as_it_is(split: Split) -> None:
    _, decode = await split.pair()
    decode.ending = 400
    status, body, headers = await split.ask()
    assert (status, json.loads(body)["error"]["message"]) == (400, "d0 says no")
    assert headers["x-pdproof-prefill-worker"] == "p0/p0-e1"


@pytest.mark.parametrize(
    ("body", "param"),
    [(b"not json", None), (b"[]", None), (b'{"kv_transfer_params": 5}', "kv_transfer_params"), (b"\xff", None)],
)
async def test_a_body_that_cannot_be_split_is_refused_with_the_fields_name(
    split: Split, body: bytes, param: str | None
) -> None:
    """KVC-XFER-005."""
    prefill, _ = await split.pair()
    status, answer, _ = await split.ask(body)
    assert (status, json.loads(answer)["error"]["param"]) == (400, param)
    assert prefill.got == []
    assert (await split.ask())[0] == 200


@pytest.mark.parametrize("at", ["p0", "d0"])
async def test_a_client_that_goes_away_ends_the_leg_that_runs(split: Split, at: str) -> None:
    await split.pair()
    running = next(w for w in split.workers if w.worker_id == at)
    running.ending = "hang"
    asked = asyncio.create_task(split.ask())
    await asyncio.wait_for(running.arrived.wait(), 5)
    asked.cancel()
    await asyncio.wait_for(running.abandoned.wait(), 5)


# Holding hand-offs back (KVC-LEASE-011).


async def test_a_hand_off_is_held_as_long_and_as_often_as_ordered(split: Split) -> None:
    _, decode = await split.pair()
    status, report = await split.hold({"seconds": 0.2, "requests": 2})
    assert (status, report["requests_left"], report["held"]) == (200, 2, 0)
    for _ in range(3):
        assert (await split.ask())[0] == 200
    report = await split.held()
    assert (report["requests_left"], report["holding"], report["held"]) == (0, 0, 2)
    assert 0.2 <= report["held_s_min"] <= report["held_s_max"] < 2
    assert report["held_s"] == pytest.approx(report["held_s_min"] + report["held_s_max"])
    assert len(decode.got) == 3
    assert await split.metric("pdproof:router_handoffs_held_total") == 2
    assert await split.metric("pdproof:router_handoffs_held_seconds_total") == pytest.approx(report["held_s"])


async def test_a_client_that_goes_away_while_its_hand_off_is_held_is_counted(split: Split) -> None:
    _, decode = await split.pair()
    await split.hold({"seconds": 60, "requests": 1})
    asked = asyncio.create_task(split.ask())
    async with asyncio.timeout(5):
        while not (await split.held())["holding"]:
            assert not asked.done()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    async with asyncio.timeout(5):
        while (await split.held())["holding"]:
            pass
    assert await split.metric("pdproof:router_handoffs_dropped_total") == 1
    assert (await split.held())["held"] == 1
    assert decode.got == []


async def test_a_decode_side_that_goes_away_meanwhile_is_an_error_and_a_dropped_hand_off(split: Split) -> None:
    _, decode = await split.pair()
    await split.hold({"seconds": 0.5, "requests": 1})
    asked = asyncio.create_task(split.ask())
    async with asyncio.timeout(5):
        while not (await split.held())["holding"]:
            pass
    await decode.leave()
    status, body, _ = await asked
    assert status == 503
    assert b"no decode worker" in body
    assert await split.metric("pdproof:router_handoffs_dropped_total") == 1


async def test_a_new_order_takes_the_place_of_the_last(split: Split) -> None:
    await split.pair()
    await split.hold({"seconds": 60, "requests": 5})
    await split.hold({"seconds": 60, "requests": 0})
    assert (await asyncio.wait_for(split.ask(), 10))[0] == 200
    assert (await split.held())["held"] == 0


async def test_only_who_has_the_token_may_order_it(split: Split) -> None:
    status, _ = await split.hold({"seconds": 60, "requests": 5}, token="a guess")
    assert status == 403
    assert (await split.held())["requests_left"] == 0


@pytest.mark.parametrize(
    ("order", "word"),
    [
        ({"seconds": 0, "requests": 1}, "seconds"), ({"seconds": -1, "requests": 1}, "seconds"),
        ({"seconds": 1e9, "requests": 1}, "seconds"), ({"seconds": 1, "requests": -1}, "requests"),
        ({"seconds": "x", "requests": 1}, "seconds"), ({"seconds": 1}, "requests"), ([], "array"),
        ({"seconds": 1, "requests": 1, "other": 1}, "other"),
    ],
)  # fmt: skip
async def test_an_order_that_makes_no_sense_is_refused_by_its_field(split: Split, order: object, word: str) -> None:
    status, body = await split.hold(order)
    assert status == 400
    assert word in body["error"]["message"]
    assert (await split.held())["requests_left"] == 0


# Renewals of a session (KVC-CLK-007).


async def test_a_renewal_goes_to_the_engine_that_holds_the_blocks(split: Split) -> None:
    prefill, decode = await split.pair()
    body = {"kv_transfer_params": {"remote_engine_id": "d0-e1.5eed", "remote_request_id": "r"}}
    assert (await split.ask(body, RENEW_PATH))[0] == 200
    assert decode.got == [(RENEW_PATH, body)]
    assert prefill.got == []


async def test_a_renewal_at_an_engine_that_has_gone_is_404(split: Split) -> None:
    _, decode = await split.pair()
    await decode.leave()
    async with asyncio.timeout(5):
        while (await split.metric("pdproof:router_workers")) > 1:
            pass
    status, body, _ = await split.ask({"kv_transfer_params": {"remote_engine_id": "d0-e1.5eed"}}, RENEW_PATH)
    assert status == 404
    assert json.loads(body)["error"]["param"] == "kv_transfer_params"


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"kv_transfer_params": {"remote_engine_id": 5}}'])
async def test_a_renewal_that_names_nobody_is_400(split: Split, body: bytes) -> None:
    await split.pair()
    assert (await split.ask(body, RENEW_PATH))[0] == 400


async def test_health_tells_who_does_what(split: Split) -> None:
    await split.pair()
    async with split.session.get(split.url + "/health") as response:
        workers = (await response.json())["workers"]
    assert [(w["worker_id"], w["role"]) for w in workers] == [("d0", "decode"), ("p0", "prefill")]
