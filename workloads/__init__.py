"""Workloads: schedules, prompts, the streaming client and the locust file."""
