"""Algorithms that are given their answers, and generate none."""
