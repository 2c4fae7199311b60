"""Generation in the trainer: no second copy of the weights, a KV cache while it lasts."""

import pytest

from rlplan.planner.plan import Plan
from rlplan.planner.search import open_search
from rlplan.spec.files.job_file import job_from
from rlplan.vocabulary import MemoryKind

LORA = (
    "training.backend=fsdp2",
    "training.lora.rank=16",
    "training.master_dtype=bfloat16",
    "training.gradient_checkpointing=true",
    "workload.num_prompts_per_step=2",
    "workload.num_samples_per_prompt=4",
    "workload.max_prompt_len=512",
    "workload.max_response_len=512",
    "workload.micro_batch_size_per_gpu=4",
    "placement.placement=hybrid",
    "rollout.max_num_seqs=8",
    "rollout.max_num_batched_tokens=4096",
)


def make_plan(*more: str, gpus: str = "1xRTX4090") -> Plan:
    job = job_from({"policy": "Qwen/Qwen2.5-7B", "hardware": gpus, "algorithm": "grpo"}, (*LORA, *more))
    return open_search(job).run(with_others=False)


def find_peak(plan: Plan, action: str) -> dict[MemoryKind, int]:
    """Bytes of the engine on one GPU by kind, at the peak of an action of every step."""
    rows = [
        row
        for row in plan.ledger.rows
        if (row.process, row.run_phase, row.action_id, row.device) == ("rollout_engine/0", "steady", action, "cuda:0")
    ]
    return {row.kind: row.peak_bytes for row in rows if row.peak_bytes}


def test_only_generation_holds_something_and_no_weights_beside_the_trainer_s() -> None:
    plan = make_plan("rollout.engine=transformers")
    during = find_peak(plan, "generate")
    assert set(during) == {MemoryKind.KV_CACHE, MemoryKind.ACTIVATIONS}
    token = 2 * 28 * 4 * 128 * 2  # each rollout's prompt is its own; in whole blocks
    assert 0 <= during[MemoryKind.KV_CACHE] - 8 * 1024 * token <= 8 * 16 * token
    assert find_peak(plan, "train_forward_backward") == find_peak(plan, "sync_weights") == {}
    assert plan.fit.may_fit
    beside = make_plan(gpus="1xH100")  # a copy of the weights, and what vLLM takes beside
    assert beside.binding.num_bytes - plan.binding.num_bytes > 7_615_616_512 * 2


@pytest.mark.parametrize(
    ("gpus", "more"),
    [("2xH100", ()), ("1xH100", ("training.offloads_parameters=true", "training.offloads_optimizer=true"))],
)
def test_weights_that_are_sharded_or_on_the_host_are_gathered_for_it(gpus: str, more: tuple[str, ...]) -> None:
    during = find_peak(make_plan("rollout.engine=transformers", *more, gpus=gpus), "generate")
    assert during[MemoryKind.WEIGHTS] == pytest.approx(7_615_616_512 * 2, rel=0.01)


def test_rlplan_s_own_runtime_has_an_engine() -> None:
    refusals = make_plan("rollout.engine=transformers", "training.backend=deepspeed", "framework=rlplan").refusals
    assert any("rollout.engine transformers" in refusal for refusal in refusals)
