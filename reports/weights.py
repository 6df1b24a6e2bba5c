"""How engines share their weights, read off what their weights loaders said. Only some servers have such a loader."""

from __future__ import annotations

import msgspec

from harness.run_folder import RunFolder
from reference_impl.rules.events import Event, EventKind


class SharedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Engines that hold their weights alike. Bytes are one engine's."""

    engines: list[str]
    roles: list[str]
    """Of these engines: "writer" put the weights there, "reader" found them."""
    bytes_mapped: int
    """Of tensors that lie in the memory service's pages."""
    bytes_copied: int
    """Of tensors that lie there no more: the engine has a copy for itself alone."""
    bytes_duplicated: int
    """Of those that are mapped, what has a private copy beside."""


def shared_weights(run: RunFolder) -> list[SharedWeights]:
    """Return one entry for each way in which engines hold their weights; [] if none said anything of copies.

    The reference implementation's engines say what they mapped and nothing of copies: they make none.
    """
    found: dict[tuple[int, int, int], list[Event]] = {}
    for event in run.events_of(EventKind.WEIGHTS_MAPPED):
        if "copied" in event.detail:
            mapped, copied, twice = (int(event.detail.get(name) or 0) for name in ("bytes", "copied", "duplicated"))
            found.setdefault((mapped, copied, twice), []).append(event)
    return [
        SharedWeights(
            engines=[e.subject for e in events], roles=sorted({str(e.detail.get("role") or "unknown") for e in events}),
            bytes_mapped=mapped, bytes_copied=copied, bytes_duplicated=twice,
        )
        for (mapped, copied, twice), events in found.items()
    ]  # fmt: skip
