"""Environments and tools that answer the policy between the turns of a rollout."""
