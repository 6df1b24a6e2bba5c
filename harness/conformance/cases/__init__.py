"""The fixed cases, chapter by chapter."""
