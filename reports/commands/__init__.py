"""Commands of `pdproof` that draw."""
