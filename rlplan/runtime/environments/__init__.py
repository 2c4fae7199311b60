"""Environments: what answers the policy between the turns of a rollout."""
