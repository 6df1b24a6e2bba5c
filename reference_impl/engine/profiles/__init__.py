"""Compute profiles, as data."""
