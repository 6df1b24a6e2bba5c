"""An engine's memory: weights and KV pool, shared through the memory service or its own.

`SharedMemory` is what makes a shadow possible: weights outlive their engine, and KV is mapped only while awake.
`PrivateMemory` is the baseline: everything dies with the process, and a restart reads the weights again.
Methods block, for as long as real memory takes; call them from a thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

from reference_impl.content import BLOCK_BYTES, BLOCK_WORDS, Words
from reference_impl.engine.weights_file import load_weights, touch
from reference_impl.memory_service.client import MemoryClient
from reference_impl.memory_service.errors import NothingCommitted, WriterBusy
from reference_impl.memory_service.mapping import MappedRegion, private_region
from reference_impl.rules.sessions import Mode, Tag

WEIGHTS: Final = "weights"
KV: Final = "kv_cache"


class EngineMemory(Protocol):
    """What an engine asks of its memory."""

    weights_bytes_mapped: int
    kv_bytes_mapped: int

    def prepare_weights(self, file: Path) -> str:
        """Have the weights mapped and resident; return how: "read from file" or "attached"."""
        ...

    def prepare_kv(self) -> None:
        """Do for the KV pool what can be done before the lock is won."""
        ...

    def park(self) -> None:
        """Unmap what a parked engine must not hold."""
        ...

    def wake_weights(self) -> None:
        """Have the weights mapped again, at their old addresses and of their old layout."""
        ...

    def wake_kv(self, epoch: int) -> None:
        """Have the KV pool mapped."""
        ...

    def settle(self) -> None:
        """Make resident what is mapped but was not touched yet; runs while the engine serves already."""
        ...

    @property
    def weights(self) -> Words:
        """The weights' words."""
        ...

    @property
    def kv(self) -> Words:
        """The KV pool's words, shape [blocks, words a block]."""
        ...

    @property
    def kv_descriptor(self) -> int:
        """The pool's descriptor, for this engine's other ranks; -1 if it has none."""
        ...


class PrivateMemory:
    """Memory that dies with the engine. `shareable`: its KV pool can be handed to the engine's other ranks."""

    def __init__(self, weights_bytes: int, kv_blocks: int, *, shareable: bool = False) -> None:
        self.weights_bytes_mapped = self.kv_bytes_mapped = 0
        self._weights = private_region({WEIGHTS: weights_bytes})
        self._kv = private_region({KV: kv_blocks * BLOCK_BYTES}, shareable=shareable)

    def prepare_weights(self, file: Path) -> str:
        """Map, and read the file."""
        self._weights.map()
        load_weights(file, self.weights)
        self.weights_bytes_mapped = self.weights.nbytes
        return "read from file"

    def prepare_kv(self) -> None:
        """Map the pool and touch every page."""
        self._kv.map(populate=True)
        self.kv_bytes_mapped = self.kv.nbytes

    def park(self) -> None:
        """Keep everything: this engine has the device to itself."""

    def wake_weights(self) -> None:
        """Do nothing: they are mapped."""

    def wake_kv(self, epoch: int) -> None:
        """Do nothing: it is mapped."""

    def settle(self) -> None:
        """Do nothing: all pages are resident."""

    @property
    def weights(self) -> Words:
        """The weights' words."""
        return self._weights.array(WEIGHTS)

    @property
    def kv(self) -> Words:
        """The KV pool's words."""
        return self._kv.array(KV).reshape(-1, BLOCK_WORDS)

    @property
    def kv_descriptor(self) -> int:
        """The pool's descriptor, -1 if it is not shareable."""
        return self._kv.descriptor(KV)


class SharedMemory:
    """Memory of the device's memory service."""

    def __init__(self, socket: Path, engine_id: str, weights_bytes: int, kv_blocks: int, wait_s: float) -> None:
        self.weights_bytes_mapped = self.kv_bytes_mapped = 0
        self._socket = socket
        self._engine_id = engine_id
        self._weights_bytes = weights_bytes
        self._kv_bytes = kv_blocks * BLOCK_BYTES
        self._wait_s = wait_s
        self._reader: MemoryClient | None = None
        self._weights: MappedRegion | None = None
        self._kv_client: MemoryClient | None = None
        self._kv: MappedRegion | None = None

    def prepare_weights(self, file: Path) -> str:
        """Attach to the committed weights; if there are none, be their writer first."""
        how = "attached"
        try:
            self._reader = self._session(Mode.READER, wait_s=0)
        except NothingCommitted:
            if self._write_weights(file):
                how = "read from file"
            self._reader = self._session(Mode.READER, wait_s=self._wait_s)
        self._weights = self._reader.region()
        self._weights.map(populate=True)
        touch(self.weights)
        self.weights_bytes_mapped = self.weights.nbytes
        return how

    def _session(self, mode: Mode, wait_s: float) -> MemoryClient:
        return MemoryClient(self._socket, tag=Tag.WEIGHTS, mode=mode, engine_id=self._engine_id, wait_s=wait_s)

    def _write_weights(self, file: Path) -> bool:
        """Read the weights and commit them; false if another engine is at it (or has just done it)."""
        try:
            writer = self._session(Mode.WRITER, wait_s=0)
        except WriterBusy:
            return False
        with writer:
            if writer.current_layout() is not None:  # committed between our look as a reader and now
                return False
            writer.allocate(WEIGHTS, self._weights_bytes)
            region = writer.region()
            region.map(populate=True)  # in huge pages, where the kernel has them: maps and dies a hundred times faster
            load_weights(file, region.array(WEIGHTS))
            writer.commit()
            region.close()
        return True

    def prepare_kv(self) -> None:
        """Do nothing: a parked engine holds no KV memory."""

    def park(self) -> None:
        """Unmap the weights; their addresses and handles stay."""
        if self._weights is not None:
            self._weights.unmap()
        self.weights_bytes_mapped = 0

    def wake_weights(self) -> None:
        """Map the weights again. Raises LayoutChanged if somebody has committed others meanwhile.

        All of them at once, so that no request pays for it: 0.7 ms a GiB in huge pages, 90 ms in small ones.
        """
        if self._weights is None or self._reader is None:
            raise RuntimeError("prepare_weights comes before wake_weights")
        self._weights.check_current(self._reader)
        self._weights.map(populate=True)
        self.weights_bytes_mapped = self.weights.nbytes

    def wake_kv(self, epoch: int) -> None:
        """Open the KV session with the lock's epoch, allocate and map. Pages come as they are touched."""
        self._kv_client = MemoryClient(
            self._socket,
            tag=Tag.KV_CACHE,
            mode=Mode.WRITER,
            engine_id=self._engine_id,
            epoch=epoch,
            wait_s=self._wait_s,
        )
        self._kv_client.allocate(KV, self._kv_bytes, wait_s=self._wait_s)
        self._kv = self._kv_client.region()
        self._kv.map()
        self.kv_bytes_mapped = self._kv_bytes

    def settle(self) -> None:
        """Make the KV pool's pages, huge ones where there are any: off the critical path, and quick to free one day."""
        if self._kv is not None:
            self._kv.populate()

    @property
    def weights(self) -> Words:
        """The weights' words."""
        if self._weights is None:
            raise RuntimeError("the weights are not mapped")
        return self._weights.array(WEIGHTS)

    @property
    def kv(self) -> Words:
        """The KV pool's words."""
        if self._kv is None:
            raise RuntimeError("the KV pool is not mapped")
        return self._kv.array(KV).reshape(-1, BLOCK_WORDS)

    @property
    def kv_descriptor(self) -> int:
        """The pool's descriptor."""
        if self._kv is None:
            raise RuntimeError("the KV pool is not mapped")
        return self._kv.descriptor(KV)
