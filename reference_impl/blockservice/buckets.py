"""Token buckets: background work takes its own tokens, never the share of requests that users wait for (KVC-IDEM-015).

A bucket fills at a steady rate up to its burst; a take waits for its tokens until its time is over, or is refused.
Every tenant has its own, so that none drinks another's; where a node has a limit too, all tenants share that one after
their own. The buckets are `aiolimiter`'s; what is added is a bound on who may wait, on how long, and on how many
tenants are remembered. Source: RPC document, rate limiting.
"""

from __future__ import annotations

import asyncio
import enum
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import msgspec
from aiolimiter import AsyncLimiter

from reference_impl.blockservice.credentials import DEPLOYMENT


class Bucket(enum.StrEnum):
    """What is rationed, by the RPC document's names."""

    MIGRATION_BYTES = "migration_bytes_token"
    """Bytes of block groups that move between nodes."""
    REMOTE_READ_QPS = "remote_read_qps_token"
    """`PrepareGet` calls."""
    SSD_READ_IOPS = "ssd_read_iops_token"
    """Reads from a disk tier. No tier of this deployment is on a disk, so nothing takes of it yet; who adds one takes a
    token a read."""


class How(enum.StrEnum):
    """What became of a take that found its bucket empty."""

    DELAYED = "delayed"
    REFUSED = "refused"


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """A bucket's size: tokens that come in a second, and tokens that it holds when full."""

    per_s: float
    burst: float

    def __post_init__(self) -> None:
        """Refuse sizes that make no bucket."""
        for name in ("per_s", "burst"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """What each tenant may take, and all of them together (None: no more than that is said)."""

    tenant: Rate
    node: Rate | None = None


class RateLimited(Exception):
    """A bucket had not enough in the time that was left. `bucket` says which."""

    def __init__(self, bucket: Bucket, message: str) -> None:
        super().__init__(f"{bucket}: {message}")
        self.bucket = bucket


class _Slot:
    def __init__(self, rate: Rate) -> None:
        self.limiter = AsyncLimiter(rate.burst, rate.burst / rate.per_s)
        self.waiting = 0


Limited: TypeAlias = Callable[[Bucket, How], None]
TENANTS_MAX: Final = 1024


class Buckets:
    """The buckets of one node. A bucket without a limit is never empty.

    At most `tenants_max` buckets are remembered; the one that was left alone for longest goes first, and if its tenant
    comes back he finds it full. At most `waiting_max` takes wait at one bucket. `limited` hears of each take that did
    not get its tokens at once.
    """

    def __init__(
        self, limits: Mapping[Bucket, Limit], *, tenants_max: int = TENANTS_MAX, waiting_max: int = 256,
        limited: Limited | None = None,
    ) -> None:  # fmt: skip
        self._limits = dict(limits)
        self._tenants_max = tenants_max
        self._waiting_max = waiting_max
        self._limited = limited
        self._slots: OrderedDict[tuple[Bucket, str], _Slot] = OrderedDict()

    @property
    def remembered(self) -> int:
        """Buckets that are held in memory."""
        return len(self._slots)

    async def take(self, bucket: Bucket, tenant: str, amount: float = 1.0, *, timeout_s: float) -> None:
        """Take tokens, or wait for them for `timeout_s`. Raises RateLimited, ValueError of a negative amount.

        More than a burst is taken in pieces; what an unsuccessful take has got by then is gone.
        """
        if amount < 0:
            raise ValueError(f"amount must be at least 0, got {amount}")
        limit = self._limits.get(bucket)
        if limit is None:
            return
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        for name, rate in ((tenant, limit.tenant), (DEPLOYMENT, limit.node)):
            if rate is not None:
                await self._take(bucket, self._slot(bucket, name, rate), rate.burst, amount, end_s)

    async def _take(self, bucket: Bucket, slot: _Slot, burst: float, amount: float, end_s: float) -> None:
        if amount <= burst and slot.limiter.has_capacity(amount):
            await slot.limiter.acquire(amount)  # has no reason to wait
            return
        if slot.waiting >= self._waiting_max:
            raise self._refused(bucket, f"{slot.waiting} wait for it already")
        self._tell(bucket, How.DELAYED)
        slot.waiting += 1
        try:
            async with asyncio.timeout_at(end_s):
                while amount > 0:
                    piece = min(amount, burst)
                    await slot.limiter.acquire(piece)
                    amount -= piece
        except TimeoutError:
            raise self._refused(bucket, "not enough tokens in the time that is left") from None
        finally:
            slot.waiting -= 1

    def _slot(self, bucket: Bucket, tenant: str, rate: Rate) -> _Slot:
        slot = self._slots.get((bucket, tenant))
        if slot is None:
            if len(self._slots) >= self._tenants_max:
                self._forget_one(bucket)
            slot = self._slots[bucket, tenant] = _Slot(rate)
        self._slots.move_to_end((bucket, tenant))
        return slot

    def _forget_one(self, bucket: Bucket) -> None:
        """Forget the bucket that was left alone for longest; not one at which somebody waits, nor a node's own."""
        for key, slot in self._slots.items():
            if not slot.waiting and key[1] != DEPLOYMENT:
                del self._slots[key]
                return
        raise self._refused(bucket, f"all {len(self._slots)} buckets have takes waiting at them")

    def _refused(self, bucket: Bucket, message: str) -> RateLimited:
        self._tell(bucket, How.REFUSED)
        return RateLimited(bucket, message)

    def _tell(self, bucket: Bucket, how: How) -> None:
        if self._limited is not None:
            self._limited(bucket, how)
