"""Router replay: a mixture of experts in the trainer uses the experts that the engine's routers chose (R3).

Small differences between kernels make trainer and engine choose different experts for some tokens. Their log-probs then
differ far beyond rounding. The weights of replayed experts are the trainer's own, with gradient.

In: expert indices of the tokens of a pass. Out: routers of a Hugging Face model that take them.
Source: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers",
arXiv:2510.11370.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class RouterReplay:
    """Replays `experts` in all routers of a model, from a pass's forward to the end of its backward.

    experts: [T, layers with experts, experts of a token], -1 where the trainer's router chooses; None without replay.
    """

    experts: torch.Tensor | None = None

    def __init__(self, language_model: torch.nn.Module) -> None:
        routers = [module for module in language_model.modules() if type(module).__name__.endswith("TopKRouter")]
        for index, router in enumerate(routers):
            router.forward = partial(self._route, router.forward, index)

    def _route(self, choose: Callable[..., Any], index: int, *arguments: Any) -> Any:
        if self.experts is None:
            return choose(*arguments)
        with _ReplayedChoice(self.experts[:, index]):
            return choose(*arguments)


class _ReplayedChoice(TorchFunctionMode):
    """Replaces the indices that `torch.topk` returns, and gathers the values at the replaced ones."""

    def __init__(self, experts: torch.Tensor) -> None:
        super().__init__()
        self.experts = experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.topk:
            return result
        chosen = torch.where(self.experts < 0, result.indices, self.experts.long())
        return args[0].gather(-1, chosen), chosen
