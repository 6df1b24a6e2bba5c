"""The memory service's rules: who may write, what is published, what a device's memory is charged with.

Pure: no clock, socket, thread or chance. The rim (`reference_impl.memory_service`) calls one method a request and does
what the answer says; a `Refused` whose reason is in `WAITABLE` may be tried again after any change of state, and the
rim bounds that wait (KVC-MEM-010).

- A tag (`weights`, `kv_cache`) has at most one writer, and any number of readers of what is committed (KVC-MEM-004).
- A *holding* is the memory of one writer session. It is freed as a whole, so that the cost of a dead writer does not
  grow with what it held (KVC-MEM-005).
- A commit publishes the holding as an immutable `Layout` of a new generation. The holding it replaces stays for those
  sessions that read it, and is freed with the last of them. So a new writer needs no reader to leave.
- After its commit a session is a reader of what it published.
- Writers of `kv_cache` carry an epoch. One lower than the highest seen is refused, and a higher one fences the writer
  before it: that one keeps its memory until its session ends, and may do nothing else (KVC-LOCK-004).
"""

from __future__ import annotations

import enum
import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

NAME_CHARS_MAX = 200
ENGINE_ID_CHARS_MAX = 200
METADATA_BYTES_MAX = 1 << 20
COMMITS_REMEMBERED = 256
PAGE_BYTES = 4096


class Tag(enum.StrEnum):
    """What memory is for."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class Mode(enum.StrEnum):
    """What a session may do."""

    WRITER = "writer"
    READER = "reader"


class Reason(enum.StrEnum):
    """Why a request was refused."""

    WRITER_BUSY = "writer_busy"
    NOTHING_COMMITTED = "nothing_committed"
    STALE_EPOCH = "stale_epoch"
    FENCED = "fenced"
    NOT_A_WRITER = "not_a_writer"
    NAME_TAKEN = "name_taken"
    UNKNOWN_NAME = "unknown_name"
    SHORT_OF_MEMORY = "short_of_memory"
    SHORT_OF_HANDLES = "short_of_handles"
    TOO_LARGE = "too_large"
    ALREADY_COMMITTED = "already_committed"
    BAD_REQUEST = "bad_request"


WAITABLE = frozenset({Reason.WRITER_BUSY, Reason.NOTHING_COMMITTED, Reason.SHORT_OF_MEMORY, Reason.SHORT_OF_HANDLES})


class Refused(Exception):
    """A request was refused; `reason` is for programs, the message is for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One allocation of a layout."""

    name: str
    size_bytes: int


class Layout(msgspec.Struct, frozen=True):
    """What a commit published; it never changes.

    `service` names the server's life, for generations of another life mean other memory. `hash` covers tag, entries in
    their order, and metadata.
    """

    service: str
    tag: Tag
    generation: int
    entries: tuple[Entry, ...]
    metadata: bytes
    hash: str

    @property
    def size_bytes(self) -> int:
        """The sum of the entries' sizes."""
        return sum(entry.size_bytes for entry in self.entries)


def layout_hash(tag: Tag, entries: tuple[Entry, ...], metadata: bytes) -> str:
    """Return blake2b (128 bit, hex) over the canonical msgpack form of a layout."""
    return hashlib.blake2b(msgspec.msgpack.encode((tag, entries, metadata)), digest_size=16).hexdigest()


@dataclass(eq=False)
class Holding:
    """The memory of one writer session, and later of its layout. `holders` counts the sessions that need it."""

    id: int
    tag: Tag
    sizes: dict[str, int] = field(default_factory=dict)
    charged_bytes: int = 0
    holders: int = 1
    layout: Layout | None = None


@dataclass(eq=False)
class Session:
    """One client's connection. `mode` turns to READER with its commit."""

    id: int
    tag: Tag
    mode: Mode
    engine_id: str
    epoch: int
    holding: Holding
    fenced: bool = False
    commit_id: str | None = None


class Committed(msgspec.Struct, frozen=True):
    """The answer to a commit. `freed` are holdings that nobody needs now; `repeated` says it was published before."""

    layout: Layout
    freed: tuple[Holding, ...] = ()
    repeated: bool = False


class Figures(msgspec.Struct, frozen=True):
    """What a device's service holds. `used_bytes` includes `freeing_bytes`, which the kernel has not given back yet."""

    device: str
    service: str
    capacity_bytes: int
    used_bytes: int
    freeing_bytes: int
    allocations: int
    sessions: int
    epoch: int


class Sessions:
    """The sessions of one device.

    `capacity_bytes` is what may be allocated in all, counted in `granularity_bytes`; `allocations_max` bounds the
    descriptors.
    """

    def __init__(
        self,
        *,
        device: str,
        service: str,
        capacity_bytes: int,
        allocations_max: int = 65_536,
        granularity_bytes: int = PAGE_BYTES,
    ) -> None:
        if capacity_bytes <= 0:
            raise ValueError(f"capacity_bytes must be positive, got {capacity_bytes}")
        self._device, self._service = device, service
        self._capacity_bytes, self._allocations_max = capacity_bytes, allocations_max
        self._granularity_bytes = granularity_bytes
        self._used_bytes = self._freeing_bytes = self._allocations = 0
        self._last_id = self._last_generation = self._epoch = 0
        self._sessions: dict[int, Session] = {}
        self._writers: dict[Tag, Session] = {}
        self._current: dict[Tag, Holding] = {}
        self._commits: OrderedDict[str, Layout] = OrderedDict()

    def figures(self) -> Figures:
        """Return what the device's memory is charged with."""
        return Figures(
            self._device,
            self._service,
            self._capacity_bytes,
            self._used_bytes,
            self._freeing_bytes,
            self._allocations,
            len(self._sessions),
            self._epoch,
        )

    def session(self, session_id: int) -> Session:
        """Return an open session. Raises `Refused` (BAD_REQUEST) if there is none of that number."""
        try:
            return self._sessions[session_id]
        except KeyError:
            raise Refused(Reason.BAD_REQUEST, f"no session {session_id} is open; open one first") from None

    def open(self, tag: Tag, mode: Mode, engine_id: str, epoch: int) -> Session:
        """Open a session. Raises `Refused`: WRITER_BUSY, NOTHING_COMMITTED, STALE_EPOCH, BAD_REQUEST."""
        if not engine_id or len(engine_id) > ENGINE_ID_CHARS_MAX:
            raise Refused(
                Reason.BAD_REQUEST, f"engine_id must have 1 to {ENGINE_ID_CHARS_MAX} characters, got {len(engine_id)}"
            )
        if mode is Mode.WRITER:
            return self._open_writer(tag, engine_id, epoch)
        holding = self._current.get(tag)
        if holding is None:
            raise Refused(
                Reason.NOTHING_COMMITTED, f"{self._device} has no committed {tag}; wait for its writer or become it"
            )
        holding.holders += 1
        return self._add(tag, mode, engine_id, epoch, holding)

    def _open_writer(self, tag: Tag, engine_id: str, epoch: int) -> Session:
        writer = self._writers.get(tag)
        if tag is Tag.KV_CACHE:
            if epoch < self._epoch:
                raise Refused(
                    Reason.STALE_EPOCH,
                    f"{engine_id} comes with epoch {epoch}, but {self._device} has seen {self._epoch}: it was replaced",
                )
            self._epoch = epoch
            if writer is not None and writer.epoch < epoch:
                writer.fenced = True
                writer = None
        if writer is not None:
            raise Refused(
                Reason.WRITER_BUSY, f"{writer.engine_id} writes {tag} of {self._device}; wait until it commits or ends"
            )
        session = self._add(tag, Mode.WRITER, engine_id, epoch, Holding(self._next_id(), tag))
        self._writers[tag] = session
        return session

    def _add(self, tag: Tag, mode: Mode, engine_id: str, epoch: int, holding: Holding) -> Session:
        session = Session(self._next_id(), tag, mode, engine_id, epoch, holding)
        self._sessions[session.id] = session
        return session

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def allocate(self, session_id: int, name: str, size_bytes: int) -> Holding:
        """Charge an allocation to a writer's holding and return it; the rim then makes the memory.

        Raises `Refused`: FENCED, NOT_A_WRITER, NAME_TAKEN, TOO_LARGE, SHORT_OF_MEMORY, SHORT_OF_HANDLES, BAD_REQUEST.
        """
        session = self._writing(session_id)
        if not name or len(name) > NAME_CHARS_MAX or size_bytes <= 0:
            raise Refused(
                Reason.BAD_REQUEST,
                f"allocate needs a name of 1 to {NAME_CHARS_MAX} characters and a positive size, "
                f"got {len(name)} characters and {size_bytes} bytes",
            )
        if name in session.holding.sizes:
            raise Refused(Reason.NAME_TAKEN, f"{name!r} is allocated already in this session; choose another name")
        charge = self._charge(size_bytes)
        if charge > self._capacity_bytes:
            raise Refused(
                Reason.TOO_LARGE, f"{name!r} needs {charge} bytes, {self._device} has {self._capacity_bytes} in all"
            )
        if self._used_bytes + charge > self._capacity_bytes:
            raise Refused(
                Reason.SHORT_OF_MEMORY,
                f"{name!r} needs {charge} bytes, but {self._device} has {self._capacity_bytes - self._used_bytes} free "
                f"of {self._capacity_bytes} ({self._freeing_bytes} are being freed); free some or raise the capacity",
            )
        if self._allocations >= self._allocations_max:
            raise Refused(
                Reason.SHORT_OF_HANDLES,
                f"{self._device} holds {self._allocations} allocations, its limit; merge them or raise `ulimit -n`",
            )
        self._used_bytes += charge
        self._allocations += 1
        session.holding.charged_bytes += charge
        session.holding.sizes[name] = size_bytes
        return session.holding

    def take_back(self, session_id: int, name: str) -> None:
        """Undo an `allocate` for which the rim could not make the memory."""
        holding = self.session(session_id).holding
        charge = self._charge(holding.sizes.pop(name))
        holding.charged_bytes -= charge
        self._used_bytes -= charge
        self._allocations -= 1

    def _charge(self, size_bytes: int) -> int:
        return -(-size_bytes // self._granularity_bytes) * self._granularity_bytes

    def _writing(self, session_id: int) -> Session:
        session = self.session(session_id)
        if session.fenced:
            raise Refused(
                Reason.FENCED,
                f"{session.engine_id} (epoch {session.epoch}) was replaced by epoch {self._epoch}; it must end",
            )
        if session.mode is not Mode.WRITER:
            raise Refused(
                Reason.NOT_A_WRITER, f"session {session_id} reads committed {session.tag}; open a writer session"
            )
        return session

    def commit(self, session_id: int, commit_id: str, metadata: bytes) -> Committed:
        """Publish a writer's holding. The same commit again answers the same (KVC-MEM-006).

        Raises `Refused`: FENCED, NOT_A_WRITER, ALREADY_COMMITTED (another commit of this session), BAD_REQUEST.
        """
        session = self.session(session_id)
        if session.commit_id is not None:
            return self._commit_again(session, commit_id, metadata)
        session = self._writing(session_id)
        if not commit_id or len(commit_id) > NAME_CHARS_MAX or commit_id in self._commits:
            raise Refused(Reason.BAD_REQUEST, f"commit id {commit_id[:80]!r} is empty, too long or used before")
        if len(metadata) > METADATA_BYTES_MAX:
            raise Refused(Reason.BAD_REQUEST, f"metadata may have {METADATA_BYTES_MAX} bytes, got {len(metadata)}")
        if not session.holding.sizes:
            raise Refused(Reason.BAD_REQUEST, "nothing is allocated in this session; allocate before the commit")
        layout = self._publish(session, metadata)
        session.commit_id, session.mode = commit_id, Mode.READER
        self._remember(commit_id, layout)
        del self._writers[session.tag]
        replaced = self._current.get(session.tag)
        self._current[session.tag] = session.holding
        freed = () if replaced is None or replaced.holders else (self._start_freeing(replaced),)
        return Committed(layout, freed)

    def _commit_again(self, session: Session, commit_id: str, metadata: bytes) -> Committed:
        layout = session.holding.layout
        assert layout is not None, "a session with a commit id holds a layout"
        if (commit_id, metadata) != (session.commit_id, layout.metadata):
            raise Refused(
                Reason.ALREADY_COMMITTED,
                f"session {session.id} committed {session.commit_id!r} (generation {layout.generation}) before; "
                "open a new writer session for another commit",
            )
        return Committed(layout, repeated=True)

    def _publish(self, session: Session, metadata: bytes) -> Layout:
        self._last_generation += 1
        entries = tuple(Entry(name, size) for name, size in session.holding.sizes.items())
        digest = layout_hash(session.tag, entries, metadata)
        layout = Layout(self._service, session.tag, self._last_generation, entries, metadata, digest)
        session.holding.layout = layout
        return layout

    def _remember(self, commit_id: str, layout: Layout) -> None:
        self._commits[commit_id] = layout
        while len(self._commits) > COMMITS_REMEMBERED:
            self._commits.popitem(last=False)

    def commit_status(self, commit_id: str) -> Layout | None:
        """Return what a commit published, from whatever session it is asked; None if it was not, or is long past."""
        return self._commits.get(commit_id)

    def layout(self, session_id: int) -> Layout:
        """Return the layout that a session reads. Raises `Refused` (NOTHING_COMMITTED) before a writer's commit."""
        session = self.session(session_id)
        if session.holding.layout is None:
            raise Refused(Reason.NOTHING_COMMITTED, f"session {session_id} has not committed its {session.tag} yet")
        return session.holding.layout

    def current(self, tag: Tag) -> Layout | None:
        """Return the newest layout of a tag: what a parked client compares with its own on waking (KVC-MEM-008)."""
        holding = self._current.get(tag)
        return None if holding is None else holding.layout

    def export(self, session_id: int, names: tuple[str, ...]) -> Session:
        """Check that a session may have the descriptors of `names`; its mode says whether to write.

        Raises `Refused`: FENCED, UNKNOWN_NAME.
        """
        session = self.session(session_id)
        if session.fenced:
            self._writing(session_id)
        for name in names:
            if name not in session.holding.sizes:
                raise Refused(
                    Reason.UNKNOWN_NAME, f"{name[:80]!r} is no allocation of session {session_id}; see its layout"
                )
        return session

    def close(self, session_id: int) -> tuple[Holding, ...]:
        """End a session and return the holdings that nobody needs now. Takes the same time whatever was held."""
        session = self._sessions.pop(session_id)
        if self._writers.get(session.tag) is session:
            del self._writers[session.tag]
        holding = session.holding
        holding.holders -= 1
        if holding.holders or self._current.get(session.tag) is holding:
            return ()
        return (self._start_freeing(holding),)

    def _start_freeing(self, holding: Holding) -> Holding:
        self._freeing_bytes += holding.charged_bytes
        return holding

    def freed(self, holding: Holding) -> None:
        """Take note that the kernel has given a holding's memory back: only now it may be allocated again."""
        self._freeing_bytes -= holding.charged_bytes
        self._used_bytes -= holding.charged_bytes
        self._allocations -= len(holding.sizes)
