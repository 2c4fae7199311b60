"""What a step makes of its rollouts, on the driver's side: mini-batches, packs, optimizer steps."""
