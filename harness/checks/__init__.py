"""Checks: each a function from a run folder to a verdict."""
