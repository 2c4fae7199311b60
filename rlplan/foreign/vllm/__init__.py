"""vLLM: what `vllm serve` starts."""
