"""The memory service's rules, without a process, a socket or a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.rules.sessions import (
    COMMITS_REMEMBERED,
    METADATA_BYTES_MAX,
    Holding,
    Layout,
    Mode,
    Reason,
    Refused,
    Session,
    Sessions,
    Tag,
    layout_hash,
)

PAGE = 4096
CAPACITY = 16 * PAGE


def make(cls: type[Sessions] = Sessions, **changes: Any) -> Sessions:
    return cls(**{"device": "gpu0", "service": "life-1", "capacity_bytes": CAPACITY, "allocations_max": 8, **changes})


def writer(rules: Sessions, tag: Tag = Tag.WEIGHTS, engine: str = "e1", epoch: int = 0) -> int:
    return rules.open(tag, Mode.WRITER, engine, epoch).id


def reader(rules: Sessions, tag: Tag = Tag.WEIGHTS) -> int:
    return rules.open(tag, Mode.READER, "r", 0).id


def committed(rules: Sessions, name: str = "w", size: int = PAGE, commit_id: str = "c1") -> tuple[int, Layout]:
    session = writer(rules)
    rules.allocate(session, name, size)
    return session, rules.commit(session, commit_id, b"meta").layout


def refusal(call: Callable[..., object], *args: object) -> Reason:
    with pytest.raises(Refused) as caught:
        call(*args)
    assert caught.value.message
    assert "\n" not in caught.value.message
    return caught.value.reason


@pytest.mark.rule("KVC-MEM-004")
def test_one_writer_a_tag_and_the_tags_do_not_meet() -> None:
    """KVC-MEM-004."""
    rules = make()
    first = writer(rules)
    assert refusal(writer, rules) is Reason.WRITER_BUSY
    writer(rules, Tag.KV_CACHE)
    rules.close(first)
    assert rules.session(writer(rules)).mode is Mode.WRITER


@pytest.mark.rule("KVC-MEM-004")
def test_readers_see_only_what_is_committed() -> None:
    """KVC-MEM-004."""
    rules = make()
    assert refusal(reader, rules) is Reason.NOTHING_COMMITTED
    session = writer(rules)
    rules.allocate(session, "w", 100)
    assert refusal(reader, rules) is Reason.NOTHING_COMMITTED
    assert refusal(rules.layout, session) is Reason.NOTHING_COMMITTED
    layout = rules.commit(session, "c1", b"").layout
    one, two = reader(rules), reader(rules)
    assert rules.layout(one) == rules.layout(two) == layout
    assert refusal(rules.allocate, one, "x", 1) is Reason.NOT_A_WRITER
    assert refusal(rules.commit, one, "c2", b"") is Reason.NOT_A_WRITER


def test_a_layout_has_entries_in_order_generation_and_a_hash_of_all() -> None:
    rules = make()
    session = writer(rules)
    rules.allocate(session, "b", 10)
    rules.allocate(session, "a", PAGE + 1)
    layout = rules.commit(session, "c1", b"m").layout
    assert [(e.name, e.size_bytes) for e in layout.entries] == [("b", 10), ("a", PAGE + 1)]
    assert (layout.generation, layout.size_bytes, layout.service) == (1, PAGE + 11, "life-1")
    assert layout.hash == layout_hash(Tag.WEIGHTS, layout.entries, b"m")
    others = {
        layout_hash(Tag.KV_CACHE, layout.entries, b"m"),
        layout_hash(Tag.WEIGHTS, layout.entries[::-1], b"m"),
        layout_hash(Tag.WEIGHTS, layout.entries, b"n"),
    }
    assert len(others | {layout.hash}) == 4


@pytest.mark.rule("KVC-MEM-006")
def test_the_same_commit_again_answers_the_same_and_another_is_refused() -> None:
    """KVC-MEM-006."""
    rules = make()
    session, layout = committed(rules)
    again = rules.commit(session, "c1", b"meta")
    assert again.layout == layout
    assert again.repeated
    assert refusal(rules.commit, session, "c2", b"meta") is Reason.ALREADY_COMMITTED
    assert refusal(rules.commit, session, "c1", b"other") is Reason.ALREADY_COMMITTED
    assert refusal(rules.allocate, session, "x", 1) is Reason.NOT_A_WRITER


@pytest.mark.rule("KVC-MEM-006")
def test_anybody_may_ask_what_a_commit_did_after_its_session_and_its_generation_are_gone() -> None:
    """KVC-MEM-006."""
    rules = make()
    assert rules.commit_status("c1") is None
    session, layout = committed(rules)
    rules.close(session)
    committed(rules, commit_id="c2")
    assert rules.commit_status("c1") == layout


def test_commits_are_remembered_up_to_a_limit() -> None:
    rules = make()
    for number in range(COMMITS_REMEMBERED + 1):
        session = writer(rules)
        rules.allocate(session, "w", PAGE)
        for holding in rules.commit(session, f"c{number}", b"").freed:
            rules.freed(holding)
        rules.close(session)
    assert rules.commit_status("c0") is None
    assert rules.commit_status("c1") is not None
    assert rules.figures().allocations == 1


@pytest.mark.rule("KVC-MEM-005")
def test_a_writer_that_ends_before_its_commit_leaves_nothing() -> None:
    """KVC-MEM-005."""
    rules = make()
    session = writer(rules)
    rules.allocate(session, "w", 3 * PAGE)
    (holding,) = rules.close(session)
    assert (rules.figures().used_bytes, rules.figures().freeing_bytes) == (3 * PAGE, 3 * PAGE)
    successor = writer(rules)
    assert rules.current(Tag.WEIGHTS) is None
    assert refusal(rules.allocate, successor, "w", 14 * PAGE) is Reason.SHORT_OF_MEMORY
    rules.freed(holding)
    rules.allocate(successor, "w", 14 * PAGE)
    assert rules.figures().used_bytes == 14 * PAGE


@pytest.mark.rule("KVC-MEM-001")
def test_committed_memory_outlives_every_session() -> None:
    """KVC-MEM-001."""
    rules = make()
    session, layout = committed(rules)
    assert rules.close(session) == ()
    other = reader(rules)
    assert rules.layout(other) == layout
    assert rules.close(other) == ()
    assert rules.figures().allocations == 1


@pytest.mark.rule("KVC-MEM-008")
def test_readers_of_an_older_generation_keep_it_until_the_last_of_them_ends() -> None:
    """KVC-MEM-008: and the newest layout is another."""
    rules = make()
    first, layout = committed(rules)
    slow = reader(rules)
    rules.close(first)
    second, newer = committed(rules, commit_id="c2")
    assert rules.layout(slow) == layout
    assert rules.current(Tag.WEIGHTS) == newer != layout
    assert newer.hash == layout.hash
    assert newer.generation == layout.generation + 1
    assert rules.close(second) == ()
    (holding,) = rules.close(slow)
    assert holding.layout == layout


def test_a_commit_frees_the_generation_that_nobody_reads() -> None:
    rules = make()
    first, layout = committed(rules)
    rules.close(first)
    session = writer(rules)
    rules.allocate(session, "w", PAGE)
    result = rules.commit(session, "c2", b"")
    assert [holding.layout for holding in result.freed] == [layout]


@pytest.mark.rule("KVC-LOCK-004")
def test_a_late_predecessor_is_refused_by_epoch() -> None:
    """KVC-LOCK-004."""
    rules = make()
    rules.close(writer(rules, Tag.KV_CACHE, epoch=7))
    assert refusal(writer, rules, Tag.KV_CACHE, "late", 6) is Reason.STALE_EPOCH
    assert rules.session(writer(rules, Tag.KV_CACHE, epoch=7)).epoch == 7
    assert refusal(writer, rules, Tag.KV_CACHE, "twin", 7) is Reason.WRITER_BUSY


@pytest.mark.rule("KVC-LOCK-004")
def test_a_higher_epoch_fences_the_writer_before_it_which_keeps_its_memory_and_no_right() -> None:
    """KVC-LOCK-004."""
    rules = make()
    old = writer(rules, Tag.KV_CACHE, "old", 1)
    rules.allocate(old, "kv", PAGE)
    new = writer(rules, Tag.KV_CACHE, "new", 2)
    assert refusal(rules.allocate, old, "more", PAGE) is Reason.FENCED
    assert refusal(rules.commit, old, "c1", b"") is Reason.FENCED
    assert refusal(rules.export, old, ("kv",)) is Reason.FENCED
    assert rules.figures().used_bytes == PAGE
    rules.allocate(new, "kv", PAGE)
    assert [holding.charged_bytes for holding in rules.close(old)] == [PAGE]
    assert refusal(writer, rules, Tag.KV_CACHE, "third", 2) is Reason.WRITER_BUSY


def test_weights_are_not_fenced() -> None:
    rules = make()
    writer(rules, Tag.KV_CACHE, epoch=5)
    session = writer(rules, Tag.WEIGHTS, epoch=1)
    assert refusal(writer, rules, Tag.WEIGHTS, "e2", 9) is Reason.WRITER_BUSY
    rules.allocate(session, "w", 1)


@pytest.mark.rule("KVC-MEM-010")
@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("", 1, Reason.BAD_REQUEST),
        ("n" * 201, 1, Reason.BAD_REQUEST),
        ("n", 0, Reason.BAD_REQUEST),
        ("n", -1, Reason.BAD_REQUEST),
        ("taken", 1, Reason.NAME_TAKEN),
        ("n", CAPACITY + 1, Reason.TOO_LARGE),
        ("n", CAPACITY, Reason.SHORT_OF_MEMORY),
    ],
)
def test_an_allocation_that_cannot_be_is_refused_and_costs_nothing(name: str, size: int, reason: Reason) -> None:
    """KVC-MEM-010."""
    rules = make()
    session = writer(rules)
    rules.allocate(session, "taken", 1)
    before = rules.figures()
    assert refusal(rules.allocate, session, name, size) is reason
    assert rules.figures() == before


def test_allocations_are_counted_and_a_failed_one_is_taken_back() -> None:
    rules = make()
    session = writer(rules)
    for number in range(8):
        rules.allocate(session, f"n{number}", 1)
    assert refusal(rules.allocate, session, "n9", 1) is Reason.SHORT_OF_HANDLES
    rules.take_back(session, "n7")
    assert rules.figures().used_bytes == 7 * PAGE
    rules.allocate(session, "n9", 1)


@pytest.mark.rule("KVC-MEM-011")
def test_what_makes_no_sense_is_refused() -> None:
    """KVC-MEM-011."""
    rules = make()
    assert refusal(rules.open, Tag.WEIGHTS, Mode.WRITER, "", 0) is Reason.BAD_REQUEST
    assert refusal(rules.session, 99) is Reason.BAD_REQUEST
    session = writer(rules)
    assert refusal(rules.commit, session, "c1", b"") is Reason.BAD_REQUEST
    rules.allocate(session, "w", 1)
    assert refusal(rules.commit, session, "", b"") is Reason.BAD_REQUEST
    assert refusal(rules.commit, session, "c1", b"m" * (METADATA_BYTES_MAX + 1)) is Reason.BAD_REQUEST
    assert refusal(rules.export, session, ("w", "x")) is Reason.UNKNOWN_NAME
    rules.commit(session, "c1", b"")
    other = writer(rules)
    rules.allocate(other, "w", 1)
    assert refusal(rules.commit, other, "c1", b"") is Reason.BAD_REQUEST
    with pytest.raises(ValueError, match="capacity_bytes"):
        make(capacity_bytes=0)


# Any history at all, and two mutants that such histories must tell from the rules.

steps = st.lists(
    st.tuples(
        st.sampled_from(["writer", "reader", "allocate", "commit", "close", "freed"]),
        st.sampled_from(list(Tag)),
        st.integers(0, 7),
    ),
    max_size=60,
)


class _Books:
    """Keeps its own account beside the rules, from their answers alone."""

    def __init__(self, rules: Sessions) -> None:
        self.rules = rules
        self.open: dict[int, Session] = {}
        self.freeing: list[Holding] = []
        self.live: dict[int, Holding] = {}
        self.count = self.refused = 0

    def walk(self, history: list[tuple[str, Tag, int]]) -> None:
        for step in history:
            self.step(*step)

    def step(self, what: str, tag: Tag, number: int) -> None:
        self.count += 1
        chosen = list(self.open)[number % len(self.open)] if self.open else 0
        try:
            if what in ("writer", "reader"):
                session = self.rules.open(tag, Mode(what), f"e{self.count}", number)
                self.open[session.id] = session
            elif what == "allocate":
                holding = self.rules.allocate(chosen, f"n{self.count}", (number + 1) * 1000)
                self.live[holding.id] = holding
            elif what == "commit":
                self.freeing += self.rules.commit(chosen, f"c{self.count}", b"").freed
            elif what == "close" and chosen:
                del self.open[chosen]
                self.freeing += self.rules.close(chosen)
            elif what == "freed" and self.freeing:
                gone = self.freeing.pop()
                self.rules.freed(gone)
                self.live.pop(gone.id, None)
        except Refused:
            self.refused += 1
        self.check()

    def check(self) -> None:
        figures = self.rules.figures()
        assert 0 <= figures.freeing_bytes <= figures.used_bytes <= figures.capacity_bytes
        assert figures.used_bytes == sum(holding.charged_bytes for holding in self.live.values())
        assert figures.freeing_bytes == sum(holding.charged_bytes for holding in self.freeing)
        assert figures.allocations == sum(len(holding.sizes) for holding in self.live.values()) <= 8
        gone = {holding.id for holding in self.freeing}
        assert len(gone) == len(self.freeing), "freed twice"
        for tag in Tag:
            writers = [s for s in self.open.values() if s.tag is tag and s.mode is Mode.WRITER and not s.fenced]
            assert len(writers) <= 1
        for session in self.open.values():
            assert session.holding.id not in gone, "freed under a session"
            if session.mode is Mode.READER:
                assert session.holding.layout is not None, "reads what is not committed"


@settings(max_examples=300, deadline=None)
@given(steps)
def test_every_history_keeps_the_books_and_the_promises(history: list[tuple[str, Tag, int]]) -> None:
    books = _Books(make())
    books.walk(history)
    assert books.refused <= len(history)


class ForgetsReaders(Sessions):
    """A mutant: frees a replaced layout under those who read it."""

    def close(self, session_id: int) -> tuple[Holding, ...]:
        self.session(session_id).holding.holders = 1
        return super().close(session_id)


class ReturnsEarly(Sessions):
    """A mutant: gives the capacity back when freeing begins, and not when it is done."""

    def close(self, session_id: int) -> tuple[Holding, ...]:
        freed = super().close(session_id)
        for holding in freed:
            self.freed(holding)
        return freed


@pytest.mark.parametrize("mutant", [ForgetsReaders, ReturnsEarly])
def test_the_books_catch_a_mutant(mutant: type[Sessions]) -> None:
    books = _Books(make(mutant))
    history = [
        ("writer", Tag.WEIGHTS, 0),
        ("allocate", Tag.WEIGHTS, 0),
        ("commit", Tag.WEIGHTS, 0),
        ("reader", Tag.WEIGHTS, 0),
        ("writer", Tag.WEIGHTS, 0),
        ("allocate", Tag.WEIGHTS, 2),
        ("commit", Tag.WEIGHTS, 2),
        ("close", Tag.WEIGHTS, 0),
        ("close", Tag.WEIGHTS, 0),
    ]
    clean = _Books(make())
    clean.walk(history)
    assert clean.refused == 0
    with pytest.raises(AssertionError):
        books.walk(history)
