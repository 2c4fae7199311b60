"""Export of a plan to another stack's keys (backwards.py), and the folder that starts it (folders.py)."""
