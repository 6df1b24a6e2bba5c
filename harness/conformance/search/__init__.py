"""Generated histories: a search over what clients, networks and engines can do, beside the fixed cases."""
