"""What a read was answered is written down in the rules' own words, and one that nobody can read as such."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest
from google.protobuf.message import Message

from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice import wire
from reference_impl.blockservice.calls import BAD_REPLY
from reference_impl.blockservice.client import CallOutcome, Result
from reference_impl.rules.blockgroups import Answer, Group, Migration, Outcome, Reserve
from workloads.operation_mix import Asked, Known
from workloads.operation_rows import DONE, LookKind, Seen, Told
from workloads.operations import _look

GROUP: Final = Group(block_group_id="g", location="p0", epoch=3, size_bytes=4096, token_end=16, checksum="c" * 32)
ANSWER: Final = Answer(outcome=Outcome.APPLIED, epoch=3, location="p0", reserved=2)
MIGRATION: Final = Migration(operation_id="op-1", block_group_id="g", src="p0", dst="d0", epoch=3)
ASKED: Final = Asked("default", "p0", "op-1", 5, Reserve(block_group_id="g", epoch=3, slots=2))


@pytest.mark.parametrize(
    ("kind", "reply", "said"),
    [
        (LookKind.OPERATION, wire.state_pb(wire.Known.DONE, ANSWER), Told(known=DONE, answer=ANSWER)),
        (LookKind.OPERATION, wire.state_pb(wire.Known.UNKNOWN, None), Told(known="UNKNOWN")),
        (LookKind.METADATA, wire.metadata_pb(GROUP, 2), Seen(group=GROUP, pins=2)),
        (LookKind.MIGRATION, wire.migration_pb(MIGRATION), MIGRATION),
    ],
)
def test_what_came_is_read_back_as_it_was(kind: LookKind, reply: Message, said: Told | Seen | Migration) -> None:
    asked = Known("p0", "g", 3) if kind is LookKind.METADATA else ASKED
    look = _look(asked, kind, "default", "default-0", 1, Result(outcome=CallOutcome.OK, reply=reply))
    assert msgspec.json.decode(look.said, type=type(said)) == said
    assert (look.tenant, look.node, look.block_group_id, look.kind, look.error_code) == ("default", "p0", "g", kind, "")
    assert look.operation_id == ("" if kind is LookKind.METADATA else "op-1")
    assert look.start_ns == 1 < look.end_ns


def test_what_cannot_be_read_and_what_did_not_come_are_told_apart() -> None:
    bad = _look(ASKED, LookKind.METADATA, "t", "c", 1, Result(outcome=CallOutcome.OK, reply=pb.Metadata(state="?")))
    assert (bad.said, bad.error_code) == ("", BAD_REPLY)
    nothing = Result(outcome=CallOutcome.FAIL, error_code="NOT_FOUND")
    none = _look(ASKED, LookKind.MIGRATION, "t", "c", 1, nothing)
    assert (none.said, none.error_code, none.outcome) == ("", "NOT_FOUND", "fail")
