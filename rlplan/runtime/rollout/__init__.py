"""Rollouts on the driver's side: requests to engines, their distribution, and groups of finished rollouts."""
