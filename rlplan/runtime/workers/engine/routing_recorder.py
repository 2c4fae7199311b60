"""RoutingRecorder: the experts that vLLM's routers choose for every token, so that the trainer can replay them.

In: vLLM's model runner. Out: expert indices by request. vLLM 0.32 returns them itself (`enable_return_routed_experts`)
only from its second model runner (config/vllm.py, `_verify_aux_output_compatibility`). That runner needs Triton, which
CPU builds lack. This module uses the callback of vLLM's routers, and the runner's own order of rows.
Left out: cached prefixes, which no router sees (`emit.vllm` turns them off).
"""

from functools import partial
from typing import Any

import numpy as np


class RoutingRecorder:
    """See the module docstring. Positions that a preempted request computes again keep their first choice."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self._runner, self._execute = runner, runner.execute_model
        self._rows: dict[int, np.ndarray[Any, Any]] = {}
        self._chosen: dict[str, np.ndarray[Any, Any]] = {}
        routers = [module.router for module in runner.model.modules() if isinstance(module, MoERunner)]
        for index, router in enumerate(routers):
            router.set_capture_fn(partial(self._keep, index))
        runner.execute_model = self._run

    def take(self, request_id: str) -> "np.ndarray[Any, Any] | None":
        """Return and forget a request's experts, [computed tokens, layers with experts, experts of a token]."""
        names = [name for name in self._chosen if name.rpartition("-")[0] == request_id]  # vLLM appends random letters
        return self._chosen.pop(names[0]) if names else None

    def _keep(self, index: int, chosen: Any) -> None:
        self._rows[index] = chosen.numpy().astype(np.int16)

    def _run(self, scheduled: Any, *arguments: Any, **keywords: Any) -> Any:
        self._rows.clear()
        result = self._execute(scheduled, *arguments, **keywords)
        first = 0
        for name in self._runner.input_batch.req_ids if self._rows else ():
            count, start = scheduled.num_scheduled_tokens[name], self._runner.requests[name].num_computed_tokens
            rows = np.stack([self._rows[index][first : first + count] for index in range(len(self._rows))], 1)
            earlier = self._chosen.get(name, rows[:0])
            self._chosen[name] = np.concatenate([earlier, rows[max(0, len(earlier) - start) :]])
            first += count
        return result
