"""Losses and advantages of algorithms, found by the names in their torch-free declarations in `spec/`."""
