"""The search on GPUs: candidates, their bytes and seconds, and the fastest that fits."""
