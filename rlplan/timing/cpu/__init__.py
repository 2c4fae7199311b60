"""Seconds of every action on a CPU host."""
