"""The search on a CPU host: every choice that it can run is built and timed."""
