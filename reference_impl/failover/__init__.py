"""Failover of a worker: lock, probe, supervisor."""
