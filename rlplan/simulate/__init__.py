"""A schedule played step after step in simulated time, with sampled lengths."""
