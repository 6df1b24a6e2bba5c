"""Conformance in process: connectors of KV caches on clocks turned by hand, and what each does when things go wrong."""
