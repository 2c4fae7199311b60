"""Memory of rollout engines by vLLM's arithmetic: weights, KV cache and peaks."""
