"""Simulation of a schedule, step after step, with sampled response lengths."""
