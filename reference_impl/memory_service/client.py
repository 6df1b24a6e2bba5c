"""An engine's side of the memory service: blocking calls, each with a deadline."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from reference_impl.memory_service import wire
from reference_impl.memory_service.backend import Access
from reference_impl.memory_service.errors import ProtocolError, ServiceGone, ServiceTimeout, refusal
from reference_impl.memory_service.host import HostBackend
from reference_impl.memory_service.mapping import MappedRegion
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_S, s_to_ns
from reference_impl.rules.sessions import Entry, Figures, Layout, Mode, Tag

R = TypeVar("R", bound=wire.Reply)


class _Channel:
    """One connection. A failed call closes it: after that nobody knows what the service still means to say."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._lock = threading.Lock()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.open = True
        try:
            # A full backlog would block connect(2) for ever; a send timeout bounds that too.
            whole_s, rest = divmod(max(timeout_s, 0.001), 1)
            self._sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(whole_s), int(rest * 1e6))
            )
            self._sock.connect(str(path))
        except OSError as error:
            self.close()
            why = error.strerror or str(error)
            raise ServiceGone(f"no memory service answers at {path}: {why}; start it, or correct the path") from error

    def call(self, request: wire.Request, expected: type[R], wait_s: float = 0.0) -> R:
        """Send a request that brings no descriptors and return its answer."""
        descriptors: list[int] = []
        reply = self.exchange(request, expected, descriptors, wait_s)
        if descriptors:
            wire.close_all(descriptors)
            raise ProtocolError(f"{self._path} sent descriptors that nobody asked for; is this a memory service?")
        return reply

    def exchange(self, request: wire.Request, expected: type[R], into: list[int], wait_s: float = 0.0) -> R:
        """Send a request and return its answer, its descriptors `into` a list.

        Raises `RequestRefused`, `ServiceTimeout` after `timeout_s` (and `wait_s`, where the service may wait),
        `ServiceGone`, `ProtocolError`. After an error the list is empty.
        """
        deadline_ns = now_ns() + s_to_ns(self._timeout_s + wait_s)
        with self._lock:
            if not self.open:
                raise ServiceGone(f"the session at {self._path} is over; open a new one")
            try:
                reply = self._exchange(wire.frame(request), into, deadline_ns)
                if not isinstance(reply, expected | wire.RefusedWith):
                    raise ProtocolError(f"{self._path} answered {type(reply).__name__}, not {expected.__name__}")
            except BaseException:
                wire.close_all(into)
                self.close()
                raise
        if isinstance(reply, expected):
            return reply
        assert isinstance(reply, wire.RefusedWith)
        wire.close_all(into)
        raise refusal(reply.reason, reply.message)

    def _exchange(self, request: bytes, into: list[int], deadline_ns: int) -> wire.Reply:
        reader = wire.FrameReader(wire.REPLY_BYTES_MAX)
        try:
            self._patience(deadline_ns)
            self._sock.sendall(request)
            while (body := reader.take()) is None:
                self._patience(deadline_ns)
                data, cut = wire.receive(self._sock, 1 << 20, into)
                if cut:
                    raise ServiceGone(
                        f"{len(into)} of the descriptors from {self._path} fit into this process; raise `ulimit -n`"
                    )
                if not data:
                    raise ServiceGone(f"the memory service at {self._path} closed the connection; is it alive?")
                reader.feed(data)
        except TimeoutError:
            raise ServiceTimeout(
                f"the memory service at {self._path} did not answer within {self._timeout_s} s; is it stopped?"
            ) from None
        except OSError as error:
            raise ServiceGone(f"the memory service at {self._path} is gone: {error.strerror}") from error
        if reader.partial:
            raise ProtocolError(f"{self._path} sent more than the answer; is this a memory service?")
        return wire.decode_reply(body)

    def _patience(self, deadline_ns: int) -> None:
        left_ns = deadline_ns - now_ns()
        if left_ns <= 0:
            raise TimeoutError
        self._sock.settimeout(left_ns / NS_PER_S)

    def close(self) -> None:
        """Close the connection. Closing twice is harmless."""
        self.open = False
        self._sock.close()


class MemoryClient:
    """A session of the memory service at `socket_path`. It lasts as long as this object, or this process.

    A WRITER allocates and commits; a READER reads what is committed. After its commit a writer is a reader of what it
    published. `epoch` fences the writers of `kv_cache` (KVC-LOCK-004). `timeout_s` bounds every call. `wait_s` bounds
    how long to wait for admission: a writer for the writer before it, a reader for the first commit.

    Any thread may call; calls are served one after the other. Not to be used across fork().

    Raises `ServiceGone`, `ServiceTimeout`, `WriterBusy`, `NothingCommitted`, `StaleEpoch`.
    """

    def __init__(
        self,
        socket_path: str | Path,
        *,
        tag: Tag,
        mode: Mode,
        engine_id: str,
        epoch: int = 0,
        timeout_s: float = 5.0,
        wait_s: float = 0.0,
    ) -> None:
        self.tag, self.mode, self.engine_id, self.epoch = tag, mode, engine_id, epoch
        self._timeout_s = timeout_s
        self._backend = HostBackend()
        self._entries: list[Entry] = []
        self._regions: list[MappedRegion] = []
        self._channel = _Channel(Path(socket_path), timeout_s)
        try:
            opened = self._channel.call(wire.Open(tag, mode, engine_id, epoch, wait_s), wire.Opened, wait_s)
        except BaseException:
            self._channel.close()
            raise
        self.session, self.service = opened.session, opened.service
        self._layout = opened.layout

    @property
    def commit_id(self) -> str:
        """What this session's commit is called. Known before it, so that a lost reply can be asked for again."""
        return f"{self.service}/{self.session}"

    def allocate(self, name: str, size_bytes: int, wait_s: float = 0.0) -> None:
        """Allocate `size_bytes` of zeroed memory, waiting up to `wait_s` while the device is short of it (KVC-MEM-010).

        Raises `ShortOfMemory`, `TooLarge`, `NameTaken`, `NotAWriter`, `Fenced`, `BadRequest`.
        """
        self._channel.call(wire.Allocate(name, size_bytes, wait_s), wire.Done, wait_s)
        self._entries.append(Entry(name, size_bytes))

    def commit(self, metadata: bytes = b"") -> Layout:
        """Publish what was allocated, immutable from here on; this session's regions turn read-only where they stand.

        To commit the same again is harmless. If the reply is lost (`ServiceGone`, `ServiceTimeout`), ask
        `commit_status(socket_path, client.commit_id)`. Raises `NotAWriter`, `Fenced`, `AlreadyCommitted`, `BadRequest`.
        """
        published = self._channel.call(wire.Commit(self.commit_id, metadata), wire.Published)
        if published.layout is None:
            raise ProtocolError("the memory service answered a commit without a layout")
        self.mode, self._layout = Mode.READER, published.layout
        for region in self._regions:
            region.freeze(self._layout)
        return self._layout

    def layout(self) -> Layout:
        """Return the layout that this session reads. Raises `NothingCommitted` before a writer's commit."""
        if self._layout is None:
            self._layout = self._channel.call(wire.GetLayout(current=False), wire.Published).layout
        if self._layout is None:
            raise ProtocolError("the memory service answered without a layout")
        return self._layout

    def current_layout(self) -> Layout | None:
        """Return the newest layout of this tag, which may be later than this session's."""
        return self._channel.call(wire.GetLayout(current=True), wire.Published).layout

    def export(self, name: str) -> int:
        """Return a descriptor of an allocation, which the caller closes: read-only for a reader."""
        return self.export_many((name,))[0]

    def export_many(self, names: tuple[str, ...]) -> list[int]:
        """Return descriptors in the order of the names; the caller closes them. Raises `UnknownName`, `Fenced`."""
        every: list[int] = []
        try:
            for first in range(0, len(names), wire.DESCRIPTORS_MAX):
                batch, got = names[first : first + wire.DESCRIPTORS_MAX], list[int]()
                reply = self._channel.exchange(wire.Export(batch), wire.Exported, got)
                every += got
                if not reply.count == len(got) == len(batch):
                    self._channel.close()
                    raise ProtocolError(f"asked for {len(batch)} descriptors, got {len(got)}; is `ulimit -n` too low?")
        except BaseException:
            wire.close_all(every)
            raise
        return every

    def region(self) -> MappedRegion:
        """Reserve one range of addresses for all that this session has allocated, or reads; map it with `.map()`.

        The region ends with this client. Raises `BadRequest` for an empty session, `BackendError`.
        """
        writing = self.mode is Mode.WRITER
        entries = tuple(self._entries) if writing else self.layout().entries
        descriptors = self.export_many(tuple(entry.name for entry in entries))
        access = Access.WRITE if writing else Access.READ
        region = MappedRegion.of(self._backend, entries, descriptors, access, None if writing else self._layout)
        self._regions.append(region)
        return region

    def close(self) -> None:
        """End the session, and its regions. When this returns in time, the service has let the session go."""
        for region in self._regions:
            region.close()
        self._regions.clear()
        if self._channel.open:
            with suppress(ServiceGone, ServiceTimeout, ProtocolError):  # it is over either way
                self._channel.call(wire.Close(), wire.Done)
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def commit_status(socket_path: str | Path, commit_id: str, timeout_s: float = 5.0) -> Layout | None:
    """Return what the commit published, or None if it was not made: for a writer whose reply was lost (KVC-MEM-006)."""
    channel = _Channel(Path(socket_path), timeout_s)
    try:
        return channel.call(wire.CommitStatus(commit_id), wire.Published).layout
    finally:
        channel.close()


def service_figures(socket_path: str | Path, timeout_s: float = 5.0) -> Figures:
    """Return what the service holds: bytes, allocations, sessions, epoch."""
    channel = _Channel(Path(socket_path), timeout_s)
    try:
        return channel.call(wire.GetFigures(), wire.FiguresAre).figures
    finally:
        channel.close()
