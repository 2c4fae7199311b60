"""Rules that every process of a run keeps: its path, its end, signals, waits that scale."""
