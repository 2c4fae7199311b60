"""Training on a step's rollouts, on the driver's side: mini-batches, packing, optimizer steps."""
