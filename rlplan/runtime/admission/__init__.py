"""Admission: before the first run of an architecture, a small model of it is tested with trainer and engine."""
