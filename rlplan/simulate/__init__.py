"""A schedule run step after step in simulated time, with sampled lengths."""
