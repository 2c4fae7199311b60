"""Seconds of a rollout engine on GPUs: one step of it, a whole generation, latency under load."""
