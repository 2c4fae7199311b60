"""The search on a CPU host."""
