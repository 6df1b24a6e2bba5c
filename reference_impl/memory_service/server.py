"""The memory service's process: one a device.

    python -m reference_impl.memory_service.server --socket PATH --device DEV --capacity-bytes N [--events FILE]

Prints `ready` once it listens. Ends with 0 on SIGTERM or SIGINT, 2 on wrong options, 7 when a live server has the
socket, 1 on anything else; each failure is one line on stderr.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from reference_impl.event_log import EventLog
from reference_impl.memory_service.errors import MemoryServiceError, SocketInUse
from reference_impl.memory_service.host import HostBackend
from reference_impl.memory_service.requests import Desk
from reference_impl.memory_service.service import Limits, Service
from reference_impl.processes import die_with_parent
from reference_impl.realclock import RealClock
from reference_impl.rules.sessions import Sessions

EXIT_SOCKET_IN_USE = 7
_BACKLOG = 128
_DESCRIPTORS_APART = 1024  # for connections, answers under way, and ourselves
_SOCKET_PATH_BYTES_MAX = 107


def main(arguments: list[str] | None = None) -> int:
    """Run the service and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        if options.die_with_parent is not None:
            die_with_parent(options.die_with_parent or os.getppid())
        with listening(options.socket) as listener, _told_to_stop() as stop_fd:
            _serve(listener, stop_fd, options)
    except SocketInUse as error:
        return _fail(str(error), EXIT_SOCKET_IN_USE)
    except (OSError, MemoryServiceError, ValueError) as error:
        return _fail(str(error), 1)
    return 0


def _serve(listener: socket.socket, stop_fd: int, options: argparse.Namespace) -> None:
    clock = RealClock()
    events = EventLog(options.events, f"memory-{options.device}")
    rules = Sessions(
        device=options.device,
        # A process id may come again, a process id at a moment does not.
        service=f"{os.getpid()}-{clock.now_ns()}",
        capacity_bytes=options.capacity_bytes,
        allocations_max=_allocations_max(),
    )
    desk = Desk(options.device, rules, HostBackend(), events)
    limits = Limits(handshake_s=options.handshake_s, frame_s=options.frame_s, wait_s_max=options.wait_s_max)
    service = Service(listener, desk, clock, stop_fd, limits)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    service.run()
    events.close()


def _allocations_max() -> int:
    """Raise the soft limit on descriptors to the hard one, and return how many allocations fit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(16, min(65_536, hard - _DESCRIPTORS_APART)) if hard != resource.RLIM_INFINITY else 65_536


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Listen at `path` (mode 0600) in place of a dead server's socket, and unlink it in the end.

    The directory is locked while we look and bind, so that of two servers that start at once one wins. Raises
    `SocketInUse`, OSError.
    """
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES_MAX:
        raise OSError(f"the socket path {path} is longer than {_SOCKET_PATH_BYTES_MAX} bytes; choose a shorter one")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            _remove_dead_socket(path)
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            listener.listen(_BACKLOG)
            ours = path.lstat().st_ino
        finally:
            os.close(directory)
        try:
            yield listener
        finally:
            with suppress(OSError):
                if path.lstat().st_ino == ours:
                    path.unlink()
    finally:
        listener.close()


def _remove_dead_socket(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(f"{path} is there and no socket; remove it or choose another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # alive, with a full backlog
    raise SocketInUse(f"a live memory service has {path}; stop it or choose another --socket")


@contextmanager
def _told_to_stop() -> Iterator[int]:
    """Return a descriptor that turns readable on SIGTERM or SIGINT."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write_fd)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    try:
        yield read_fd
    finally:
        signal.set_wakeup_fd(-1)
        os.close(read_fd)
        os.close(write_fd)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reference_impl.memory_service.server", description="Serve a device's memory."
    )
    parser.add_argument("--socket", type=Path, required=True, help="path of the Unix socket, in a private directory")
    parser.add_argument("--device", required=True, help="the device's name, for events and messages")
    parser.add_argument("--capacity-bytes", type=_positive, required=True, help="what may be allocated in all")
    parser.add_argument("--events", type=Path, help="append events to this file")
    parser.add_argument("--handshake-s", type=float, default=5.0, help="how long a peer may be without a session")
    parser.add_argument("--frame-s", type=float, default=5.0, help="how long a frame may take, either way")
    parser.add_argument("--wait-s-max", type=float, default=600.0, help="the longest wait that a client may ask for")
    parser.add_argument(
        "--die-with-parent",
        type=int,
        nargs="?",
        const=0,
        metavar="PID",
        help="be killed when the parent dies; PID is the parent as it knows itself",
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if not 0 < number < 1 << 62:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {(1 << 62) - 1}")
    return number


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"memory service: {message}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
