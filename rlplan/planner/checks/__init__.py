"""Checks that refuse a job before anything is predicted: trainer, model and GPU."""
