"""Fault tolerance: restart of lost processes, and resuming a run from a checkpoint."""
