"""Commands of `pdproof` that run and judge."""
