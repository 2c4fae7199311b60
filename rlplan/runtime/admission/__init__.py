"""Admission of a model to a run: a shrunken one of its architecture is proved first."""
