"""What runs, and what is left of it: run, watch, report."""
