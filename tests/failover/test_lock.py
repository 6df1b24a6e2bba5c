import asyncio
import fcntl
import itertools
import mmap
import os
import random
import signal
import stat
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from reference_impl.failover import lock_file
from reference_impl.failover.lock import (
    FlockFailoverLock,
    LockCorrupt,
    LockMisuse,
    LockReplaced,
    LockUnusable,
    read_epoch,
    read_owner,
)
from reference_impl.failover.lock_file import LockFile
from tests.failover.children import PATIENCE_S, Board, Child, Family, blocked_count, is_blocked_on
from tests.waiting import until, until_async


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w0.lock"


@pytest.fixture
def family() -> Iterator[Family]:
    family = Family()
    yield family
    family.end()


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    board = Board(tmp_path / "board")
    yield board
    board.close()


# What breaks the lock, for the twins. Each runs in the child processes only.
Sabotage = Callable[[], None]


def nothing() -> None:
    pass


def no_inode_check() -> None:
    LockFile.is_current = lambda _self: True


def no_close_at_fork() -> None:
    LockFile.disown = lambda _self: None


def no_lock() -> None:
    LockFile.lock = lambda _self: None


def no_epoch_write() -> None:
    os.pwrite = lambda _fd, data, _offset: len(data)


def hold(path: Path, board: Board, name: str, sabotage: Sabotage = nothing, then: Callable[[], object] = signal.pause):
    """A child's body: take the lock, say so, and go on with `then`, holding it."""

    def body() -> None:
        sabotage()

        async def main() -> None:
            epoch = await FlockFailoverLock(path).acquire(name)
            board.say(f"{name} {epoch}")
            then()

        asyncio.run(main())

    return body


def start_holder(family: Family, path: Path, board: Board, name: str, **options) -> Child:
    child = family.start(hold(path, board, name, **options))
    board.wait_for(name)
    return child


def start_waiter(family: Family, path: Path, board: Board, name: str, **options) -> Child:
    child = family.start(hold(path, board, name, **options))
    until(lambda: is_blocked_on(child.pid, path), PATIENCE_S, f"{name} waits in the kernel")
    return child


def acquire_now(path: Path) -> int:
    """Take the lock and give it back; fails if somebody holds it."""

    async def main() -> int:
        async with asyncio.timeout(PATIENCE_S), FlockFailoverLock(path).hold("quick") as epoch:
            return epoch

    return asyncio.run(main())


# Whatever ends a holder, the next one proceeds (KVC-LOCK-002).


def die_of(how: str, child: Child) -> None:
    if how == "stop and kill":
        child.signal(signal.SIGSTOP)
    child.kill()


@pytest.mark.rule("KVC-LOCK-002")
@pytest.mark.parametrize("how", ["kill", "stop and kill"])
def test_a_killed_holder_is_followed_by_the_waiter(path, family, board, how):
    first = start_holder(family, path, board, "first")
    waiter = start_waiter(family, path, board, "second")
    die_of(how, first)
    assert board.wait_for("second") == "2"
    assert read_owner(path) == f"second pid {waiter.pid}"


@pytest.mark.rule("KVC-LOCK-002")
@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(lambda: os._exit(0), id="exit"),
        pytest.param(os.abort, id="crash"),
        pytest.param(lambda: signal.raise_signal(signal.SIGTERM), id="SIGTERM"),
    ],
)
def test_a_holder_that_ends_by_itself_is_followed_by_the_waiter(path, family, board, ending):
    start, end = os.pipe()

    def on_word() -> None:
        os.read(start, 1)
        ending()

    first = start_holder(family, path, board, "first", then=on_word)
    start_waiter(family, path, board, "second")
    os.write(end, b"!")
    first.wait()
    os.close(start)
    os.close(end)
    assert board.wait_for("second") == "2"


def test_a_stopped_holder_keeps_the_lock(path, family, board):
    first = start_holder(family, path, board, "first")
    first.signal(signal.SIGSTOP)
    second = start_waiter(family, path, board, "second")
    assert is_blocked_on(second.pid, path)
    assert read_epoch(path) == 1


# The lock belongs to one process (KVC-LOCK-003).


def is_kept_by_a_forked_child(path: Path, family: Family, board: Board, sabotage: Sabotage) -> bool:
    """Kill a holder whose forked child lives on; whether the waiter is still shut out afterwards."""

    def leave_a_child() -> None:
        if os.fork() == 0:
            board.say(f"grandchild {os.getpid()}")
        signal.pause()

    first = start_holder(family, path, board, "first", sabotage=sabotage, then=leave_a_child)
    family.adopt(int(board.wait_for("grandchild")))
    second = start_waiter(family, path, board, "second")
    # The kernel hands the lock on before a dead process can be reaped, so nothing more will come after this.
    first.kill()
    return is_blocked_on(second.pid, path)


@pytest.mark.rule("KVC-LOCK-003")
def test_a_forked_child_does_not_keep_its_parents_lock(path, family, board):
    assert not is_kept_by_a_forked_child(path, family, board, nothing)
    assert board.wait_for("second") == "2"


def test_a_lock_that_is_not_closed_at_fork_is_caught(path, family, board):
    assert is_kept_by_a_forked_child(path, family, board, no_close_at_fork)


@pytest.mark.rule("KVC-LOCK-003")
def test_a_child_forked_while_its_parent_waits_does_not_keep_the_lock_either(path, family, board):
    first = start_holder(family, path, board, "first")

    def wait_and_fork() -> None:
        async def main() -> None:
            waiting = asyncio.create_task(FlockFailoverLock(path).acquire("second"))
            await until_async(lambda: blocked_count(os.getpid(), path), PATIENCE_S, "the parent waits")
            if os.fork() == 0:
                board.say(f"grandchild {os.getpid()}")
                signal.pause()
            board.say(f"second {await waiting}")
            signal.pause()

        asyncio.run(main())

    second = family.start(wait_and_fork)
    family.adopt(int(board.wait_for("grandchild")))
    first.kill()
    assert board.wait_for("second") == "2"
    second.kill()
    assert acquire_now(path) == 3


@pytest.mark.rule("KVC-LOCK-003")
def test_an_executed_child_does_not_keep_the_lock(path, family, board):
    def run_a_program() -> None:
        program = subprocess.Popen(["sleep", "600"], close_fds=False)
        board.say(f"program {program.pid}")
        signal.pause()

    first = start_holder(family, path, board, "first", then=run_a_program)
    family.adopt(int(board.wait_for("program")))
    first.kill()
    assert acquire_now(path) == 2


def inode_of(fd: int) -> int | None:
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return None


def copies_in_children_forked_at_any_moment(path: Path, family: Family) -> int:
    """Fork while another thread takes and gives back the lock; how many children have a copy of the descriptor."""
    stop = threading.Event()

    def take_and_give_back() -> None:
        while not stop.is_set():
            lock_file.take(path).close()

    def look() -> None:
        wanted = path.stat().st_ino
        os._exit(any(inode_of(fd) == wanted for fd in range(256)))

    thread = threading.Thread(target=take_and_give_back)
    thread.start()
    children = [family.start(look) for _ in range(60)]
    stop.set()
    thread.join()
    return sum(child.wait() for child in children)


@pytest.mark.rule("KVC-LOCK-003")
def test_no_child_gets_a_copy_whenever_it_is_forked(path, family):
    assert copies_in_children_forked_at_any_moment(path, family) == 0


def test_copies_in_children_are_caught(path, family, monkeypatch):
    monkeypatch.setattr(LockFile, "disown", lambda _self: None)
    assert copies_in_children_forked_at_any_moment(path, family) > 0


@pytest.mark.rule("KVC-LOCK-003")
def test_a_forked_child_can_neither_release_nor_claim_its_parents_lock(path, family):
    async def main() -> None:
        lock = FlockFailoverLock(path)
        await lock.acquire("parent")

        def child() -> None:
            assert not lock.held
            assert lock.epoch is None
            with pytest.raises(LockMisuse, match="does not hold it"):
                lock.release()

        assert family.start(child).wait() == 0
        assert lock.held
        assert lock.is_intact()
        rival = FlockFailoverLock(path)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rival.acquire("rival"), 0.05)
        lock.release()

    asyncio.run(main())


def test_a_forked_child_can_use_the_inherited_object_for_itself(path, family, board):
    lock = FlockFailoverLock(path)

    async def acquire() -> int:
        return await lock.acquire("anybody")

    async def wait_in_vain() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lock.acquire("anybody"), 0.05)

    holder = start_holder(family, path, board, "first")
    asyncio.run(wait_in_vain())
    child = family.start(lambda: board.say(f"second {asyncio.run(acquire())}"))
    until(lambda: is_blocked_on(child.pid, path), PATIENCE_S, "the child waits on its own")
    holder.kill()
    assert board.wait_for("second") == "2"
    assert child.wait() == 0


# The lock belongs to one file, whatever happens to the path (KVC-LOCK-003).


def replace(path: Path) -> None:
    fresh = path.with_suffix(".fresh")
    fresh.write_bytes(path.read_bytes())
    fresh.rename(path)


def unlink(path: Path) -> None:
    path.unlink()


def holders_after(change: Callable[[Path], None], path: Path, family: Family, board: Board, sabotage: Sabotage) -> int:
    """How many hold the lock at `path` after it was changed under a holder and a waiter, and the holder died."""
    first = start_holder(family, path, board, "first", sabotage=sabotage)
    waiter = start_waiter(family, path, board, "waiter", sabotage=sabotage)
    change(path)
    start_holder(family, path, board, "newcomer", sabotage=sabotage)
    first.kill()
    until(
        lambda: is_blocked_on(waiter.pid, path) or any(line.startswith("waiter") for line in board.lines()),
        PATIENCE_S,
        "the waiter takes the old file, or turns to the new one",
    )
    return len({line.split()[0] for line in board.lines()} - {"first"})


@pytest.mark.rule("KVC-LOCK-003")
@pytest.mark.parametrize("change", [replace, unlink])
def test_a_waiter_on_a_file_that_is_no_longer_there_turns_to_the_new_one(path, family, board, change):
    assert holders_after(change, path, family, board, nothing) == 1


@pytest.mark.parametrize("change", [replace, unlink])
def test_a_lock_without_inode_check_is_caught(path, family, board, change):
    assert holders_after(change, path, family, board, no_inode_check) == 2


@pytest.mark.rule("KVC-LOCK-003")
@pytest.mark.parametrize("change", [replace, unlink])
def test_a_holder_can_see_that_its_file_is_no_longer_there(path, change):
    async def main() -> None:
        lock = FlockFailoverLock(path)
        assert not lock.is_intact()
        await lock.acquire("e1")
        assert lock.is_intact()
        change(path)
        assert lock.held
        assert not lock.is_intact()
        lock.release()

    asyncio.run(main())


def test_a_path_that_is_replaced_at_every_try_is_given_up(path, monkeypatch):
    locked = LockFile.lock

    def lock_and_replace(self: LockFile) -> None:
        locked(self)
        replace(path)

    monkeypatch.setattr(LockFile, "lock", lock_and_replace)
    with pytest.raises(LockReplaced, match=f"at each of {lock_file.TRIES_MAX} tries"):
        acquire_now(path)
    monkeypatch.undo()
    assert acquire_now(path) == 1


def test_the_file_is_private_and_stays_when_released(path):
    mask = os.umask(0)
    try:
        assert acquire_now(path) == 1
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    inode = path.stat().st_ino
    assert acquire_now(path) == 2
    assert path.stat().st_ino == inode
    assert list(path.parent.glob(".*")) == []


# The epoch.


def test_the_epoch_is_a_line_of_fixed_width_that_anybody_can_read(path):
    assert read_epoch(path) == 0
    assert [acquire_now(path) for _ in range(3)] == [1, 2, 3]
    assert path.read_bytes() == b"%020d\nquick pid %d\n" % (3, os.getpid())
    assert read_epoch(path) == 3
    assert read_owner(path) == f"quick pid {os.getpid()}"


def test_a_shorter_owner_leaves_nothing_of_a_longer_one(path):
    async def main(name: str) -> None:
        async with FlockFailoverLock(path).hold(name):
            assert read_owner(path) == f"{name} pid {os.getpid()}"

    asyncio.run(main("a-very-long-engine-name"))
    asyncio.run(main("b"))
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("owner", [b"", b"garbage\x00\xff", b"x" * 5_000])
def test_the_owner_is_advice_only(path, owner):
    path.write_bytes(b"%020d\n" % 41 + owner)
    assert acquire_now(path) == 42
    assert read_owner(path) == f"quick pid {os.getpid()}"


CORRUPT = [b"", b"17", b"%020d" % 3, b"%019d\n" % 3, b"-%019d\n" % 3, b" %019d\n" % 3, b"\x00" * 21, b"x" * 100]


@pytest.mark.parametrize("content", CORRUPT)
def test_a_damaged_file_is_refused_in_one_line_left_as_it_is_and_not_locked(path, content):
    path.write_bytes(content)
    for use in (acquire_now, read_epoch):
        with pytest.raises(LockCorrupt) as caught:
            use(path)
        message = str(caught.value)
        assert str(path) in message
        assert "expected a first line of 20 digits" in message
        assert "remove it" in message
        assert "\n" not in message
    assert path.read_bytes() == content
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_epochs_that_are_used_up_do_not_start_again(path):
    path.write_bytes(b"%020d\n" % lock_file.EPOCH_MAX)
    with pytest.raises(LockCorrupt, match="used up"):
        acquire_now(path)
    assert read_epoch(path) == lock_file.EPOCH_MAX


def test_an_epoch_that_cannot_be_written_costs_the_lock(path, monkeypatch):
    acquire_now(path)

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(LockUnusable, match="No space left on device; free some space"):
        acquire_now(path)
    monkeypatch.undo()
    assert acquire_now(path) == 2


STEPS = ["open", "write", "link", "fstat", "pread", "pwrite", "ftruncate"]


def kill_before_step(n: int) -> Sabotage:
    """Let the process die by SIGKILL right before its `n`th system call of those in STEPS, counted from 0."""

    def sabotage() -> None:
        left = n

        def deadly(call: Callable[..., object]) -> Callable[..., object]:
            def counted(*args: object, **kwargs: object) -> object:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return call(*args, **kwargs)

            return counted

        for name in STEPS:
            setattr(os, name, deadly(getattr(os, name)))

    return sabotage


@pytest.mark.parametrize("is_new", [True, False], ids=["new file", "old file"])
def test_a_kill_at_any_step_neither_damages_the_file_nor_repeats_an_epoch(tmp_path, family, board, is_new):
    seen, n, status = 0, 0, -signal.SIGKILL
    path = tmp_path / "w0.lock"
    while status == -signal.SIGKILL:
        assert n < 100
        if is_new:
            path, seen = tmp_path / f"{n}.lock", 0
        child = family.start(hold(path, board, f"try{n}", sabotage=kill_before_step(n), then=lambda: os._exit(0)))
        status = child.wait()
        seen = max([seen, *(int(line.split()[1]) for line in board.lines() if line.startswith(f"try{n} "))])
        assert read_epoch(path) >= seen
        epoch = acquire_now(path)
        assert epoch > seen
        seen, n = epoch, n + 1
    assert status == 0
    assert n > (9 if is_new else 5)


# Cancellation.


async def test_a_cancelled_wait_gives_a_later_grant_back_and_raises_no_epoch(path):
    holder, quitter = FlockFailoverLock(path), FlockFailoverLock(path)
    await holder.acquire("holder")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(quitter.acquire("quitter"), 0.05)
    assert not quitter.held
    holder.release()
    async with asyncio.timeout(PATIENCE_S), FlockFailoverLock(path).hold("next") as epoch:
        assert epoch == 2


async def test_a_wait_cancelled_at_the_moment_of_the_grant_gives_it_back(path):
    holder, quitter = FlockFailoverLock(path), FlockFailoverLock(path)
    await holder.acquire("holder")
    waiting = asyncio.create_task(quitter.acquire("quitter"))
    await until_async(lambda: blocked_count(os.getpid(), path), PATIENCE_S, "it waits")
    holder.release()
    # The loop stands still here, so the grant lies in its queue when the cancellation comes.
    until(lambda: not flock_threads(), PATIENCE_S, "the thread has handed the grant over")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not quitter.held
    async with asyncio.timeout(PATIENCE_S), FlockFailoverLock(path).hold("next") as epoch:
        assert epoch == 2


async def test_a_wait_cancelled_after_the_grant_reached_the_loop_gives_it_back(path):
    holder, quitter = FlockFailoverLock(path), FlockFailoverLock(path)
    await holder.acquire("holder")
    waiting = asyncio.create_task(quitter.acquire("quitter"))
    await until_async(lambda: blocked_count(os.getpid(), path), PATIENCE_S, "it waits")
    holder.release()
    until(lambda: not flock_threads(), PATIENCE_S, "the thread has handed the grant over")
    # Runs right after the grant was settled, and before the task is resumed.
    asyncio.get_running_loop().call_soon(waiting.cancel)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert acquire_is_free(path)
    assert read_epoch(path) == 1


def acquire_is_free(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def flock_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("flock ")]


async def test_waiting_again_and_again_keeps_one_thread_and_its_place(path):
    holder, patient, rival = FlockFailoverLock(path), FlockFailoverLock(path), FlockFailoverLock(path)
    await holder.acquire("holder")
    for _ in range(5):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(patient.acquire("patient"), 0.01)
    assert len(flock_threads()) == 1
    early = asyncio.create_task(patient.acquire("patient"))
    late = asyncio.create_task(rival.acquire("rival"))
    await until_async(lambda: blocked_count(os.getpid(), path) == 2, PATIENCE_S, "both wait in the kernel")
    assert len(flock_threads()) == 2
    holder.release()
    assert await early == 2
    patient.release()
    assert await late == 3
    rival.release()


def test_a_loop_that_was_closed_while_it_waited_does_not_get_the_lock(path, family, board):
    holder = start_holder(family, path, board, "first")
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(FlockFailoverLock(path).acquire("gone"))
    loop.run_until_complete(until_async(lambda: blocked_count(os.getpid(), path), PATIENCE_S, "it waits"))
    waiting.cancel()
    loop.close()
    holder.kill()
    assert acquire_now(path) == 2
    waiting._log_destroy_pending = False


def test_it_works_on_uvloop(path, family, board):
    holder = start_holder(family, path, board, "first")

    async def main() -> int:
        waiting = asyncio.create_task(FlockFailoverLock(path).acquire("second"))
        await until_async(lambda: blocked_count(os.getpid(), path), PATIENCE_S, "it waits")
        holder.kill()
        return await waiting

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == 2


# Misuse and bad paths.


async def test_acquiring_twice_is_refused_and_changes_nothing(path):
    lock = FlockFailoverLock(path)
    assert await lock.acquire("e1") == 1
    with pytest.raises(LockMisuse, match="e1 holds it already"):
        await lock.acquire("e1")
    assert lock.epoch == 1
    rival = FlockFailoverLock(path)
    waiting = asyncio.create_task(rival.acquire("e2"))
    await until_async(lambda: blocked_count(os.getpid(), path), PATIENCE_S, "the rival waits")
    with pytest.raises(LockMisuse, match="e2 is waiting for it already"):
        await rival.acquire("e2")
    lock.release()
    assert await waiting == 2
    rival.release()


async def test_a_lock_can_be_taken_again_after_its_release(path):
    lock = FlockFailoverLock(path)
    for epoch in (1, 2, 3):
        assert await lock.acquire("e1") == epoch
        lock.release()
        assert not lock.held
        assert lock.epoch is None


async def test_releasing_what_is_not_held_is_refused(path):
    lock = FlockFailoverLock(path)
    with pytest.raises(LockMisuse, match="which does not hold it"):
        lock.release()
    async with lock.hold("e1"):
        lock.release()
    with pytest.raises(LockMisuse, match="which does not hold it"):
        lock.release()


@pytest.mark.parametrize("engine_id", ["", "two\nlines", "x" * 201])
async def test_an_engine_id_that_does_not_fit_a_line_is_refused(path, engine_id):
    with pytest.raises(ValueError, match="engine_id: 1 to 200 printable characters"):
        await FlockFailoverLock(path).acquire(engine_id)
    assert not path.exists()


BAD_PATHS = {
    "no/such/w0.lock": "create its directory first",
    "a-file/w0.lock": "a part of the path is not a directory",
    "a-directory": "name a file in it",
    "a-pipe": "it is not a regular file",
}


@pytest.mark.parametrize("name", BAD_PATHS)
def test_a_path_that_cannot_be_used_is_refused_in_one_line_with_advice(tmp_path, name):
    (tmp_path / "a-file").touch()
    (tmp_path / "a-directory").mkdir()
    os.mkfifo(tmp_path / "a-pipe")
    with pytest.raises(LockUnusable) as caught:
        acquire_now(tmp_path / name)
    message = str(caught.value)
    assert str(tmp_path / name) in message
    assert BAD_PATHS[name] in message
    assert "\n" not in message


def test_a_file_without_permission_is_refused_with_advice(path, family, monkeypatch):
    acquire_now(path)
    path.chmod(0)
    path.parent.chmod(0o755)

    def as_nobody() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        for use in (acquire_now, read_epoch):
            with pytest.raises(LockUnusable, match=r"Permission denied; (give|create)"):
                use(Path(path.name))

    monkeypatch.chdir(path.parent)  # its own parents are closed to nobody
    assert family.start(as_nobody).wait() == 0


# Many contenders.

PRESENT = struct.Struct("=q")  # in shared memory: the present holder, as epoch << 32 | pid


def contend(path: Path, shared: mmap.mmap, board: Board, sabotage: Sabotage) -> None:
    """Take the lock over and over; while holding it, see that nobody else runs as its holder."""
    sabotage()

    async def main() -> None:
        lock = FlockFailoverLock(path)
        while True:
            epoch = await lock.acquire("contender")
            me = epoch << 32 | os.getpid()
            PRESENT.pack_into(shared, 0, me)
            board.say(f"won {epoch} {os.getpid()}")
            for _ in range(50):
                os.sched_yield()
                if PRESENT.unpack_from(shared)[0] != me:
                    board.say(f"violation {epoch}")
            lock.release()

    asyncio.run(main())


def troubles_of(n: int, path: Path, family: Family, board: Board, sabotage: Sabotage, *, seed: int) -> list[str]:
    """Let `n` processes contend while they are killed one by one at random; return what was wrong."""
    chance = random.Random(seed)
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    started = [family.start(lambda: contend(path, shared, board, sabotage)) for _ in range(n)]
    children = {child.pid: child for child in started}
    while children:
        seen = len(board.lines())
        wanted = seen + chance.randrange(4)
        until(lambda wanted=wanted: len(board.lines()) >= wanted, PATIENCE_S, "the lock goes round")
        holder = PRESENT.unpack_from(shared)[0] & 0xFFFFFFFF
        pid = holder if holder in children and chance.random() < 0.5 else chance.choice(sorted(children))
        children.pop(pid).kill()
    lines = board.lines()
    epochs = [int(line.split()[1]) for line in lines if line.startswith("won")]
    repeated = [f"epoch {b} after {a}" for a, b in itertools.pairwise(epochs) if b <= a]
    assert len(epochs) >= n / 2
    return repeated + [line for line in lines if line.startswith("violation")]


def test_fifty_contenders_killed_at_random_have_one_holder_and_rising_epochs(path, family, board):
    assert troubles_of(50, path, family, board, nothing, seed=20_260_726) == []
    assert read_epoch(path) >= 25


@pytest.mark.rule("KVC-LOCK-001")
@pytest.mark.slow
def test_a_thousand_random_kills_have_one_holder_and_rising_epochs(path, family, board):
    """KVC-LOCK-001: twenty rounds of fifty on one lock file, whose epoch rises through all of them."""
    for seed in range(20):
        assert troubles_of(50, path, family, board, nothing, seed=seed) == []
    assert read_epoch(path) >= 500


@pytest.mark.parametrize("sabotage", [no_lock, no_epoch_write])
def test_broken_locks_are_caught_by_their_contenders(path, family, board, sabotage):
    assert troubles_of(6, path, family, board, sabotage, seed=7)
