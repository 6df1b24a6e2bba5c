"""What a deployment says when it serves, and how its other words are marked: the same whoever built it.

A deployment is a process. It writes progress and at most one error to its standard error, one line of JSON (an
`Announcement`) to its standard output, and ends with everything it started at SIGTERM, or when its input ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Final

import msgspec

from reference_impl.oracle import Weights
from reference_impl.rules.routing import Role
from reference_impl.rules.terms import KvTerms

PROGRESS_PREFIX: Final = "deployment: "
ERROR_PREFIX: Final = "deployment: error: "


class Announcement(msgspec.Struct, frozen=True):
    """The line that says the deployment serves."""

    url: str
    model: str
    run_dir: str
    workers: list[str]
    weights: Weights | None = None
    """What the reference engine's answers are made of; None: another engine serves."""
    roles: dict[str, Role] = {}
    """By worker, as the next two."""
    ranks: dict[str, int] = {}
    clock_offsets_s: dict[str, float] = {}
    """How far a worker's clock is ahead of the host's."""
    terms: KvTerms = KvTerms()
    blocks: dict[str, str] = {}
    """By worker: where its block service listens, and its metrics (`peers.address_path`)."""


def say_progress(text: str) -> None:
    """Tell whoever started the deployment how far it is."""
    print(f"{PROGRESS_PREFIX}{text}", file=sys.stderr, flush=True)  # noqa: T201 # progress for people


def say_error(text: str) -> None:
    """Tell why the deployment ends: one line."""
    print(f"{ERROR_PREFIX}{text}", file=sys.stderr, flush=True)  # noqa: T201 # the one clear line


def announce(announcement: Announcement) -> None:
    """Say that the deployment serves."""
    print(msgspec.json.encode(announcement).decode(), flush=True)  # noqa: T201 # this line is the interface


def stop_at_end_of_input(stop: asyncio.Event) -> None:
    """Set `stop` when standard input ends: its other side is held by whoever started us, and ends with it."""
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()

    def look() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            stop.set()

    loop.add_reader(descriptor, look)
