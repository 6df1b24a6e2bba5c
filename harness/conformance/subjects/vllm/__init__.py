"""Connectors of vLLM as subjects: its own scheduler and connector classes, on a world's clocks and network."""
