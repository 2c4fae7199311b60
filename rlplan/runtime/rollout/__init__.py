"""Rollouts on the driver's side: what is asked of which engine, and what becomes of the answers."""
