"""Seconds of moving states: weight sync, sleep and offload, checkpoints."""
