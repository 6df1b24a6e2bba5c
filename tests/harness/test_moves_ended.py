"""Before the audit a run waits until no group is on its way, for a bounded time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness import control_load
from harness.control_load import moves_ended
from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice.client import CallOutcome, Credentials, Result
from reference_impl.rules.blockgroups import GroupState

OUT, IN = GroupState.MIGRATING_OUT, GroupState.MIGRATING_IN


class Services:
    """What services answer, one after the other; the last goes on for ever: a list of groups' states, None: nothing."""

    def __init__(self, answers: dict[str, list[list[GroupState] | None]]) -> None:
        self.answers: dict[str, Iterator[list[GroupState] | None]] = {n: iter(a) for n, a in answers.items()}
        self.last: dict[str, list[GroupState] | None] = {}
        self.asked: list[tuple[str, GroupState]] = []
        self.closed = 0

    def client(self, target: str, who: Credentials, *, connections: int) -> Client:
        assert (who.tenant, connections) == ("default", 1)
        return Client(self, target)


class Client:
    def __init__(self, services: Services, target: str) -> None:
        self.services, self.target = services, target

    async def list_groups(self, *, state: GroupState, limit: int, timeout_s: float) -> Result:
        assert limit == 1
        assert timeout_s > 0
        services = self.services
        services.asked.append((self.target, state))
        answer = services.last[self.target] = next(services.answers[self.target], services.last.get(self.target))
        if answer is None:
            return Result(outcome=CallOutcome.UNKNOWN, error_code="UNAVAILABLE")
        groups = [pb.Metadata(block_group_id="g", state=s) for s in answer if s == state]
        return Result(outcome=CallOutcome.OK, reply=pb.ListGroupsReply(groups=groups))

    async def close(self) -> None:
        self.services.closed += 1


async def waited(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[list[GroupState] | None]], limit_s: float
) -> tuple[bool, Services]:
    services = Services(answers)
    monkeypatch.setattr(control_load, "BlockClient", services.client)
    monkeypatch.setattr(control_load, "MOVING_LOOK_S", 0.001)
    ended = await moves_ended({node: node for node in answers}, "s" * 32, limit_s)
    assert services.closed == len(answers)
    return ended, services


async def test_it_is_over_when_no_node_has_a_group_that_leaves_or_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, services = await waited(monkeypatch, {"p0": [[OUT], [OUT], []], "d0": [[IN], [IN], [IN], []]}, 60)
    assert ended
    assert services.asked[-4:] == [("p0", OUT), ("d0", OUT), ("p0", IN), ("d0", IN)], "who leaves is asked for first"


@pytest.mark.parametrize("answer", [[OUT], [IN], None], ids=["one leaves", "one arrives", "no answer"])
async def test_what_does_not_end_is_waited_for_until_the_limit(
    monkeypatch: pytest.MonkeyPatch, answer: list[GroupState] | None
) -> None:
    ended, services = await waited(monkeypatch, {"p0": [[]], "d0": [answer]}, 0.05)
    assert not ended
    assert len(services.asked) > 2
