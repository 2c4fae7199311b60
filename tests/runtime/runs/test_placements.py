"""Placements that switch or overlap, on real runs of three steps: time sharing, async rollouts, what is freed."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlplan.runtime.data.prompt_sets import load_prompts
from rlplan.runtime.rollout.buffer import BufferedGroup, ExperienceBuffer
from rlplan.runtime.rollout.experience import Completion
from rlplan.runtime.rollout.requests import RequestMaker
from tests.runtime.conftest import FinishedRun, Runner
from tests.runtime.runs.beside_the_plan import process_peaks
from tests.runtime.runs.test_runs import ROUNDING

pytestmark = pytest.mark.engine
ADAPTERS_AHEAD = (
    "workload.num_steps=5",
    "workload.evaluate_every=5",
    "workload.num_heldout_prompts=16",
    "workload.num_prompts_per_step=8",
    "workload.num_samples_per_prompt=4",
    "workload.mini_batch_size=32",
    "workload.micro_batch_size_per_gpu=1",  # a step takes so long that rollouts end meanwhile
    "workload.max_response_len=200",
    "workload.mean_response_len=60",
    "workload.response_lengths={kind: lognormal, median: 50, sigma: 0.6}",
    "controls.forces_lengths=true",
    "algorithm.learning_rate=1e-2",
    "rollout.max_num_seqs=24",  # of 96 that may be begun: many are under way when the first new version arrives
    "placement.placement=disaggregated",
    "placement.max_staleness=2",
    "checkpoints.every=1",
    "checkpoints.keep_last=10",
    "checkpoints.exports_policy=true",
    "preflight.rehearses=false",
)
"""`adapters_ahead`."""


def test_an_engine_that_was_started_anew_has_the_trainers_weights(colocated_run: FinishedRun) -> None:
    assert colocated_run.exit_code == 0, colocated_run.stderr
    differences = [row["sync/logprob_difference_max"] for row in colocated_run.metrics if row["step"] > 0]
    assert len(differences) == 3
    assert max(differences) < ROUNDING
    assert len(list((colocated_run.folder / "weights").iterdir())) == 1, "weights that nobody needs were removed"


def test_a_stopped_engine_gives_back_what_the_plan_says(colocated_run: FinishedRun) -> None:
    rows = [row for row in colocated_run.plan.ledger.rows if row.run_phase == "steady"]
    planned = {
        name: sum(row.resident_bytes for row in rows if (row.action_id, row.process) == (name, "rollout_engine/0"))
        for name in ("generate", "stop_engine")
    }
    measured = {
        (sample.step, sample.action_id): sample.num_bytes
        for sample in colocated_run.trace.samples
        if (sample.process, sample.kind, sample.statistic) == ("rollout_engine/0", "total", "resident")
    }
    for step in (2, 3):
        freed = measured[(step, "generate")] - measured[(step, "stop_engine")]
        assert freed >= 0.9 * (planned["generate"] - planned["stop_engine"])


def test_a_whole_cycle_was_rehearsed_before_the_first_step(colocated_run: FinishedRun) -> None:
    preflight = json.loads((colocated_run.folder / "preflight.json").read_text())
    assert not preflight["not_rehearsed"]
    assert {row["process"] for row in preflight["rehearsed"]} == {
        *(process for process in process_peaks(colocated_run) if "trainer" in process or "engine" in process)
    }
    for row in preflight["rehearsed"]:
        assert -0.02 < row["predicted_bytes"] / row["measured_bytes"] - 1 < 0.15, row


def test_rollouts_are_at_most_as_old_as_allowed_and_survive_new_weights(async_run: FinishedRun) -> None:
    assert async_run.exit_code == 0, async_run.stderr
    trained = [row for row in async_run.metrics if row["step"] > 0]
    assert [row["step"] for row in trained] == [1, 2, 3]
    assert max(row["staleness/max"] for row in trained) == 1
    assert trained[0]["staleness/max"] == 0
    assert max(row["staleness/partial_fraction"] for row in trained) > 0


def test_the_next_step_s_generation_does_not_wait_for_training(async_run: FinishedRun) -> None:
    """How long they overlap depends on the speed of judging: a generation may end while its step's training waits."""
    spans = {(span.action_id, span.step): span for span in async_run.trace.spans if span.process != "driver/0"}
    training, generating = spans[("train_forward_backward", 1)], spans[("generate", 2)]
    assert generating.start_s < training.end_s


def test_drawn_lengths_never_take_more_than_the_longest_that_was_planned_for(async_run: FinishedRun) -> None:
    for process, (predicted, measured) in process_peaks(async_run).items():
        assert measured <= predicted, (process, predicted, measured)


@pytest.fixture(scope="module")
def adapters_ahead(run_job: Runner) -> FinishedRun:
    """Adapters handed over alone while generation runs up to two versions ahead; each version is kept in a file."""
    return run_job("examples/sync/adapter.yaml", *ADAPTERS_AHEAD)


def test_each_rollout_is_of_one_version_of_the_adapter_and_outlives_later_ones(adapters_ahead: FinishedRun) -> None:
    assert adapters_ahead.exit_code == 0, adapters_ahead.stderr
    trained = [row for row in adapters_ahead.metrics if row["step"] > 0]
    assert max(row["staleness/max"] for row in trained) == 2
    assert max(row["staleness/partial_fraction"] for row in trained) == 0
    when_one_arrived = _stream(adapters_ahead, 1)
    assert when_one_arrived["version"] == 2, "the checkpoint of a step comes after its weights"
    assert min(when_one_arrived["stream"]["again"]) < 3 * 8, "one of the first three batches, begun under version 1"


def test_rollouts_that_wait_have_the_log_probs_of_the_trainer_at_their_version(adapters_ahead: FinishedRun) -> None:
    """Recomputed by transformers from what the trainer had at each version, which was written after each step."""
    job, policies = adapters_ahead.plan.job, dict[int, Any]()
    requests = RequestMaker(job, load_prompts(job))
    seen = set()
    for group in (group for step in range(1, 5) for group in _read_finished(adapters_ahead, step)):
        prompt = requests.rollout_request(group.number).prompt
        for completion in group.finished.completions:
            (span,) = completion.spans
            policy = policies.setdefault(span.version, _read_policy(adapters_ahead, span.version))
            assert (span.start, span.end) == (0, len(completion.tokens))
            assert max(_differences(policy, prompt, completion)) < ROUNDING
            seen.add(span.version)
    assert max(seen) > 1, "adapters that were trained"


def _stream(run: FinishedRun, step: int) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((run.folder / "checkpoints" / f"step-{step:06d}" / "run.json").read_text())
    return state


def _read_finished(run: FinishedRun, step: int) -> list[BufferedGroup]:
    """Groups that had ended after a step and were not yet trained on."""
    buffer = ExperienceBuffer(99)
    buffer.restore(json.loads((run.folder / "checkpoints" / f"step-{step:06d}" / "experience.json").read_text()))
    return buffer.take(1000)


def _read_policy(run: FinishedRun, version: int) -> Any:
    """The engines' first version is what training begins with."""
    from transformers import AutoModelForCausalLM

    folder = run.folder / "exports" / f"step-{version - 1}" if version > 1 else Path(run.plan.job.policy.path)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def _differences(policy: Any, prompt: tuple[int, ...], completion: Completion) -> list[float]:
    import torch

    tokens = torch.tensor(completion.tokens)
    with torch.no_grad():
        logits = policy(torch.tensor([[*prompt, *completion.tokens]])).logits[0, len(prompt) - 1 : -1]
    own = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return [abs(a - b) for a, b in zip(own.tolist(), completion.logprobs, strict=True)]
