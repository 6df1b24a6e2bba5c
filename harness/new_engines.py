"""When another engine than before came to a node: what the one before held went with it."""

from __future__ import annotations

from collections import defaultdict

from harness.run_folder import RunFolder
from reference_impl.rules.events import EventKind, Scalar


def engines_of(run: RunFolder) -> dict[str, list[int]]:
    """Return when another engine than before was linked to each node's block service.

    By its incarnation too: a service that ends in the middle of that does not tell, and its successor finds it known.
    """
    found: dict[str, list[int]] = defaultdict(list)
    linked: dict[str, Scalar] = {}
    for event in run.events_of(EventKind.BLOCKS_LINKED):
        incarnation = event.detail.get("incarnation", "")
        if event.detail.get("new") is True or linked.get(event.subject, incarnation) != incarnation:
            found[event.subject].append(event.t_ns)
        linked[event.subject] = incarnation
    return dict(found)
