"""`pdproof-engine`: one engine alone, without router, supervisor or shadow. Its memory is its own and ends with it.

For trying a router of your own, or two engines by hand: one `--role prefill`, one `--role decode`. Engines that
exchange KV introduce themselves under a secret, PDPROOF_ROUTER_TOKEN of their environments. Without it they are guarded
against accident only: whoever reaches the port of an engine's introductions can end it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec
import uvloop

from reference_impl.engine.config import MODEL_NAME, EngineConfig, EngineStatus
from reference_impl.engine.kv_transfer import TransferUnavailable
from reference_impl.engine.process import EngineProcess, WakeFailed
from reference_impl.engine.profile import Profile, ProfileError, load_profile
from reference_impl.engine.transfer_config import BadTransferConfig, terms_of
from reference_impl.engine.weights_file import WEIGHTS_SEED, WeightsError, default_weights_dir, ensure_weights
from reference_impl.failover.lock import LockError
from reference_impl.memory_service.errors import MemoryServiceError
from reference_impl.oracle import Weights
from reference_impl.realclock import host_ns
from reference_impl.rules.lifecycle import EngineState
from reference_impl.rules.routing import Role
from reference_impl.rules.terms import KvTerms

RANKS: Final = (1, 2, 4, 8)
PORT_MAX: Final = 65_535
NAME_CHARS_MAX: Final = 64
_NAME: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_CHARS_MAX}}}")
"""It stands in headers and labels of metrics, and in ids that go into hand-offs."""
_NO_PORT: Final = (errno.EADDRINUSE, errno.EACCES)
_FOLDER_PREFIX: Final = "pdproof-engine-"


class EngineAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """The line that says the engine serves."""

    url: str
    engine_id: str
    role: Role
    ranks: int
    terms: KvTerms
    model: str
    weights: Weights


class Failed(Exception):
    """The engine cannot be run: one clear line, and an exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def main() -> None:
    """Run one engine until SIGTERM or SIGINT."""
    arguments = _parser().parse_args()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _end)  # until the engine's own loop takes them over
    try:
        with _config(arguments) as config:
            _run(config, announce=arguments.announce)
    except Failed as error:
        print(f"pdproof-engine: {error}", file=sys.stderr)  # noqa: T201 # the one clear line
        sys.exit(error.code)


def _end(_signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdproof-engine", description=__doc__)
    parser.add_argument("--role", choices=[str(role) for role in Role], default=str(Role.BOTH),
                        help="what it does of a request: all of it (both, the default), prefill or decode")  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--profile", default="default", help="compute profile: a name or a .toml file")
    parser.add_argument("--ranks", type=int, choices=RANKS, default=1,
                        help="processes that share out every block of its KV pool")  # fmt: skip
    parser.add_argument("--kv-transfer-config", default="{}", metavar="JSON",
                        help="terms on which KV moves, by vLLM's names: kv_lease_duration, bidirectional_kv_xfer, "
                        "kv_load_failure_policy ..., at the top or in kv_connector_extra_config")  # fmt: skip
    parser.add_argument("--name", default="", help="its worker's name in headers and events (default: its role)")
    parser.add_argument("--events", default="", metavar="FILE", help="append its events to FILE")
    parser.add_argument("--announce", action="store_true", help="print one JSON line when it serves")
    return parser


@contextlib.contextmanager
def _config(arguments: argparse.Namespace) -> Iterator[EngineConfig]:
    """Check everything, make the weights, and lend a folder for the lock. Raises Failed."""
    begun_ns = host_ns()
    role = Role(arguments.role)
    if not 0 <= arguments.port <= PORT_MAX:
        raise Failed(f"--port must be 0 to {PORT_MAX}, got {arguments.port}", 2)
    name = arguments.name or str(role)
    if not _NAME.fullmatch(name):
        raise Failed(f"--name must be 1 to {NAME_CHARS_MAX} letters, digits, '.', '_' and '-', got {name!r}", 2)
    _check_host(arguments.host)
    try:
        profile = load_profile(arguments.profile)
        terms = terms_of(arguments.kv_transfer_config, role)
    except ProfileError as error:
        raise Failed(str(error), 2) from error
    except BadTransferConfig as error:
        raise Failed(f"--kv-transfer-config: {error}", 2) from error
    weights_file = _weights(profile)
    _sweep()
    with _folder() as folder:
        yield EngineConfig(
            engine_id=f"{name}-{os.getpid()}",
            worker_id=name,
            role=role,
            terms=terms,
            ranks=arguments.ranks,
            profile=profile,
            weights_file=str(weights_file),
            weights_seed=WEIGHTS_SEED,
            lock_path=str(folder / "engine.lock"),
            memory_socket="",
            router_url="",
            host=arguments.host,
            port=arguments.port,
            events_file=arguments.events,
            spawned_ns=begun_ns,
        )


def _check_host(host: str) -> None:
    """Raise Failed for a name that leads to no address."""
    try:
        if not host:
            raise OSError(errno.EINVAL, "an address is needed")
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise Failed(f"--host {host!r}: {error.strerror or error}", 2) from error
    except UnicodeError as error:
        raise Failed(f"--host {host!r} is no name of a host", 2) from error


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Lend a folder, locked as long as this process lives, so that `_sweep` of another leaves it alone."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
        descriptor = _locked(folder, wait=True)
        if descriptor is None and folder.exists():
            break  # no locks on this file system: then nobody sweeps here either
        if descriptor is not None and _is_at(descriptor, folder):
            break
        if descriptor is not None:  # swept before it was locked
            os.close(descriptor)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def _sweep() -> None:
    """Remove the folders of this user's engines that were killed: those that nobody has locked."""
    for folder in Path(tempfile.gettempdir()).glob(_FOLDER_PREFIX + "*"):
        descriptor = _locked(folder, wait=False)
        if descriptor is not None:
            if _is_at(descriptor, folder):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _locked(folder: Path, *, wait: bool) -> int | None:
    """Open and lock a folder of this user's; return its descriptor, None if that cannot be done."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return descriptor
    except OSError:
        pass  # locked by one that lives, or not to be locked here
    os.close(descriptor)
    return None


def _is_at(descriptor: int, folder: Path) -> bool:
    """Whether what is open still stands where it was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.lstat())
    except OSError:
        return False


def _weights(profile: Profile) -> Path:
    try:
        return ensure_weights(default_weights_dir(), WEIGHTS_SEED, profile.weights_bytes)
    except WeightsError as error:
        raise Failed(str(error), 7) from error


def _run(config: EngineConfig, *, announce: bool) -> None:
    try:
        uvloop.run(_live(config, announce=announce))
    except (MemoryServiceError, WeightsError, LockError, TransferUnavailable, WakeFailed) as error:
        raise Failed(str(error), 6) from error
    except OSError as error:
        if error.errno in _NO_PORT:
            where = f"{config.host}:{config.port}"
            raise Failed(f"cannot listen on {where}: {os.strerror(error.errno)}; choose another --port", 7) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise Failed(f"--host {config.host!r} is no address of this machine", 7) from error
        raise Failed(f"{error.filename or 'this machine'}: {error.strerror or error}", 7) from error


async def _live(config: EngineConfig, *, announce: bool) -> None:
    read, write = os.pipe()
    telling = asyncio.create_task(_tell(read, config, announce=announce))
    try:
        await EngineProcess(msgspec.structs.replace(config, status_fd=write)).run()
    finally:
        os.close(write)
        await telling


async def _tell(read: int, config: EngineConfig, *, announce: bool) -> None:
    """Print the line once the engine says that it is active."""
    lines = asyncio.StreamReader()
    pipe = os.fdopen(read, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), pipe)
    async for line in lines:
        status = msgspec.json.decode(line, type=EngineStatus)
        if status.state != EngineState.ACTIVE:
            continue
        said = EngineAnnouncement(
            url=status.url, engine_id=config.engine_id, role=config.role, ranks=config.ranks, terms=config.terms,
            model=MODEL_NAME, weights=Weights(config.weights_seed, config.profile.weights_bytes // 8),
        )  # fmt: skip
        text = f"serving at {said.url}/v1 (model {said.model}, role {said.role}); Ctrl-C ends it"
        print(msgspec.json.encode(said).decode() if announce else text, flush=True)  # noqa: T201 # the interface
    transport.close()


if __name__ == "__main__":
    main()
