"""Check of `vllm serve`: whether the engine starts."""
