"""Best values of metrics so far, for early stopping and for keeping the best checkpoint.

In: rows of metrics, step by step, and the state of an earlier run. Out: the state for a resumed run; the reason for
stopping early. Left out: checkpoints (checkpoints/folder.py), the end of the run (controller.py).
"""

from collections.abc import Mapping

from rlplan.runtime.checkpoints.manifest import Best, RunState
from rlplan.spec.parts.conduct import EarlyStoppingSpec
from rlplan.spec.resolved import ResolvedJob


class BestSoFar:
    """Best values so far.

    early: of the early-stopping metric. kept: of the metric that decides which checkpoint is kept.
    """

    def __init__(self, job: ResolvedJob, state: RunState | None = None) -> None:
        self.job = job
        self.early = state.early_stopping if state else None
        self.kept = state.best_checkpoint if state else None

    def observe(self, step: int, row: Mapping[str, float]) -> str:
        """Record a step's row; step 0 is the start. Returns: the reason to stop here; empty if the run continues."""
        kept, early = self.job.checkpoints, self.job.early_stopping
        # Only a step with a checkpoint can become the best one.
        if kept.best_metric is not None and kept.best_metric in row and step and step % kept.every == 0:
            self.kept = update_best(self.kept, step, row[kept.best_metric], kept.best_mode)
        if early is None or early.metric not in row:
            return ""
        self.early = update_best(self.early, step, row[early.metric], early.mode, early.min_delta)
        return self.explain_stop()

    def explain_stop(self) -> str:
        """The reason why the run stops early; empty if it does not."""
        early, best = self.job.early_stopping, self.early
        return _describe_stop(early, best) if early and best and best.num_without >= early.patience else ""


def update_best(best: Best | None, step: int, value: float, mode: str, min_delta: float = 0.0) -> Best:
    """Return the new value if it is better than the best one by more than min_delta, else the best one, counted up.

    >>> first = update_best(None, 10, 0.5, "max")
    >>> update_best(first, 20, 0.52, "max", min_delta=0.05).num_without
    1
    >>> update_best(first, 20, 0.6, "max", min_delta=0.05).step
    20
    """
    if best is None or (value - best.value if mode == "max" else best.value - value) > min_delta:
        return Best(value=value, step=step)
    return best.model_copy(update={"num_without": best.num_without + 1})


def _describe_stop(early: EarlyStoppingSpec, best: Best) -> str:
    by = f" by more than {early.min_delta:g}" if early.min_delta else ""
    since = f"step {best.step}" if best.step else "the start"
    return (
        f"{early.metric} is no better{by} than at {since} ({best.value:.6g}), {best.num_without} times in a row "
        f"(early_stopping.patience={early.patience})"
    )
