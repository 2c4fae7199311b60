"""Where programs of a model are run, and what they may do there."""
