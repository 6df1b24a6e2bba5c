"""What is known to fail, one file a system and version."""
