"""Weight sync from the trainer to the rollout engines: sending, receiving, verification."""
