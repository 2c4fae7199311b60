"""Checkpoints: saving, committing, finding and loading them."""
