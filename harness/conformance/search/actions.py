"""What can happen in a generated history, as data. Small numbers say what to do to which, so that they shrink well.

An index counts among what there is at that moment, and goes round (`which=0` is the newest). An action that cannot be
done then does nothing, so that a history stays one whatever is taken out of it.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final, TypeAlias

import msgspec

from faults.nixl.orders import Kind

NAME_CHARS_MAX: Final = 100
MESSAGE_BYTES_MAX: Final = 4_096
_Small = Annotated[int, msgspec.Meta(ge=0, le=63)]
_Ms = Annotated[int, msgspec.Meta(ge=0, le=600_000)]


class Prompt(enum.StrEnum):
    """What a prompt has to do with those before it."""

    FRESH = "fresh"
    """It begins like no other."""
    REPEATED = "repeated"
    """It is the one that was sent last."""
    SHARES = "shares"
    """It begins like the one that was sent last, and goes on otherwise."""


class Arrive(msgspec.Struct, frozen=True, kw_only=True, tag="arrive", omit_defaults=True, forbid_unknown_fields=True):
    """A client sends a prompt to a prefill engine; unless it is `hurried`, nothing else happens until that is over."""

    engine: _Small = 0
    prompt: Prompt = Prompt.FRESH
    size: _Small = 0
    """How long it is, as a place in `history.LENGTHS`."""
    name: Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)] = ""
    """What the request is called, a number behind it if there is one of that name; "": it gets a plain name."""
    readers: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    """How many requests are to read its KV, as the holder is told."""
    hurried: bool = False


class Decode(msgspec.Struct, frozen=True, kw_only=True, tag="decode", omit_defaults=True, forbid_unknown_fields=True):
    """A hand-off is given to a decode engine, for so many samples of its prompt."""

    which: _Small = 0
    engine: _Small = 0
    samples: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    answer: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Tokens. 64 ask for more than an engine can hold, and are refused at the door."""


class NextTurn(msgspec.Struct, frozen=True, kw_only=True, tag="turn", omit_defaults=True, forbid_unknown_fields=True):
    """The client of a finished turn says more: a prefill engine gets what was said so far, and the turn's hand-off."""

    which: _Small = 0
    engine: _Small = 0
    size: _Small = 0


class Local(msgspec.Struct, frozen=True, kw_only=True, tag="local", omit_defaults=True, forbid_unknown_fields=True):
    """A request that has nothing to do with another engine runs on a decode engine, and takes a slot of it."""

    engine: _Small = 0
    size: _Small = 0
    answer: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort", omit_defaults=True, forbid_unknown_fields=True):
    """The client of a request goes; of one that has been handed over, if none is under way."""

    which: _Small = 0


class Pass(msgspec.Struct, frozen=True, kw_only=True, tag="pass", omit_defaults=True, forbid_unknown_fields=True):
    """Time passes."""

    ms: _Ms = 1


class Crash(msgspec.Struct, frozen=True, kw_only=True, tag="crash", omit_defaults=True, forbid_unknown_fields=True):
    """An engine is killed."""

    which: _Small = 0


class Restart(msgspec.Struct, frozen=True, kw_only=True, tag="restart", omit_defaults=True, forbid_unknown_fields=True):
    """An engine starts where one was killed."""

    which: _Small = 0


class Freeze(msgspec.Struct, frozen=True, kw_only=True, tag="freeze", omit_defaults=True, forbid_unknown_fields=True):
    """An engine stands still."""

    which: _Small = 0


class Thaw(msgspec.Struct, frozen=True, kw_only=True, tag="thaw", omit_defaults=True, forbid_unknown_fields=True):
    """One that stands still goes on."""

    which: _Small = 0


class LinkFault(enum.StrEnum):
    """What happens to a message."""

    LOSE = "lose"
    REPEAT = "repeat"
    DELAY = "delay"
    REORDER = "reorder"
    """It comes behind those of the next steps."""
    DAMAGE = "damage"


class Messages(
    msgspec.Struct, frozen=True, kw_only=True, tag="messages", omit_defaults=True, forbid_unknown_fields=True
):
    """Something happens to the next `count` messages of a kind."""

    fault: LinkFault = LinkFault.LOSE
    kind: Kind = Kind.ANY
    count: _Small = 1
    ms: _Ms = 1
    """By how much it is late, or its repetition is."""
    place: _Small = 0
    """Where it is damaged."""


class ReadFault(enum.StrEnum):
    """What happens to a read."""

    FAIL = "fail"
    SLOW = "slow"
    NEVER_END = "never-end"


class Reads(msgspec.Struct, frozen=True, kw_only=True, tag="reads", omit_defaults=True, forbid_unknown_fields=True):
    """Something happens to the next `count` reads."""

    fault: ReadFault = ReadFault.FAIL
    count: _Small = 1
    ms: _Ms = 1
    early: bool = False
    """The bytes are copied at the beginning, and not at the end."""


class Questions(
    msgspec.Struct, frozen=True, kw_only=True, tag="questions", omit_defaults=True, forbid_unknown_fields=True
):
    """The next `count` questions are lost; with a time, their ways there or back take so long."""

    count: _Small = 1
    there_ms: _Ms = 0
    back_ms: _Ms = 0


class Again(msgspec.Struct, frozen=True, kw_only=True, tag="again", omit_defaults=True, forbid_unknown_fields=True):
    """A message of a kind that was sent arrives once more."""

    which: _Small = 0
    kind: Kind = Kind.ANY


class Inject(msgspec.Struct, frozen=True, kw_only=True, tag="inject", omit_defaults=True, forbid_unknown_fields=True):
    """Bytes that nobody sent arrive at an engine, from another one."""

    engine: _Small = 0
    data: Annotated[bytes, msgspec.Meta(max_length=MESSAGE_BYTES_MAX)] = b""


class Renew(msgspec.Struct, frozen=True, kw_only=True, tag="renew", omit_defaults=True, forbid_unknown_fields=True):
    """The client of a finished turn keeps it alive."""

    which: _Small = 0


Action: TypeAlias = (
    Arrive | Decode | NextTurn | Local | Abort | Pass | Crash | Restart | Freeze | Thaw | Messages | Reads | Questions
    | Again | Inject | Renew
)  # fmt: skip
FAULTS: Final = (Crash, Freeze, Messages, Reads, Questions, Again, Inject)
"""After one of these a history is not calm any more: more may rightly go wrong in it."""
