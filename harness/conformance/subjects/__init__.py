"""The subjects that ship with the suite."""
