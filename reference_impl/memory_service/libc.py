"""The few calls of the C library that Python lacks. Each lets go of the interpreter lock while it runs."""

from __future__ import annotations

import ctypes
import errno
import os

PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
MADV_HUGEPAGE, MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_COLLAPSE = 14, 22, 23, 25
HUGE_PAGE_BYTES = 2 << 20
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def _check(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mmap(address: int, size_bytes: int, protection: int, flags: int, descriptor: int = -1) -> int:
    """Map memory and return its address. `address` 0 lets the kernel choose. Raises OSError."""
    mapped = _libc.mmap(address or None, size_bytes, protection, flags, descriptor, 0)
    if mapped is None or mapped == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {size_bytes} bytes: {os.strerror(number)}")
    return int(mapped)


def munmap(address: int, size_bytes: int) -> None:
    """Give addresses back. Raises OSError."""
    _check(_libc.munmap(address, size_bytes), f"munmap of {size_bytes} bytes")


def advise_huge(address: int, size_bytes: int) -> bool:
    """Ask for 2 MiB pages, where the kernel has them; tell whether it took the advice."""
    return bool(_libc.madvise(address, size_bytes, MADV_HUGEPAGE) == 0)


def collapse(address: int, size_bytes: int) -> bool:
    """Make the pages of a mapping now, as 2 MiB pages; tell whether all that fit are.

    Works whatever the kernel's settings for huge pages of shared memory (`deny` apart), since Linux 6.1. The kernel
    wants something to be there to collapse, so that one byte of each huge page is read first. What is there stays.
    One call a huge page: the kernel finishes a call before it lets a killed process die, and a GiB may take it seconds.
    """
    whole = size_bytes - size_bytes % HUGE_PAGE_BYTES
    made = 0
    for offset in range(0, whole, HUGE_PAGE_BYTES):
        ctypes.c_ubyte.from_address(address + offset).value  # noqa: B018 - the access is what counts
        made += _libc.madvise(address + offset, HUGE_PAGE_BYTES, MADV_COLLAPSE) == 0
    return whole > 0 and made * HUGE_PAGE_BYTES == whole


def populate(address: int, size_bytes: int, *, write: bool) -> None:
    """Make every page of a mapping now. A kernel before 5.14 makes them on first touch instead. Raises OSError."""
    try:
        _check(
            _libc.madvise(address, size_bytes, MADV_POPULATE_WRITE if write else MADV_POPULATE_READ),
            f"populating {size_bytes} bytes",
        )
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def punch(descriptor: int, size_bytes: int) -> None:
    """Free the pages of a memfd at once, whoever else has it open. Raises OSError (EPERM if it is sealed)."""
    mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    _check(_libc.fallocate(descriptor, mode, 0, size_bytes), f"freeing {size_bytes} bytes")
