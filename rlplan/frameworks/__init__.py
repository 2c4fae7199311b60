"""Framework profiles: what each RL stack does in a step, by release, as data."""
