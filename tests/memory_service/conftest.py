from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.memory_service.running import RunningService, running_service


@pytest.fixture
def service() -> Iterator[RunningService]:
    """A real service with 256 MiB, patient for half a second."""
    with running_service("--handshake-s", "0.5", "--frame-s", "0.5") as running:
        yield running
