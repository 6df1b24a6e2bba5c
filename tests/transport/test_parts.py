"""What a rank remembers of its peers: who is known stays what it is, whatever is said under its id."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from reference_impl.transport.base import PeerRefused, RankAddress
from reference_impl.transport.parts import Parts

GOOD = RankAddress(b"good", 4096, 8192, 100)


class Agent:
    """Stands for a NIXL agent; notes what it is asked."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.gone: set[str] = set()

    def load(self, name: str, metadata: bytes) -> None:
        if metadata != b"good":
            raise PeerRefused("damaged")
        self.done.append(f"load {name}")
        self.gone.discard(name)

    def forget(self, name: str) -> None:
        self.done.append(f"forget {name}")

    def lost(self, name: str) -> bool:
        return name in self.gone


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def parts(agent: Agent) -> Parts:
    unchecked: Any = agent
    found = Parts(unchecked, 0, 1)
    assert found.add("P", [GOOD]) == ""
    agent.done.clear()
    return found


@pytest.mark.rule("KVC-HSK-001")
@pytest.mark.parametrize("changes", [{"metadata": b"bad"}, {"kv_address": 0}, {"blocks": 1}])
def test_other_addresses_of_a_known_peer_touch_nothing(parts: Parts, agent: Agent, changes: dict[str, Any]) -> None:
    for lost in (False, True):
        agent.gone = {"P/0"} if lost else set()
        assert "other addresses" in parts.add("P", [msgspec.structs.replace(GOOD, **changes)])
        assert "other addresses" in parts.add("P", [GOOD, GOOD])
        assert parts.addresses("P") == [GOOD]
    assert agent.done == []


def test_the_same_addresses_are_nothing_new_unless_the_peer_was_lost(parts: Parts, agent: Agent) -> None:
    assert parts.add("P", [GOOD]) == ""
    assert agent.done == []
    agent.gone = {"P/0"}
    assert parts.add("P", [GOOD]) == ""
    assert agent.done == ["forget P/0", "load P/0"]
    assert parts.usable("P", [GOOD])


def test_a_forgotten_peer_may_come_with_other_addresses(parts: Parts) -> None:
    parts.remove("P")
    assert parts.add("P", [msgspec.structs.replace(GOOD, kv_address=0)]) == ""
