"""An engine with a bug: in the first epoch a prompt of seven tokens breaks its step loop."""

from __future__ import annotations

from reference_impl.engine import process
from reference_impl.engine.core import EngineCore, Step

BAD_LENGTH = 7
_step = EngineCore.step


def faulty_step(self: EngineCore) -> Step:
    if any(s.prompt_tokens == BAD_LENGTH for s in self.waiting) and FaultyEngine.epoch == 1:
        raise IndexError("a bug in the forward pass")
    return _step(self)


class FaultyEngine(process.EngineProcess):
    """Remembers its epoch for the bug."""

    epoch = 0

    async def _wake(self, epoch: int) -> None:
        FaultyEngine.epoch = epoch
        await super()._wake(epoch)


if __name__ == "__main__":
    EngineCore.step = faulty_step  # type: ignore[method-assign]
    process.EngineProcess = FaultyEngine  # type: ignore[misc]
    process.main()
