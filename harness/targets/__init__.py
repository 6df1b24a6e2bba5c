"""Targets: what starts, names and ends the processes under test."""
