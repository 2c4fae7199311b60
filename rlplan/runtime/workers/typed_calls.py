"""Typed calls of worker methods: mypy checks names and arguments, although the driver never imports a worker class.

A call travels to a worker process as a tuple (method name, *arguments). Worker classes import torch, DeepSpeed and
vLLM, which the driver must not. So type checkers see the classes below, and at run time their attributes are method
names.

In: a method of `WORKER`, `TRAINER`, `SCORER` or `ENGINE`, and its arguments. Out: the tuple for `WorkerGroup`.
Left out: the type of the result.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, cast

if TYPE_CHECKING:
    from rlplan.runtime.workers.engine.rollout_engine import RolloutEngine
    from rlplan.runtime.workers.scorer import Scorer
    from rlplan.runtime.workers.trainer.policy_trainer import PolicyTrainer
    from rlplan.runtime.workers.worker import Worker

Parameters = ParamSpec("Parameters")


class _MethodNames:
    def __getattr__(self, name: str) -> str:
        return name


WORKER = cast("Worker", _MethodNames())
TRAINER = cast("PolicyTrainer", _MethodNames())
"""A trained role; its `offload`, `reload` and `score` exist on scorers too."""
SCORER = cast("Scorer", _MethodNames())
ENGINE = cast("RolloutEngine", _MethodNames())


def bind_call(
    method: Callable[Parameters, object], *arguments: Parameters.args, **keywords: Parameters.kwargs
) -> tuple[Any, ...]:
    """Bind arguments to a method; arguments are positional.

    >>> bind_call(TRAINER.optimizer_step, 3)
    ('optimizer_step', 3)
    """
    assert not keywords, "calls have positional arguments"
    return (method, *arguments)
