"""Commands around a run: run, watch, report."""
