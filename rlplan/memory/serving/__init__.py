"""What an engine keeps and reaches: weights, KV cache and peaks, by vLLM's arithmetic and by other engines'."""
