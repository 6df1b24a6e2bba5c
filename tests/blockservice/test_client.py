"""The client's attempts: how many, after what pauses, for which errors, as which operation; what may be concluded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from prometheus_client.parser import text_string_to_metric_families

from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice.calls import METHODS, POOL_EXHAUSTED
from reference_impl.blockservice.client import BlockClient, BreakerLimits, Credentials, Result
from reference_impl.blockservice.client_metrics import ClientMetrics
from reference_impl.blockservice.credentials import DEPLOYMENT, credential
from reference_impl.blockservice.failpoints import FailPoints
from reference_impl.blockservice.pool import Connection
from reference_impl.blockservice.rpc_log import Line
from reference_impl.realclock import wall_ns
from reference_impl.rules.blockgroups import Refusal
from reference_impl.rules.clock import NS_PER_MS
from reference_impl.rules.operations import NOT_KEPT
from reference_impl.rules.retries import RetryBudget, RetryPolicy
from tests.blockservice import server_kit
from tests.blockservice.client_kit import (
    HOST,
    ME,
    UNAVAILABLE,
    Context,
    Script,
    ScriptedServer,
    Seen,
    answer,
    calling,
    each,
    fail,
    never,
    pair,
    refuse,
    serving,
)
from tests.waiting import until_async

NEVER_OPEN = BreakerLimits(failures=1_000_000)
RETRIED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # chosen by the server: some call of its own took too long
)
NOT_RETRIED = tuple(code for code in grpc.StatusCode if code not in (*RETRIED, grpc.StatusCode.OK))


async def reserve(client: BlockClient, operation_id: str = "op-1", timeout_s: float = 5.0) -> Result:
    return await client.reserve(
        "bg_1", 7, 1, operation_id=operation_id, issued_ms=1_700_000_000_000, timeout_s=timeout_s
    )


class Pauses:
    """Takes the place of sleeping."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


class Unbounded(RetryBudget):
    """A twin: retries are paid for by nothing."""

    @property
    def may_retry(self) -> bool:
        return True


class RetriesAnything(BlockClient):
    """A twin: whatever failed is tried again."""

    @staticmethod
    def _may_be_retried(error: BaseException) -> bool:
        return isinstance(error, grpc.aio.AioRpcError)


class RenamesOperations(BlockClient):
    """A twin: every attempt is an operation of its own."""

    async def _send(self, call: Any, connection: Connection) -> Message:
        call.request.operation.operation_id += "+"
        return await super()._send(call, connection)


class ReissuesOperations(BlockClient):
    """A twin: every attempt says that its operation was made just now."""

    async def _send(self, call: Any, connection: Connection) -> Message:
        call.request.operation.issued_ms += 1
        return await super()._send(call, connection)


# --- how many attempts, and when


@pytest.mark.rule("KVC-IDEM-013")
@pytest.mark.parametrize("attempts_max", [1, 2, 4, 7])
async def test_a_call_is_tried_at_most_so_often(attempts_max: int) -> None:
    pauses = Pauses()
    policy = RetryPolicy(attempts_max=attempts_max)
    options = {"policy": policy, "sleep": pauses, "budget": RetryBudget(100), "breaker": NEVER_OPEN}
    async with pair(UNAVAILABLE, **options) as (server, client):
        result = await reserve(client)
    assert (result.outcome, result.error_code, result.attempts) == ("unknown", "UNAVAILABLE", attempts_max)
    assert [seen.attempt for seen in server.seen] == list(range(1, attempts_max + 1))
    assert len(pauses.seconds) == attempts_max - 1


@pytest.mark.rule("KVC-IDEM-013")
@pytest.mark.parametrize("draw", [0.0, 0.25, 0.5, 0.999])
async def test_pauses_double_and_are_jittered(draw: float) -> None:
    pauses = Pauses()
    async with pair(UNAVAILABLE, sleep=pauses, draw=lambda: draw) as (_, client):
        await reserve(client)
    factor = 0.8 + 0.4 * draw
    assert pauses.seconds == pytest.approx([0.01 * factor, 0.02 * factor, 0.04 * factor])


@pytest.mark.rule("KVC-IDEM-013")
async def test_pauses_are_really_made() -> None:
    policy = RetryPolicy(initial_s=0.05)
    async with pair(UNAVAILABLE, policy=policy) as (server, client):
        await reserve(client)
    gaps_s = [(b.at_ns - a.at_ns) / 1e9 for a, b in zip(server.seen, server.seen[1:], strict=False)]
    assert all(gap >= pause for gap, pause in zip(gaps_s, (0.05, 0.1, 0.2), strict=True))


@pytest.mark.rule("KVC-IDEM-013")
async def test_clients_draw_their_jitter_themselves() -> None:
    async with serving(UNAVAILABLE) as server:
        drawn = []
        for _ in range(4):
            pauses = Pauses()
            client = BlockClient(server.target, ME, sleep=pauses)
            await reserve(client)
            await client.close()
            drawn.append(tuple(pauses.seconds))
    assert len(set(drawn)) == 4


async def check_codes(make: type[BlockClient], codes: tuple[grpc.StatusCode, ...], attempts: int) -> None:
    """Fail unless each of `codes` leads to so many attempts."""
    pauses = Pauses()
    async with pair(answer(), make=make, sleep=pauses, budget=Unbounded(), breaker=NEVER_OPEN) as (server, client):
        for code in codes:
            server.seen.clear()
            server.script = fail(code, field="epoch")
            result = await reserve(client)
            assert (len(server.seen), result.attempts) == (attempts, attempts), code.name
            assert (result.error_code, result.message, result.field) == (code.name, "as told", "epoch")


@pytest.mark.rule("KVC-IDEM-013")
async def test_only_errors_that_may_pass_are_tried_again() -> None:
    await check_codes(BlockClient, RETRIED, 4)
    await check_codes(BlockClient, NOT_RETRIED, 1)


@pytest.mark.rule("KVC-IDEM-013")
async def test_a_client_that_retries_anything_is_caught() -> None:
    with pytest.raises(AssertionError, match="INVALID_ARGUMENT"):
        await check_codes(RetriesAnything, (grpc.StatusCode.INVALID_ARGUMENT,), 1)


async def check_same_operation(make: type[BlockClient]) -> None:
    """Fail unless every attempt of a call carries the same request under the next number."""
    async with pair(each(UNAVAILABLE, UNAVAILABLE, answer()), make=make) as (server, client):
        result = await reserve(client)
    assert (result.outcome, result.attempts) == ("ok", 3)
    assert [seen.attempt for seen in server.seen] == [1, 2, 3]
    assert {seen.operation_id for seen in server.seen} == {"op-1"}
    assert len({seen.request.SerializeToString(deterministic=True) for seen in server.seen}) == 1
    assert len({seen.request_id for seen in server.seen}) == 1


@pytest.mark.rule("KVC-IDEM-013")
async def test_every_attempt_carries_the_same_operation() -> None:
    await check_same_operation(BlockClient)


@pytest.mark.parametrize("twin", [RenamesOperations, ReissuesOperations])
async def test_a_client_that_renames_or_reissues_operations_is_caught(twin: type[BlockClient]) -> None:
    with pytest.raises(AssertionError):
        await check_same_operation(twin)


async def test_an_operation_is_made_before_its_first_attempt() -> None:
    async with pair(each(UNAVAILABLE, answer())) as (server, client):
        await client.evict("bg_1", 7, operation_id="op-1", timeout_s=5)
    first, second = (seen.request.operation.issued_ms for seen in server.seen)
    assert first == second > 1_700_000_000_000


# --- the budget


async def amplification(budget: RetryBudget, calls: int = 40) -> float:
    """Return attempts a call at a server that answers none."""
    options = {"budget": budget, "sleep": Pauses(), "breaker": NEVER_OPEN}
    async with pair(UNAVAILABLE, **options) as (server, client):
        for n in range(calls):
            await reserve(client, f"op-{n}")
        return len(server.seen) / calls


@pytest.mark.rule("KVC-IDEM-013")
async def test_once_the_budget_is_spent_no_retries_leave() -> None:
    assert await amplification(RetryBudget()) == 1 + 3 / 40  # 9, 8, 7 of ten tokens are left; then 6, 5: enough


@pytest.mark.rule("KVC-IDEM-013")
async def test_without_a_budget_every_call_is_tried_to_the_last() -> None:
    assert await amplification(Unbounded()) == 4


@pytest.mark.rule("KVC-IDEM-013")
async def test_successes_earn_retries_back() -> None:
    budget = RetryBudget(tokens_max=2, token_ratio=0.5)
    async with pair(UNAVAILABLE, budget=budget, sleep=Pauses(), breaker=NEVER_OPEN) as (server, client):
        await reserve(client)
        assert (budget.tokens, (await reserve(client)).attempts) == (1.0, 1)
        server.script = answer()
        for _ in range(4):
            await reserve(client)
        server.script = each(UNAVAILABLE, answer())
        await reserve(client)  # its failure leaves one token of two: not more than half
        server.script = answer()
        for _ in range(2):
            await reserve(client)
        assert budget.tokens == 2
    budget = RetryBudget(tokens_max=4)
    async with pair(each(UNAVAILABLE, answer()), budget=budget) as (_, client):
        assert (await reserve(client)).attempts == 2
        assert budget.tokens == pytest.approx(3.1)


async def test_only_what_may_be_retried_costs_a_token() -> None:
    budget = RetryBudget()
    async with pair(fail(grpc.StatusCode.NOT_FOUND), budget=budget) as (_, client):
        await client.get_metadata("bg_1", timeout_s=5)
    assert budget.tokens == 10


# --- what may be concluded

INVALID, UNKNOWN_WHO, NOT_FOUND = (
    fail(grpc.StatusCode.INVALID_ARGUMENT),
    fail(grpc.StatusCode.UNAUTHENTICATED),
    fail(grpc.StatusCode.NOT_FOUND),
)
OUTCOMES: dict[str, tuple[Script, str, str, int]] = {
    "applied": (answer(), "ok", "", 1),
    "replayed": (answer(pb.Answer(disposition=pb.REPLAYED, replayed=True)), "ok", "", 1),
    "applied at the second attempt": (each(UNAVAILABLE, answer()), "ok", "", 2),
    "refused": (refuse("STALE_EPOCH"), "fail", "STALE_EPOCH", 1),
    "refused at the second attempt": (each(UNAVAILABLE, refuse("PINNED")), "fail", "PINNED", 2),
    "another operation has its id": (refuse("ID_REUSED"), "fail", "ID_REUSED", 1),
    "another operation has its id at its retry": (each(UNAVAILABLE, refuse("ID_REUSED")), "unknown", "ID_REUSED", 2),
    "too old to begin with": (refuse("ID_EXPIRED"), "fail", "ID_EXPIRED", 1),
    "too old by the time of its retry": (each(UNAVAILABLE, refuse("ID_EXPIRED")), "unknown", "ID_EXPIRED", 2),
    "from the future at its retry": (each(UNAVAILABLE, refuse("FROM_THE_FUTURE")), "unknown", "FROM_THE_FUTURE", 2),
    "in progress": (answer(pb.Answer(disposition=pb.IN_PROGRESS)), "unknown", "IN_PROGRESS", 1),
    "an answer that says nothing": (answer(pb.Answer()), "unknown", "BAD_REPLY", 1),
    "malformed": (INVALID, "fail", "INVALID_ARGUMENT", 1),
    "nobody we know": (UNKNOWN_WHO, "fail", "UNAUTHENTICATED", 1),
    "not there": (NOT_FOUND, "fail", "NOT_FOUND", 1),
    "malformed, after an attempt that may have run": (each(UNAVAILABLE, INVALID), "unknown", "INVALID_ARGUMENT", 2),
    "not answered": (never(), "unknown", "DEADLINE_EXCEEDED", 2),
    "lost": (UNAVAILABLE, "unknown", "UNAVAILABLE", 2),
    "too much": (fail(grpc.StatusCode.RESOURCE_EXHAUSTED), "unknown", "RESOURCE_EXHAUSTED", 2),
    "broken": (fail(grpc.StatusCode.INTERNAL), "unknown", "INTERNAL", 1),
    "cancelled by the server": (fail(grpc.StatusCode.CANCELLED), "unknown", "CANCELLED", 1),
}


def test_the_contract_names_the_refusals_that_are_not_kept() -> None:
    said = (Path(pb.__file__).parent / "blocks.proto").read_text()
    head, answers = said.partition("\nservice BlockGroups")[0], said.partition("enum Disposition")[2].partition("}")[0]
    for part in (head, answers):
        assert {refusal for refusal in Refusal if refusal and refusal in part} == NOT_KEPT


@pytest.mark.parametrize("name", OUTCOMES)
async def test_a_caller_may_conclude_this(name: str) -> None:
    script, outcome, code, attempts = OUTCOMES[name]
    async with pair(script, policy=RetryPolicy(attempts_max=2, attempt_timeout_s=0.1)) as (_, client):
        result = await reserve(client)
    assert (result.outcome, result.error_code, result.attempts) == (outcome, code, attempts)
    assert (result.reply is not None) == (code == "" or code not in grpc.StatusCode.__members__)


async def test_an_attempt_that_the_server_cancels_at_its_deadline_has_timed_out() -> None:
    """Both ends have a timer, and the server's may be a moment earlier: it is no reason to give up."""

    async def script(seen: Seen, context: Context) -> Message:
        await asyncio.sleep(max(0.0, context.time_remaining() - 0.005))
        return await fail(grpc.StatusCode.CANCELLED)(seen, context)

    async with pair(each(script, answer()), policy=RetryPolicy(attempt_timeout_s=0.1)) as (_, client):
        result = await reserve(client)
    assert (result.outcome, result.attempts, result.timeouts) == ("ok", 2, 1)


async def test_a_read_is_ok_once_it_is_answered() -> None:
    async with pair(answer(pb.Metadata(block_group_id="bg_1", epoch=3))) as (_, client):
        result = await client.get_metadata("bg_1", timeout_s=5)
    assert result.outcome == "ok"
    assert result.reply == pb.Metadata(block_group_id="bg_1", epoch=3)


async def test_a_server_that_is_not_there_leaves_the_outcome_unknown() -> None:
    async with serving(answer()) as server:
        target = server.target
    async with calling(target) as client:
        result = await reserve(client)
    assert (result.outcome, result.error_code, result.attempts) == ("unknown", "UNAVAILABLE", 4)


async def test_a_full_pool_fails_a_call_that_never_left() -> None:
    async with pair(never(), connections=1, calls_per_connection=1) as (server, client):
        busy = asyncio.create_task(reserve(client, "op-1"))
        await until_async(lambda: server.seen, 5, "the first call has arrived")
        result = await reserve(client, "op-2", timeout_s=0.05)
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
    assert (result.outcome, result.error_code, result.attempts) == ("fail", POOL_EXHAUSTED, 0)
    assert result.waited_ms >= 50
    assert [seen.operation_id for seen in server.seen] == ["op-1"]


# --- every method


CALLS: dict[str, tuple[Callable[[BlockClient], Any], Message]] = {
    "Reserve": (
        lambda c: c.reserve("g", 2, 3, operation_id="o", issued_ms=1, timeout_s=5),
        pb.ReserveRequest(operation=pb.Operation(operation_id="o", issued_ms=1), block_group_id="g", epoch=2, slots=3),
    ),
    "Pin": (
        lambda c: c.pin("g", 2, "r", operation_id="o", issued_ms=1, timeout_s=5),
        pb.PinRequest(
            operation=pb.Operation(operation_id="o", issued_ms=1), block_group_id="g", epoch=2, request_id="r"
        ),
    ),
    "Unpin": (
        lambda c: c.unpin("g", 2, "r", operation_id="o", issued_ms=1, timeout_s=5),
        pb.PinRequest(
            operation=pb.Operation(operation_id="o", issued_ms=1), block_group_id="g", epoch=2, request_id="r"
        ),
    ),
    "Evict": (
        lambda c: c.evict("g", 2, operation_id="o", issued_ms=1, timeout_s=5),
        pb.EvictRequest(operation=pb.Operation(operation_id="o", issued_ms=1), block_group_id="g", epoch=2),
    ),
    "PrepareGet": (
        lambda c: c.prepare_get("g", 2, "r", operation_id="o", issued_ms=1, timeout_s=5),
        pb.PrepareGetRequest(
            operation=pb.Operation(operation_id="o", issued_ms=1), block_group_id="g", epoch=2, request_id="r"
        ),
    ),
    "StartMigrate": (
        lambda c: c.start_migrate("g", 2, "a", "b", operation_id="o", issued_ms=1, timeout_s=5),
        pb.StartMigrateRequest(
            operation=pb.Operation(operation_id="o", issued_ms=1), block_group_id="g", epoch=2, src="a", dst="b"
        ),
    ),
    "CancelMigrate": (
        lambda c: c.cancel_migrate("g", 2, "m", operation_id="o", issued_ms=1, timeout_s=5),
        pb.CancelMigrateRequest(
            operation=pb.Operation(operation_id="o", issued_ms=1), block_group_id="g", epoch=2, migration_id="m"
        ),
    ),
    "GetMetadata": (lambda c: c.get_metadata("g", timeout_s=5), pb.GetMetadataRequest(block_group_id="g")),
    "ListGroups": (
        lambda c: c.list_groups(state="RESIDENT", limit=2, after="f", timeout_s=5),
        pb.ListGroupsRequest(state="RESIDENT", limit=2, after="f"),
    ),
    "GetMigrateStatus": (
        lambda c: c.get_migrate_status("o", issued_ms=1, timeout_s=5),
        pb.GetOperationRequest(operation=pb.Operation(operation_id="o", issued_ms=1)),
    ),
    "GetOperation": (
        lambda c: c.get_operation("o", issued_ms=1, timeout_s=5),
        pb.GetOperationRequest(operation=pb.Operation(operation_id="o", issued_ms=1)),
    ),
}


async def test_every_method_of_the_service_sends_what_it_is_given() -> None:
    methods = pb.DESCRIPTOR.services_by_name["BlockGroups"].methods_by_name
    assert set(CALLS) == set(methods)
    async with pair(answer()) as (server, client):
        for name, (call, request) in CALLS.items():
            server.script = answer(
                METHODS[name].reply() if METHODS[name].reply is not pb.Answer else pb.Answer(disposition=pb.APPLIED)
            )
            assert (await call(client)).outcome == "ok"
            assert (server.seen[-1].method, server.seen[-1].request) == (name, request)


async def test_services_between_nodes_are_called_by_name() -> None:
    async with pair(answer(pb.Accepted(copy=pb.Accepted.COPIED))) as (server, client):
        result = await client.call("Settle", pb.SettleRequest(operation_id="o", tenant="t"), timeout_s=5)
    assert (result.outcome, server.seen[0].method) == ("ok", "Settle")


async def test_a_call_carries_its_tenant_and_credential() -> None:
    sent: dict[str, Any] = {}

    async def script(seen: Seen, context: Context) -> Message:
        sent.update(dict(context.invocation_metadata() or ()))
        return await answer()(seen, context)

    async with pair(script) as (_, client):
        await client.pin("bg_1", 7, "request-9", operation_id="op-1", timeout_s=5)
    assert sent["x-pdproof-tenant"] == "tenant-a"
    assert sent["authorization"] == "Bearer " + "a" * 64
    assert (sent["x-pdproof-request-id"], sent["x-pdproof-attempt"]) == ("request-9", "1")


def test_credentials_are_not_printed() -> None:
    assert "secret" not in repr(Credentials("tenant-a", "secret"))


async def test_calls_that_cannot_be_meant_are_refused_by_name() -> None:
    async with pair(answer()) as (server, client):
        with pytest.raises(ValueError, match="no method 'Nonsense'"):
            await client.call("Nonsense", pb.GetMetadataRequest(), timeout_s=1)
        with pytest.raises(TypeError, match="Evict takes a EvictRequest, got a GetMetadataRequest"):
            await client.call("Evict", pb.GetMetadataRequest(), timeout_s=1)
        for timeout_s in (0, -1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="timeout_s"):
                await client.get_metadata("bg_1", timeout_s=timeout_s)
        await client.close()
        await client.close()
        with pytest.raises(RuntimeError, match="closed"):
            await client.get_metadata("bg_1", timeout_s=1)
        assert server.seen == []
        assert client.stats.inflight == 0


# --- with the server of this project


def who(tenant: str = server_kit.TENANT) -> Credentials:
    return Credentials(tenant, credential(server_kit.SECRET, tenant))


async def test_the_servers_words_are_understood(tmp_path: Path) -> None:
    async with server_kit.serving(tmp_path) as real, calling(f"{HOST}:{real.port}", who=who()) as client:
        issued_ms = wall_ns() // NS_PER_MS
        reserved = await client.reserve("bg_1", 7, 3, operation_id="op-1", issued_ms=issued_ms, timeout_s=20)
        again = await client.reserve("bg_1", 7, 3, operation_id="op-1", issued_ms=issued_ms, timeout_s=20)
        changed = await client.reserve("bg_1", 7, 4, operation_id="op-1", issued_ms=issued_ms, timeout_s=20)
        anew = await client.reserve("bg_1", 7, 3, operation_id="op-1", issued_ms=issued_ms + 1, timeout_s=20)
        stale = await client.evict("bg_1", 6, operation_id="op-2", timeout_s=20)
        malformed = await client.reserve("bg_1", 7, -1, operation_id="op-3", timeout_s=20)
        nowhere = await client.get_metadata("bg_99", timeout_s=20)
        known = await client.get_operation("op-1", issued_ms=issued_ms, timeout_s=20)
        async with calling(f"{HOST}:{real.port}") as stranger:
            denied = await stranger.get_metadata("bg_1", timeout_s=20)
    found = [
        (r.outcome, r.error_code, r.field, r.attempts)
        for r in (reserved, again, changed, anew, stale, malformed, nowhere)
    ]
    assert found == [
        ("ok", "", "", 1), ("ok", "", "", 1), ("fail", "ID_REUSED", "operation_id", 1),
        ("fail", "ID_REUSED", "issued_ms", 1),
        ("fail", "STALE_EPOCH", "epoch", 1), ("fail", "INVALID_ARGUMENT", "slots", 1),
        ("fail", "NOT_FOUND", "block_group_id", 1),
    ]  # fmt: skip
    assert isinstance(reserved.reply, pb.Answer)
    assert isinstance(again.reply, pb.Answer)
    assert (reserved.reply.reserved, again.reply.reserved) == (3, 3)
    assert (reserved.reply.replayed, again.reply.replayed) == (False, True)
    assert isinstance(known.reply, pb.OperationState)
    assert known.reply.answer.reserved == 3
    assert (denied.outcome, denied.error_code) == ("fail", "UNAUTHENTICATED")


async def test_a_reply_that_was_lost_is_had_by_the_retry_and_the_effect_is_one(tmp_path: Path) -> None:
    policy = RetryPolicy(attempt_timeout_s=1.0)
    async with (
        server_kit.serving(tmp_path, points=FailPoints(lambda *_: None)) as real,
        calling(f"{HOST}:{real.port}", who=who(), policy=policy) as client,
        calling(f"{HOST}:{real.port}", who=who(DEPLOYMENT)) as deployment,
    ):
        order = pb.ArmRequest(point="after_commit_before_reply", action="drop", times=1)
        assert (await deployment.call("Arm", order, timeout_s=20)).outcome == "ok"
        result = await client.reserve("bg_1", 7, 3, operation_id="op-1", timeout_s=20)
        held = await real.held()
    assert (result.outcome, result.attempts, result.timeouts) == ("ok", 2, 1)
    assert isinstance(result.reply, pb.Answer)
    assert (result.reply.replayed, result.reply.reserved) == (True, 3)
    assert held.of_clients() == [("op-1", "group", "")]


# --- connections that break


async def test_a_connection_lost_under_a_call_is_made_anew_by_its_retry() -> None:
    policy = RetryPolicy(attempts_max=6, initial_s=0.05, attempt_timeout_s=5)
    server = ScriptedServer(never())
    await server.start()
    async with calling(server.target, policy=policy) as client:
        call = asyncio.create_task(reserve(client, timeout_s=20))
        await until_async(lambda: server.seen, 5, "the first attempt has arrived")
        server.script = answer()
        await server.stop()
        await server.start()
        result = await call
        await server.stop()
    assert result.outcome == "ok"
    assert 2 <= result.attempts <= 6
    assert {seen.operation_id for seen in server.seen} == {"op-1"}


async def test_a_server_that_comes_back_is_found_again() -> None:
    server = ScriptedServer(answer())
    await server.start()
    async with calling(server.target, budget=Unbounded(), breaker=NEVER_OPEN) as client:
        assert (await reserve(client)).outcome == "ok"
        await server.stop()
        for _ in range(5):
            assert (await reserve(client)).outcome == "unknown"
        await server.start()
        for _ in range(100):
            if (await reserve(client)).outcome == "ok":
                break
        assert (await reserve(client)).attempts == 1
    await server.stop()


async def test_calls_under_way_end_as_unknown_when_their_client_is_closed() -> None:
    async with pair(never()) as (server, client):
        calls = [asyncio.create_task(reserve(client, f"op-{n}")) for n in range(3)]
        await until_async(lambda: len(server.seen) == 3, 5, "all have arrived")
        await client.close()
        results = await asyncio.gather(*calls)
    assert [(r.outcome, r.error_code, r.attempts) for r in results] == [("unknown", "CANCELLED", 1)] * 3


# --- nothing is left behind


def idle(client: BlockClient) -> bool:
    return (client.pool.in_use, client.pool.waiting, client.stats.inflight) == (0, 0, 0)


async def test_a_cancelled_call_gives_everything_back() -> None:
    pauses = asyncio.Event()

    async def sleep(_: float) -> None:
        pauses.set()
        await asyncio.Event().wait()

    async with pair(never(), connections=1, calls_per_connection=2, sleep=sleep) as (server, client):
        tasks_before = len(asyncio.all_tasks())
        running = [asyncio.create_task(reserve(client, f"op-{n}")) for n in range(2)]
        await until_async(lambda: len(server.seen) == 2, 5, "both are at the server")
        waiting = asyncio.create_task(reserve(client, "op-waits"))
        await until_async(lambda: client.pool.waiting == 1, 5, "a third waits for a place")
        for call in (waiting, *running):
            call.cancel()
        assert [type(e) for e in await asyncio.gather(waiting, *running, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 3
        assert idle(client)
        server.script = UNAVAILABLE
        paused = asyncio.create_task(reserve(client, "op-pauses"))
        await asyncio.wait_for(pauses.wait(), 5)
        paused.cancel()
        await asyncio.gather(paused, return_exceptions=True)
        assert idle(client)
        server.script = answer()
        results = await asyncio.gather(*(reserve(client, f"op-{n}") for n in range(20)))
        assert {r.outcome for r in results} == {"ok"}
        await until_async(lambda: len(asyncio.all_tasks()) <= tasks_before, 5, "no task is left over")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else 0


async def test_a_thousand_calls_leave_no_descriptor_and_no_task_behind() -> None:
    async with serving(answer()) as server:
        client = BlockClient(server.target, ME)
        await asyncio.gather(*(client.get_metadata("bg_1", timeout_s=20) for _ in range(100)))
        await until_async(lambda: len(asyncio.all_tasks()) < 10, 5, "the first calls are over at the server as well")
        descriptors_before, tasks_before = descriptors(), len(asyncio.all_tasks())
        for _ in range(10):
            results = await asyncio.gather(*(client.get_metadata("bg_1", timeout_s=20) for _ in range(100)))
            assert {r.outcome for r in results} == {"ok"}
        await until_async(lambda: len(asyncio.all_tasks()) <= tasks_before, 5, "no task is left over")
        assert descriptors() <= descriptors_before
        assert client.pool.open == 2
        await client.close()
        await until_async(lambda: descriptors() < descriptors_before, 5, "its connections are closed")


# --- what is counted and logged


def sample(metrics: ClientMetrics, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples that carry `labels`."""
    found = [
        s.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for s in family.samples
        if s.name == name and labels.items() <= s.labels.items()
    ]
    assert found, f"no {name}"
    return sum(found)


@pytest.mark.rule("KVC-IDEM-018")
async def test_clients_count_under_the_names_of_the_document() -> None:
    metrics = ClientMetrics()
    script = each(answer(), UNAVAILABLE, answer(), fail(grpc.StatusCode.NOT_FOUND), never())
    policy = RetryPolicy(attempts_max=2, attempt_timeout_s=0.2)
    async with pair(script, metrics=metrics, policy=policy) as (server, client):
        await reserve(client)
        await reserve(client)
        await client.get_metadata("bg_2", timeout_s=5)
        last = asyncio.create_task(reserve(client))
        await until_async(lambda: len(server.seen) == 5, 5, "the last call is there")
        assert (sample(metrics, "rpc_inflight_requests"), sample(metrics, "connection_pool_in_use")) == (1, 1)
        await last
        assert sample(metrics, "rpc_calls", outcome="ok", method="Reserve") == 2
        assert sample(metrics, "rpc_calls", outcome="fail", method="GetMetadata") == 1
        assert sample(metrics, "rpc_calls", outcome="unknown", tenant="tenant-a", target=server.target) == 1
        assert sample(metrics, "rpc_qps") == pytest.approx(0.4)
        assert sample(metrics, "rpc_error_rate") == 0.5
        assert (sample(metrics, "rpc_timeout_count"), sample(metrics, "rpc_retry_count")) == (2, 2)
        assert 0 < sample(metrics, "rpc_latency_p50") < sample(metrics, "rpc_latency_p99")
        assert sample(metrics, "rpc_latency_p99") >= 400
        assert (sample(metrics, "rpc_inflight_requests"), sample(metrics, "connection_pool_in_use")) == (0, 0)
        assert (sample(metrics, "connection_pool_places"), sample(metrics, "connection_pool_wait_time")) == (6, 0)
        assert sample(metrics, "circuit_breaker_state") == 0
        async with calling(server.target, metrics=metrics):
            assert sample(metrics, "rpc_retry_count", client="1") == 2
            assert sample(metrics, "rpc_retry_count", client="2") == 0
    assert b"target=" not in metrics.text()


@pytest.mark.rule("KVC-IDEM-018")
async def test_every_call_leaves_one_line_with_the_fields_of_the_document() -> None:
    lines: list[Line] = []
    async with pair(each(UNAVAILABLE, answer(), refuse("PINNED"), never()), log=lines.append) as (server, client):
        await client.start_migrate("bg_1", 7, "a", "b", operation_id="op-1", timeout_s=5)
        await client.evict("bg_1", 7, operation_id="op-2", timeout_s=2)
        given_up = asyncio.create_task(client.get_metadata("bg_2", timeout_s=1))
        await until_async(lambda: len(server.seen) == 4, 5, "the last call is there")
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
    first, second, third = lines
    assert (first.operation_id, first.block_group_id, first.src_node, first.dst_node) == ("op-1", "bg_1", "a", "b")
    assert (first.rpc_method, first.epoch, first.retry_count, first.error_code) == ("StartMigrate", 7, 1, "")
    assert first.request_id == server.seen[0].request_id != second.request_id
    assert first.timeout_ms == 5000
    assert first.latency_ms > 8
    assert (second.operation_id, second.error_code, second.retry_count) == ("op-2", "PINNED", 0)
    assert (third.rpc_method, third.error_code, third.epoch, third.operation_id) == (
        "GetMetadata",
        "CANCELLED",
        None,
        "",
    )
