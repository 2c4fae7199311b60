"""rlplan: plan, estimate, run and report reinforcement learning of language models.

One idea: a plan is a schedule of actions, and the same schedule is estimated, searched, executed and reported.
Importing this package pulls in no torch, ray, vllm, deepspeed, pandas or matplotlib.
"""

__version__ = "0.1.0"
