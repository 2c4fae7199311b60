"""The rollout engine on vLLM, stepped by a loop of ours."""
