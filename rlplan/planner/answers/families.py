"""Changes worth trying: choices that the search rejected, and usual next questions.

In: a Plan. Out: Changes. Left out: their outcomes (changes.py).
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from rlplan.planner.answers.changes import Change
from rlplan.planner.answers.plan_results import list_overrides
from rlplan.planner.checks.trainers import AXES
from rlplan.planner.gpu.axes import ENGINE_TP, MAX_BESIDE, MAX_EP, MAX_PP, list_quantizations, list_zero_stages
from rlplan.planner.gpu.candidates import MAX_AUTO_SEQS, MAX_AUTO_TOKENS
from rlplan.planner.machine import DRAFTS
from rlplan.planner.plan import Plan
from rlplan.planner.remedies import ADAPTER_RANK
from rlplan.spec.files.yaml import read_yaml
from rlplan.spec.hardware.profile import ComputeDtype
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import Placement

FEW_HOSTS = 4
"""Up to this number of hosts, one more host is tried. Beyond it, one host changes little and rarely divides evenly, so
twice as many are tried."""


@cache
def load_table() -> dict[str, Any]:
    """Load families.yaml; only explanations need it."""
    return dict(read_yaml(Path(__file__).with_suffix(".yaml"), "the table of changes"))


def find_next_gpu(name: str) -> str | None:
    """Find the next profile in the first upgrade path that contains `name` and continues.

    >>> find_next_gpu("h100-sxm"), find_next_gpu("b300")
    ('h200-sxm', None)
    """
    ladders: list[list[str]] = load_table()["ladders"]
    for ladder in ladders:
        if name in ladder[:-1]:
            return ladder[ladder.index(name) + 1]
    return None


def list_families(plan: Plan) -> Iterator[Change]:
    """List the alternatives to each open choice."""
    spec, words = plan.asked, list_overrides(plan.choice, plan.job, plan.asked)
    if spec.has_rollouts and spec.placement.placement == "auto":
        for placement in Placement:
            if placement is not plan.choice.arrangement.placement:
                yield Change((f"placement.placement={placement}",), placement.value)
    yield from _list_switches(spec, plan, words)
    yield from _list_passes(plan)
    for name in AXES[plan.job.backend]:
        if getattr(spec.training, name) == "auto":
            most = min(plan.num_devices, {"pp": MAX_PP, "ep": MAX_EP}.get(name, MAX_BESIDE))
            yield from _list_neighbours(f"training.{name}", getattr(plan.choice.trainer, name), most)
    if spec.has_rollouts and spec.rollout.tp == "auto":
        most = min(ENGINE_TP, plan.choice.arrangement.num_generation)
        yield from _list_neighbours("rollout.tp", plan.choice.engine.tp, most)
    yield from _list_attention_dp(plan)
    yield from _list_engine_changes(plan)


def _list_attention_dp(plan: Plan) -> Iterator[Change]:
    """List other data-parallel attention sizes if the job leaves them open and the model has experts."""
    rollout, engine = plan.asked.rollout, plan.choice.engine
    is_open = plan.asked.has_rollouts and rollout.attention_dp == "auto" and rollout.has_expert_parallel is not False
    if is_open and not plan.job.is_for_rlplan and plan.job.load_model().experts is not None:
        most = min(MAX_EP, plan.choice.arrangement.num_generation) // engine.tp
        yield from _list_neighbours("rollout.attention_dp", engine.attention_dp, most)


def _list_passes(plan: Plan) -> Iterator[Change]:
    """List other micro-batch sizes if the job leaves them open."""
    workload, trainer = plan.asked.workload, plan.choice.trainer
    if workload.micro_batch_size_per_gpu != "auto" or plan.asked.training.max_tokens_per_micro_batch != "auto":
        return
    least, ranks_per_sequence = plan.asked.sequences_per_unit * workload.max_seq_len, trainer.ranks_per_sequence
    share = workload.rollouts_per_mini_batch * ranks_per_sequence // plan.choice.arrangement.num_training
    most = max(1, min(share, MAX_AUTO_TOKENS * trainer.ulysses * trainer.cp // workload.max_seq_len))
    if trainer.max_tokens:
        key = "training.max_tokens_per_micro_batch"
        yield from _list_neighbours(key, trainer.max_tokens, most * workload.max_seq_len, least)
    else:
        yield from _list_neighbours("workload.micro_batch_size_per_gpu", trainer.micro_batch, most)


def _list_engine_changes(plan: Plan) -> Iterator[Change]:
    """List other engine settings: sleep level, concurrent sequences, quantization, sync content."""
    spec, engine = plan.asked, plan.choice.engine
    if not spec.has_rollouts:
        return
    if spec.rollout.sleep_level == "auto" and engine.sleep_level:
        other = 3 - engine.sleep_level
        yield Change((f"rollout.sleep_level={other}",), "weights kept" if other == 1 else "weights dropped")
    if spec.rollout.max_num_seqs == "auto":
        yield from _list_neighbours("rollout.max_num_seqs", engine.max_num_seqs, MAX_AUTO_SEQS)
    if spec.rollout.quantization == "auto" and not plan.is_on_host:
        for word in list_quantizations(spec, plan.job.load_gpu("generation")):
            if word != engine.quantization:
                yield Change((f"rollout.quantization={word or 'none'}",), word or "as loaded")
    if spec.placement.sync_content == "auto" and plan.choice.sends_changes:
        yield Change(("placement.sync_content=full",), "all weights sent")


def _list_switches(spec: JobSpec, plan: Plan, words: dict[str, str]) -> Iterator[Change]:
    training, trainer = spec.training, plan.choice.trainer
    if training.zero_stage == "auto":
        for stage in list_zero_stages(spec, plan.choice.arrangement.num_training):
            has_it = spec.backend != "deepspeed" or not any(training.combination(stage).contradictions())
            if stage != trainer.zero_stage and has_it:
                yield Change((f"training.zero_stage={stage}",), f"ZeRO-{stage}")
    for key, value, what in (
        ("training.gradient_checkpointing", training.gradient_checkpointing, "gradient checkpointing"),
        ("training.offloads_optimizer", training.offloads_optimizer, "the optimizer on the host"),
        ("training.offloads_parameters", training.offloads_parameters, "parameters on the host"),
    ):
        if value == "auto":
            is_on = words.get(key, "false") != "false"
            yield Change((f"{key}={str(not is_on).lower()}",), f"without {what}" if is_on else what)
    if spec.placement.offload == "auto" and plan.choice.arrangement.placement is Placement.COLOCATED:
        is_on = plan.choice.arrangement.offloaded == "all"
        where = "disk" if plan.is_on_host else "host"
        overrides = (f"placement.offload={where}", "placement.offload_roles=all")
        if is_on:
            yield Change(("placement.offload=none",), f"without offloading idle roles to the {where}")
        else:
            yield Change(overrides, f"idle roles offloaded to the {where}")


def _list_neighbours(key: str, value: int, most: int, least: int = 1) -> Iterator[Change]:
    counted = load_table()["counted"][key]
    if value // 2 >= least:
        yield Change((f"{key}={value // 2}",), f"half the {counted}")
    if 2 * value <= most:
        yield Change((f"{key}={2 * value}",), f"twice the {counted}")


def list_what_ifs(plan: Plan) -> Iterator[Change]:
    """List usual what-ifs: more or fewer devices, newer GPUs, LoRA, cheaper rollouts, async rollouts."""
    spec = plan.asked
    yield from _list_other_devices(plan)
    if spec.training.lora is None:
        yield Change((f"training.lora={{rank: {ADAPTER_RANK}}}",), "LoRA: trains adapters only")
    if not spec.has_rollouts:
        return
    multiplies_fp8 = not plan.is_on_host and ComputeDtype.FLOAT8 in plan.job.load_gpu().dense_flops_per_s
    if spec.rollout.quantization == "none" and multiplies_fp8:
        yield Change(("rollout.quantization=fp8",), "fp8 rollouts: rounds weights")
    if spec.rollout.acceptance_rate is not None and not plan.is_on_host:
        for count in DRAFTS:
            if count != spec.rollout.speculative_tokens:
                yield Change((f"rollout.speculative_tokens={count}",), f"{count or 'no'} drafted tokens per step")
    if spec.placement.max_staleness == 0 and plan.num_devices > 1:
        placement = () if spec.placement.placement in ("auto", "disaggregated") else ("placement.placement=auto",)
        yield Change(("placement.max_staleness=1", *placement), "rollouts one version behind")
    if spec.roles.reward.path is not None:
        yield Change(("roles.reward.path=null",), "rule-based reward")


def _list_other_devices(plan: Plan) -> Iterator[Change]:
    """List one more host or device, half as many, and the same number of the next GPU."""
    hardware, word = plan.job.hardware, plan.device_word
    if hardware.generation is not None:
        return  # with two groups, only the user can tell which one should grow
    count, host = hardware.num_devices, hardware.devices_per_host
    more = 1 if plan.is_on_host or not count >= host > 1 else host
    if hardware.num_hosts > FEW_HOSTS:
        yield _change_devices(plan, 2 * count, "twice as many")
    else:
        yield _change_devices(plan, count + more, "one more host" if more > 1 else f"one more {word}")
    if count > 1:
        yield _change_devices(plan, count // 2, f"half the {word}s")
    newer = None if plan.is_on_host else find_next_gpu(plan.job.load_gpu().name)
    if newer is not None:
        overrides = [f"hardware.profile={newer}"]
        if plan.asked.hardware.num_devices != count:
            overrides.append(f"hardware.num_devices={count}")
        yield Change(tuple(overrides), "the next GPU")


def _change_devices(plan: Plan, count: int, words: str) -> Change:
    """Build the change to `count` devices, on as few hosts as hold them."""
    overrides = [f"hardware.num_devices={count}"]
    if plan.asked.hardware.num_hosts != "auto":
        overrides.append("hardware.num_hosts=auto")
    return Change(tuple(overrides), words)


def list_more_devices(plan: Plan) -> Iterator[Change]:
    """List the job on 2, 4, 8 and 16 times the devices."""
    for times in (2, 4, 8, 16):
        yield _change_devices(plan, times * plan.num_devices, f"{times} times the {plan.device_word}s")
