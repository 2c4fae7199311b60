"""The rollout engine on vLLM, stepped by rlplan's own loop."""
