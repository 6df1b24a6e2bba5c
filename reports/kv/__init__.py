"""The page of runs in which KV moves from prefill to decode engines: one scenario, by design of its leases."""
