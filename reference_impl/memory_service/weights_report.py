"""What an engine did to shared weights: which of its parameters stand in the shared pages, and which it copied."""

from __future__ import annotations

import enum
import os
from pathlib import Path

import msgspec

from reference_impl.memory_service.shared_weights import ALLOCATION, Role

_PATH_AT = 5  # which word after the addresses is a mapping's path


class Where(enum.StrEnum):
    """Where an engine computes a parameter from."""

    SHARED = "shared"  # in the shared pages, and nowhere else
    BOTH = "shared and packed"  # still in the shared pages, with a packed private copy beside it
    PACKED = "packed"  # the engine let go of the shared pages, and keeps a packed private copy
    PRIVATE = (
        "private"  # the engine put another tensor in its place, or it is a buffer, which each engine has for itself
    )


class Parameter(msgspec.Struct, frozen=True):
    """One parameter of the committed weights after the engine had made itself ready."""

    name: str
    bytes: int
    where: Where


class MappedPages(msgspec.Struct, frozen=True):
    """A process's pages of an allocation: `proportional_bytes` counts a page that n processes map as a n-th."""

    resident_bytes: int
    proportional_bytes: int
    written_bytes: int


class WeightsReport(msgspec.Struct, frozen=True):
    """One engine's line. Bytes of tensors are by their sizes; `pages` and `private_growth_bytes` are the kernel's.

    `bytes_shared` lie in the shared pages still; `bytes_duplicated` of them have a private copy as well; `bytes_copied`
    do not lie there any more. Of the pages, `written_bytes` were written to, and so copied for this engine alone.
    `private_growth_bytes` is by how much private memory grew while vLLM made itself ready: what its copies took.
    `load_ns` is from before the first call of the service until the weights were there.
    """

    pid: int
    role: Role
    linears: str
    model: str
    service: str
    generation: int
    layout: str
    load_ns: int
    bytes_total: int
    bytes_shared: int
    bytes_duplicated: int
    bytes_copied: int
    pages: MappedPages
    private_growth_bytes: int
    parameters: tuple[Parameter, ...]

    def summary(self) -> str:
        """Return it as a line for people."""
        return (
            f"weights of {self.model} ({self.role}, generation {self.generation}): "
            f"{self.bytes_shared:,} of {self.bytes_total:,} bytes lie in shared pages, "
            f"{self.bytes_duplicated:,} of them with a copy beside; {self.bytes_copied:,} were copied out of them, "
            f"{self.pages.written_bytes:,} written to"
        )


def bytes_in(parameters: tuple[Parameter, ...], *places: Where) -> int:
    """Return the bytes of the parameters in any of the places."""
    return sum(parameter.bytes for parameter in parameters if parameter.where in places)


def append(report: WeightsReport, path: Path) -> None:
    """Add the report to a file, as one line in one write. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, msgspec.json.encode(report) + b"\n")
    finally:
        os.close(descriptor)


def read_reports(path: Path) -> list[WeightsReport]:
    """Return a file's reports, in the order in which the engines were ready, without a last line that has no end."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [msgspec.json.decode(line, type=WeightsReport) for line in lines]


def private_bytes() -> int:
    """Return the private memory of this process that is resident."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def mapped_pages(pid: int | str = "self", name: str = ALLOCATION) -> MappedPages:
    """Return what the kernel says of a process's mappings of an allocation, at any moment. Raises OSError."""
    resident = shared_out = written = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            inside = len(values) >= _PATH_AT and values[_PATH_AT - 1] == f"/memfd:pdproof:{name}"
        elif inside and key == "Rss:":
            resident += int(values[0]) * 1024
        elif inside and key == "Pss:":
            shared_out += int(values[0]) * 1024
        elif inside and key == "Anonymous:":
            written += int(values[0]) * 1024
    return MappedPages(resident, shared_out, written)
