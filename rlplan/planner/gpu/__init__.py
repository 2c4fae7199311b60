"""The search on GPUs: candidates, their bytes and seconds, the fastest that fits."""
