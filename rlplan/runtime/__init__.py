"""The only package that may import torch, ray, vllm, deepspeed and transformers: it does what a schedule says."""
