"""Seconds until bytes are somewhere else: weight sync, sleep and offload, checkpoints."""
