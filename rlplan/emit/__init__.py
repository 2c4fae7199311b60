"""The files that run a plan: configurations of DeepSpeed, vLLM and Ray. Decides nothing."""
