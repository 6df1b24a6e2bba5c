"""Faults inside an engine's NIXL agent: what it sends, receives and reads goes wrong, and the engine knows nothing."""
