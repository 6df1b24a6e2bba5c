"""Benchmarks: whole processes by modules of their own, what runs in process by pytest-benchmark."""
