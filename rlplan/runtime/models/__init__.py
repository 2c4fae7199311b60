"""Models: download and loading, heads, adapters, attention, and ranks that share one model."""
