"""vLLM's entry point (`vllm.general_plugins`): its NIXL connector gets agents that can be struck.

The connector takes its agent class from `vllm.distributed.nixl_utils`, which looks it up when it is first asked for.
So we put a factory there, in every process that loads plugins; it does nothing until an agent is made. Without
`PDPROOF_FAULTS_DIR` nothing at all is done. Seen in vLLM 0.32; where the seam is another, a report says so.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any, Final

from faults.nixl.agent import unfit, wrapped
from faults.nixl.channel import FOLDER_VARIABLE
from faults.nixl.dialects import Vllm

MODULE: Final = "vllm.distributed.nixl_utils"
NAME: Final = "NixlWrapper"


class AgentFactory:
    """Stands where vLLM looks for NIXL's agent class, in `module`. Making an agent raises what NIXL raises."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._found: Any = vars(module).get(NAME)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Make an agent that can be struck."""
        if self._found is None:
            self._found = self._module.__getattr__(NAME)
            setattr(self._module, NAME, self)  # the look-up has put the class there
        if self._found is None:
            raise RuntimeError("NIXL is not available")
        return wrapped(self._found(*given, **named), Vllm())


def register() -> None:
    """Put the factory in its place. vLLM calls this in each of its processes, perhaps more than once."""
    if not os.environ.get(FOLDER_VARIABLE):
        return
    try:
        module = importlib.import_module(MODULE)
    except Exception as error:  # whatever it is, vLLM's own use of it will tell
        unfit(f"{MODULE} cannot be loaded: {error!r}")
        return
    if isinstance(vars(module).get(NAME), AgentFactory):
        return
    if NAME not in vars(module) and not (callable(vars(module).get("__getattr__")) and NAME in module.__all__):
        unfit(f"{MODULE} has no {NAME}: this vLLM is not one that is known here (0.32 is)")
        return
    setattr(module, NAME, AgentFactory(module))
