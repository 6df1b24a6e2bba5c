"""The reference implementation: the protocol's rules, and a serving stack that keeps them."""
