"""Accuracy: measured points, what the formulas say of each, and how far apart the two are."""
