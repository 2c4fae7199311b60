"""Accuracy of the formulas: published measurements, a prediction for each, and the error."""
