"""Timing: from a schedule and a machine's rates to seconds of each action."""
