"""An engine whose weights are damaged: the reference engine, with the first wake's canary made to expect otherwise."""

from __future__ import annotations

from reference_impl.engine import process
from reference_impl.engine.canary import Canary
from reference_impl.engine.loop import StepLoop


class WrongCanary(Canary):
    """Never content."""

    async def ask(self, loop: StepLoop) -> bool:
        await super().ask(loop)
        return False


class WrongEngine(process.EngineProcess):
    """The chosen engine's wake fails."""

    async def _wake(self, epoch: int) -> None:
        if epoch == 1:
            self._canary = WrongCanary(self._weights)
        await super()._wake(epoch)


if __name__ == "__main__":
    process.EngineProcess = WrongEngine  # type: ignore[misc]
    process.main()
