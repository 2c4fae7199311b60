"""Measurements: memory of processes, step metrics, leaks, traces of models, rates of this machine."""
