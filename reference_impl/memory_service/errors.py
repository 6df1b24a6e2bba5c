"""What can go wrong between an engine and the memory service; each message says what, where, and what to do."""

from __future__ import annotations

from reference_impl.rules.sessions import Reason


class MemoryServiceError(Exception):
    """Any failure of the memory service or of its client."""


class ServiceGone(MemoryServiceError):
    """The service cannot be reached, or closed the connection: the session is over."""


class ServiceTimeout(MemoryServiceError):
    """The service did not answer in time: the session was closed, and what was asked may or may not have happened."""


class ProtocolError(MemoryServiceError):
    """The other side sent what the protocol does not allow."""


class SocketInUse(MemoryServiceError):
    """A live server has the socket already."""


class BackendError(MemoryServiceError):
    """The backend could not create, import, reserve or map memory."""


class NotMapped(MemoryServiceError):
    """A region was used while it is not mapped, or is closed."""


class LayoutChanged(MemoryServiceError):
    """The layout is another than the one this region was built from (KVC-MEM-008)."""


class RequestRefused(MemoryServiceError):
    """The service refused a request by its rules; the session stays as it was."""

    reason: Reason = Reason.BAD_REQUEST


class BadRequest(RequestRefused):
    """The request made no sense."""


class WriterBusy(RequestRefused):
    """Another writer has the tag."""

    reason = Reason.WRITER_BUSY


class NothingCommitted(RequestRefused):
    """There is nothing to read yet."""

    reason = Reason.NOTHING_COMMITTED


class StaleEpoch(RequestRefused):
    """A later engine has been here: this one was replaced (KVC-LOCK-004)."""

    reason = Reason.STALE_EPOCH


class Fenced(RequestRefused):
    """A later engine took over while this session was open (KVC-LOCK-004)."""

    reason = Reason.FENCED


class NotAWriter(RequestRefused):
    """The session only reads."""

    reason = Reason.NOT_A_WRITER


class NameTaken(RequestRefused):
    """The name is allocated already."""

    reason = Reason.NAME_TAKEN


class UnknownName(RequestRefused):
    """The session has no such allocation."""

    reason = Reason.UNKNOWN_NAME


class ShortOfMemory(RequestRefused):
    """The device has no room now, and had none until the wait was over (KVC-MEM-010)."""

    reason = Reason.SHORT_OF_MEMORY


class ShortOfHandles(RequestRefused):
    """The service holds as many allocations as it may."""

    reason = Reason.SHORT_OF_HANDLES


class TooLarge(RequestRefused):
    """The device could never hold it."""

    reason = Reason.TOO_LARGE


class AlreadyCommitted(RequestRefused):
    """The session published something else before."""

    reason = Reason.ALREADY_COMMITTED


_BY_REASON: dict[Reason, type[RequestRefused]] = {
    kind.reason: kind
    for kind in (
        BadRequest,
        WriterBusy,
        NothingCommitted,
        StaleEpoch,
        Fenced,
        NotAWriter,
        NameTaken,
        UnknownName,
        ShortOfMemory,
        ShortOfHandles,
        TooLarge,
        AlreadyCommitted,
    )
}


def refusal(reason: Reason, message: str) -> RequestRefused:
    """Return the typed error for a refusal that came over the wire."""
    return _BY_REASON[reason](message)
