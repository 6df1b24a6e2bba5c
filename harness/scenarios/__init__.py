"""Scenarios, as data."""
