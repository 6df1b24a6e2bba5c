"""Faults: how to cause one, prove it and undo it."""
