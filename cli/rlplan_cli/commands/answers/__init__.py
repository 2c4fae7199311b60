"""Verbs that ask about plans: why, what if, how long, how much, where."""
