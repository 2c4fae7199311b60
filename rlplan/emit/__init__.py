"""From a plan to the files that run it: DeepSpeed's, vLLM's and Ray's. Decides nothing."""
