"""Logs of training steps: the metric names of each stack, and the file formats."""
