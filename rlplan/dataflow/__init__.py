"""The schedule: the actions of an RL step, their order, and the devices on which they run."""
