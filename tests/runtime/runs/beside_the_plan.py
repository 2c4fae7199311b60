"""A finished run beside its plan: peaks of processes, states, and whether the engine had the policy's weights."""

from rlplan.vocabulary import PERSISTENT_KINDS
from tests.runtime.conftest import FinishedRun

WEIGHTS_AGREE = 1e-4
"""Log-probs of engine and trainer in fp32, of the same weights; a policy one optimizer step away is further off."""

NOT_MEASURED = {"verifiers"}
"""Programs in sandboxes, which come and go: they are planned for by their limits."""


def process_peaks(run: FinishedRun) -> dict[str, tuple[int, int]]:
    """(predicted, measured) peak of each process."""
    measured: dict[str, int] = {}
    for sample in run.trace.samples:
        if sample.kind == "total":
            measured[sample.process] = max(measured.get(sample.process, 0), sample.num_bytes)
    assert set(measured) == set(run.plan.ledger.processes) - NOT_MEASURED
    return {process: (run.plan.ledger.process_peak(process).num_bytes, size) for process, size in measured.items()}


def check_steps(run: FinishedRun, *, within: float) -> None:
    """Three steps that learned something; log-probs and peaks agree. within: a step's mean difference of log-probs."""
    assert run.exit_code == 0, run.stderr
    steps = [row for row in run.metrics if row["step"] > 0]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert max(row["policy/grad_norm"] for row in steps[:2]) > 0, "weights that were handed over had changed"
    assert max(row["sync/logprob_difference_mean"] for row in steps) <= within
    for process, (predicted, measured) in process_peaks(run).items():
        assert measured * 0.98 <= predicted <= measured * 1.15, (process, predicted, measured)


def check_run(run: FinishedRun, num_steps: int, agree: float = WEIGHTS_AGREE) -> None:
    """It ended well, the first log-probs agree, what stays is what was predicted, and no peak is above or far below.

    agree: how far apart log-probs may be where the engine holds its weights in another format.
    """
    assert run.exit_code == 0, run.stderr
    differences = [row["sync/logprob_difference_max"] for row in run.metrics if row["step"] > 0]
    assert len(differences) == num_steps
    assert max(differences) < agree
    later = [row for row in run.plan.ledger.rows if row.run_phase != "first"]
    rows = {(row.action_id, row.process, row.role, row.kind): row for row in later}
    compared = 0
    for sample in run.trace.samples:
        row = rows.get((sample.action_id, sample.process, sample.role, sample.kind))
        if row and sample.step == num_steps and sample.statistic == "resident" and sample.kind in PERSISTENT_KINDS:
            assert sample.num_bytes == row.resident_bytes, (sample, row)
            compared += 1
    assert compared
    for process, (predicted, measured) in process_peaks(run).items():
        assert measured <= predicted <= measured * 1.15, (process, predicted, measured)
