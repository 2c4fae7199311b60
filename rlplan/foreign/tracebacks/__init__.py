"""Tracebacks of runs that ran out of memory: what was allocated, in which phase, and what would make it fit."""
