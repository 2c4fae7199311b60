"""Files of measured points: JSON, CSV, start-up logs of vLLM."""
