"""What keeps a node from answering for the moment."""

from __future__ import annotations


class Unavailable(Exception):
    """A call cannot be worked on now, and changed nothing that it will not find again: it may be repeated."""
