"""Processes of a run: search path, lifetime, signals, memory limits, deadlines and JSON over pipes."""
