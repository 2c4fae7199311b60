"""Memory prediction: bytes of every process of a schedule, after and inside each action."""
