"""The run folder: locking, writing and following it, and errors of its disk."""
