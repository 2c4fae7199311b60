"""Checkpoints: what is saved, when it counts, how it is found and read again."""
