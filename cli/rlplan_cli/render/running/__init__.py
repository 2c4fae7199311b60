"""A run in a terminal: its live display and its summary."""
