"""The protocol's rules: pure, with time as an argument."""
