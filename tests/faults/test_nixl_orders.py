"""Orders, the messages they mean, and the folder through which they go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from faults.nixl.channel import BadFolder, BadOrders, Desk, Orders, Reporter, checked, made
from faults.nixl.dialects import Dialect, Reference, Vllm, apart, damaged, shortened
from faults.nixl.flights import NotStruck, Piece, block_of
from faults.nixl.orders import TEXT_CHARS_MAX, Action, Direction, Kind, Order, Report, Said, What
from faults.nixl.strikes import Strikes
from reference_impl.rules import messages
from reference_impl.rules.messages import How, encode

DROP = Order(id="a", action=Action.DROP)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"id": ""}, "needs an id"),
        ({"action": Action.FAIL}, "a notification cannot fail"),
        ({"what": What.TRANSFER}, "a transfer cannot drop"),
        ({"what": What.TRANSFER, "action": Action.STALL, "kind": Kind.CLAIM}, "has no kind"),
        ({"what": What.HANDSHAKE, "action": Action.FAIL, "request": "x"}, "of no request"),
        ({"count": -1}, "must not be negative"),
        ({"seconds": -1.0}, "seconds must be"),
        ({"action": Action.DELAY}, "a delay needs seconds"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused_with_the_reason(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Order(**({"id": "a", "action": Action.DROP} | fields))


@pytest.mark.parametrize(
    ("message", "kind", "requests"),
    [
        (b"HB:cmpl-1,cmpl-2", Kind.HEARTBEAT, ("cmpl-1", "cmpl-2")),
        (b"cmpl-1:2", Kind.COMPLETION, ("cmpl-1",)),
        (b"a:b:1", Kind.COMPLETION, ("a:b",)),
        (b"PUSH_REG:" + msgspec.msgpack.encode({"request_id": "r", "more": [1]}), Kind.REGISTRATION, ("r",)),
        (b"PUSH_REG:\xff", Kind.REGISTRATION, ()),
        (b"cmpl-1", Kind.UNKNOWN, ()),
        (b":1", Kind.UNKNOWN, ()),
        (b"\xff\xfe", Kind.UNKNOWN, ()),
        (b"", Kind.UNKNOWN, ()),
    ],
)
def test_vllms_messages_are_understood(message: bytes, kind: Kind, requests: tuple[str, ...]) -> None:
    assert Vllm().meaning(message) == (kind, requests)


@pytest.mark.parametrize(
    ("message", "kind", "requests"),
    [
        (encode(messages.Heartbeat(["a", "b"])), Kind.HEARTBEAT, ("a", "b")),
        (encode(messages.Report("a", "r", How.READ)), Kind.COMPLETION, ("a",)),
        (encode(messages.Claim("a", "r", 1, "")), Kind.CLAIM, ("a",)),
        (encode(messages.Answer("a", "r", True)), Kind.ANSWER, ("a",)),
        (b"HB:a", Kind.UNKNOWN, ()),
    ],
)
def test_the_references_messages_are_understood(message: bytes, kind: Kind, requests: tuple[str, ...]) -> None:
    assert Reference().meaning(message) == (kind, requests)


@pytest.mark.parametrize("dialect", [Vllm(), Reference()])
def test_one_request_is_taken_out_of_a_heartbeat(dialect: Dialect) -> None:
    message = dialect.heartbeat(("a-1", "b-2", "c-3"))
    assert apart(dialect, message, "b-2") == (dialect.heartbeat(("b-2",)), dialect.heartbeat(("a-1", "c-3")))
    assert apart(dialect, message, "") == (message, None)
    assert apart(dialect, message, "-") == (message, None)
    assert apart(dialect, message, "d") == (None, message)


def test_a_completion_is_struck_whole() -> None:
    assert apart(Vllm(), b"a:1", "a") == (b"a:1", None)


def test_damage_is_one_bit() -> None:
    assert damaged(b"cmpl-1:1") == b"cmpl,1:1"
    assert damaged(b"") == b""


def test_a_long_message_is_shortened_and_made_printable() -> None:
    assert shortened(b"\xffa") == "\\xffa"
    assert len(shortened(b"a" * 1000)) == TEXT_CHARS_MAX


def struck(strikes: Strikes, times: int, *requests: str) -> list[bool]:
    found = []
    for _ in range(times):
        order = strikes.strike(What.NOTIFICATION, requests, Kind.HEARTBEAT, Direction.RECEIVED)
        found.append(order is not None)
    return found


def test_an_order_lets_some_through_and_strikes_as_many_as_it_says() -> None:
    strikes = Strikes("p0")
    strikes.replace([Order(id="a", action=Action.DROP, skip=2, count=2)])
    assert struck(strikes, 6) == [False, False, True, True, False, False]


@pytest.mark.parametrize(
    "other", [{"kind": Kind.CLAIM}, {"direction": Direction.SENT}, {"request": "b"}, {"engine": "d0"}]
)
def test_an_order_means_only_what_it_names(other: dict[str, Any]) -> None:
    strikes = Strikes("p0")
    strikes.replace([Order(id="a", action=Action.DROP, **other)])
    assert struck(strikes, 1, "a") == [False]


def test_orders_that_stay_go_on_counting() -> None:
    strikes = Strikes("p0")
    once = Order(id="a", action=Action.DROP, count=1, request="a")
    strikes.replace([once])
    assert struck(strikes, 1, "a") == [True]
    strikes.replace([once, Order(id="b", action=Action.DROP, request="b")])
    assert struck(strikes, 1, "a") == [False]
    strikes.replace([])
    strikes.replace([once])
    assert struck(strikes, 1, "a") == [True]


def test_orders_reach_the_agent_once_a_version(tmp_path: Path) -> None:
    desk = Desk(made(tmp_path / "faults"))
    orders = Orders(desk.folder)
    assert orders.changed() == []
    assert orders.changed() is None
    desk.place(DROP)
    assert orders.changed() == [DROP]
    assert orders.changed() is None
    desk.remove("a")
    assert orders.changed() == []
    with pytest.raises(ValueError, match="stands already"):
        desk.place(DROP, DROP)


@pytest.mark.parametrize("text", [b"{", b'[{"id":"a","action":"fail"}]', b'[{"id":"a","action":"explode"}]'])
def test_damaged_orders_are_refused_once(tmp_path: Path, text: bytes) -> None:
    folder = made(tmp_path / "faults")
    (folder / "orders.json").write_bytes(text)
    orders = Orders(folder)
    with pytest.raises(BadOrders):
        orders.changed()
    assert orders.changed() is None


def test_orders_that_cannot_be_looked_at_are_refused_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    orders = Orders(tmp_path / "file")
    with pytest.raises(BadOrders, match="Not a directory"):
        orders.changed()
    assert orders.changed() is None


def test_a_folder_that_others_can_see_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "faults")
    checked(folder)
    folder.chmod(0o750)
    with pytest.raises(BadFolder, match="0750"):
        checked(folder)
    with pytest.raises(BadFolder, match="No such file"):
        checked(tmp_path / "none")
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(BadFolder, match="is no folder"):
        checked(tmp_path / "link")


def test_a_report_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    desk = Desk(made(tmp_path / "faults"))
    reporter = Reporter(desk.folder)
    report = Report(t_ns=1, pid=2, agent="x", engine="p0", said=Said.STRUCK, order="a")
    reporter.say(report)
    (path,) = desk.folder.glob("reports-*")
    line = path.read_bytes()
    path.write_bytes(line + line[:10])
    assert desk.reports() == [report]
    path.write_bytes(line + line)
    assert desk.reports() == [report, report]
    reporter.close()
    reporter.close()


def test_blocks_are_counted_by_descriptor_or_by_size() -> None:
    pieces = [Piece(1000, 100), Piece(5000, 50), Piece(9000, 30)]
    assert block_of(pieces, 1, 0) == [Piece(5000, 50)]
    assert block_of(pieces, -1, 0) == [Piece(9000, 30)]
    assert block_of(pieces, 1, 80) == [Piece(1080, 20), Piece(5000, 50), Piece(9000, 10)]
    assert block_of(pieces, -1, 80) == [Piece(9010, 20)]
    with pytest.raises(NotStruck, match="the transfer has 3"):
        block_of(pieces, 3, 0)
