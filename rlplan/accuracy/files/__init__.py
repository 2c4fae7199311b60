"""Readers of measured points: JSON, CSV, YAML, start-up logs of vLLM."""
