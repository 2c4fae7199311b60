"""Framework profiles: the passes of an RL step in each framework, by release, as data."""
