"""Sandboxes for programs that a model wrote."""
