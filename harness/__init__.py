"""The harness: targets, scenarios, run folders, checks and the command line."""
