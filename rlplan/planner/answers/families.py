"""Families: the changes that are worth a question: what the search left aside, and what one would ask for next.

In: a Budget. Out: Changes. Left out: their outcomes (changes.py).
"""

from collections.abc import Iterator

from rlplan.planner.answers.changes import Change
from rlplan.planner.answers.plan_results import WAYS, choice_words
from rlplan.planner.budget import Budget
from rlplan.planner.gpu.axes import ENGINE_TP, MAX_BESIDE, MAX_EP, MAX_PP, Axes, quantizations, zero_stages
from rlplan.planner.gpu.candidates import MAX_AUTO_SEQS, MAX_AUTO_TOKENS
from rlplan.spec.budget import BudgetSpec
from rlplan.spec.hardware import ComputeDtype
from rlplan.spec.profiles import parse_gpus
from rlplan.vocabulary import Placement

LADDERS = (
    ("v100-sxm-16gb", "v100-sxm-32gb", "a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200", "b300"),
    ("a100-pcie-40gb", "a100-pcie-80gb", "h100-pcie", "h100-nvl", "h200-nvl"),
    ("t4", "a10", "l40s", "h100-pcie"),
    ("l4", "l40s"),
    ("a10g", "l40s"),
    ("a30", "a100-pcie-40gb"),
    ("a40", "l40s"),
    ("l40", "l40s"),
    ("a800-sxm", "h800-sxm", "h200-sxm"),
    ("h20", "h200-sxm"),
    ("v100-pcie-16gb", "a100-pcie-40gb"),
    ("rtx-3090", "rtx-4090", "rtx-5090", "rtx-pro-6000"),
    ("rtx-4070-ti", "rtx-4080", "rtx-5080", "rtx-5090"),
    ("rtx-a5000", "rtx-a6000", "rtx-6000-ada", "rtx-pro-6000"),
    ("mi210", "mi300x", "mi325x", "mi355x"),
    ("mi250x-gcd", "mi300x"),
    ("gh200-96gb", "gb200", "gb300"),
)
"""Profiles in the order in which one would move on: each has more memory than the one before, or is faster."""
ADAPTER_RANK = 64
FEW_HOSTS = 4
"""Beyond so many hosts one more changes little, and divides nothing: twice as many is asked for instead."""


def next_gpu(name: str) -> str | None:
    """The next profile in the first ladder that has one of that name and goes on.

    >>> next_gpu("h100-sxm"), next_gpu("b300")
    ('h200-sxm', None)
    """
    for ladder in LADDERS:
        if name in ladder[:-1]:
            return ladder[ladder.index(name) + 1]
    return None


def list_families(budget: Budget) -> Iterator[Change]:
    """Every choice that was left to the search, taken the other way."""
    spec, words = budget.spec, choice_words(budget.candidate)
    if spec.declaration.has_rollouts and spec.placement.placement == "auto":
        for placement in Placement:
            if placement is not budget.candidate.step.placement:
                yield Change((f"placement.placement={placement}",), placement.value)
    yield from _switches(spec, budget, words)
    yield from _passes(budget)
    for name in WAYS:
        if getattr(spec.training, name) == "auto":
            most = min(budget.setting.num_gpus, {"pp": MAX_PP, "ep": MAX_EP}.get(name, MAX_BESIDE))
            yield from _neighbours(f"training.{name}", getattr(budget.candidate.trainer, name), most)
    if spec.declaration.has_rollouts and spec.rollout.tp == "auto":
        most = min(ENGINE_TP, budget.candidate.step.num_generation)
        yield from _neighbours("rollout.tp", budget.candidate.engine.tp, most)
    yield from _of_engine(budget)


def _passes(budget: Budget) -> Iterator[Change]:
    """Passes of other sizes, where these were left open."""
    workload, trainer = budget.spec.workload, budget.candidate.trainer
    if workload.micro_batch_size_per_gpu != "auto" or workload.max_tokens_per_micro_batch is not None:
        return
    least, ways = workload.max_seq_len, trainer.ranks_per_sequence
    share = workload.rollouts_per_mini_batch * ways // budget.candidate.step.num_training
    most = max(1, min(share, MAX_AUTO_TOKENS * trainer.ulysses * trainer.cp // least))
    if trainer.max_tokens:
        key = "workload.max_tokens_per_micro_batch"
        yield from _neighbours(key, trainer.max_tokens, most * least, least)
    else:
        yield from _neighbours("workload.micro_batch_size_per_gpu", trainer.micro_batch, most)


def _of_engine(budget: Budget) -> Iterator[Change]:
    """How the engine sleeps, how many sequences it has at once, and in how many bits."""
    spec, engine = budget.spec, budget.candidate.engine
    if not spec.declaration.has_rollouts:
        return
    if spec.rollout.sleep_level == "auto" and engine.sleep_level:
        other = 3 - engine.sleep_level
        yield Change((f"rollout.sleep_level={other}",), "weights kept" if other == 1 else "weights dropped")
    if spec.rollout.max_num_seqs == "auto":
        yield from _neighbours("rollout.max_num_seqs", engine.max_num_seqs, MAX_AUTO_SEQS)
    if spec.rollout.quantization == "auto":
        for word in quantizations(spec, budget.setting.pools[-1].gpu):
            if word != engine.quantization:
                yield Change((f"rollout.quantization={word or 'null'}",), word or "as loaded")


def _switches(spec: BudgetSpec, budget: Budget, words: dict[str, str]) -> Iterator[Change]:
    training, trainer = spec.training, budget.candidate.trainer
    if training.zero_stage == "auto":
        axes = Axes(*(getattr(trainer, name) for name in WAYS))
        for stage in zero_stages(spec, budget.candidate.step.num_training, axes):
            if stage != trainer.zero_stage:
                yield Change((f"training.zero_stage={stage}",), f"ZeRO-{stage}")
    if training.recompute == "auto":
        other = "none" if words["training.recompute"] == "full" else "full"
        yield Change((f"training.recompute={other}",), f"{other} recomputation".replace("none", "no"))
    for key, value, what in (
        ("training.offloads_optimizer", training.offloads_optimizer, "the optimizer on the host"),
        ("training.offloads_parameters", training.offloads_parameters, "parameters on the host"),
        ("placement.parks", spec.placement.parks, "waiting roles on the host"),
    ):
        if value == "auto" and (key != "placement.parks" or spec.declaration.has_rollouts):
            is_on = words.get(key, "false") != "false"
            if key != "placement.parks" or budget.candidate.step.placement is Placement.COLOCATED:
                yield Change((f"{key}={str(not is_on).lower()}",), f"without {what}" if is_on else what)


def _neighbours(key: str, value: int, most: int, least: int = 1) -> Iterator[Change]:
    if value // 2 >= least:
        yield Change((f"{key}={value // 2}",), "half")
    if 2 * value <= most:
        yield Change((f"{key}={2 * value}",), "double")


def list_what_ifs(budget: Budget) -> Iterator[Change]:
    """What one would ask for next: more or fewer GPUs, newer ones, adapters, cheaper rollouts, overlap."""
    spec, gpu = budget.spec, budget.setting.gpu
    if "+" not in spec.gpus:
        yield from _other_gpus(budget)
    if spec.training.lora is None:
        yield Change((f"training.lora={{rank: {ADAPTER_RANK}}}",), "adapters only: trains less")
    if not spec.declaration.has_rollouts:
        return
    if spec.rollout.quantization is None and ComputeDtype.FLOAT8 in gpu.dense_flops_per_s:
        yield Change(("rollout.quantization=fp8",), "rollouts in 8 bits: rounds weights")
    if spec.placement.max_staleness == 0 and budget.setting.num_gpus > 1:
        placement = () if spec.placement.placement in ("auto", "disaggregated") else ("placement.placement=auto",)
        yield Change(("placement.max_staleness=1", *placement), "rollouts one version behind")
    if spec.reward_model is not None:
        yield Change(("reward_model=null",), "a rule as reward")


def _other_gpus(budget: Budget) -> Iterator[Change]:
    """One host or GPU more, half of them, and as many of the next kind."""
    if budget.setting.has_pools:
        return  # which of the two groups grows is the user's to say
    setting, (count, unit, name) = budget.setting, _units(budget)
    per_host = 1 if unit > 1 else setting.gpus_per_host
    more = per_host if count >= per_host else 1
    is_host = unit > 1 or more > 1
    if setting.num_hosts > FEW_HOSTS:
        yield Change((f"gpus={2 * count}x{name}",), "twice as many")
    else:
        yield Change((f"gpus={count + more}x{name}",), "one host more" if is_host else "one GPU more")
    if count > 1:
        yield Change((f"gpus={count // 2}x{name}",), "half of them")
    elif unit > 1:
        yield Change((f"gpus={unit // 2}x{setting.gpu.name}",), "half of them")
    newer = next_gpu(setting.gpu.name)
    if newer is not None:
        yield Change((f"gpus={setting.num_gpus}x{newer}",), "the next GPU")


def _units(budget: Budget) -> tuple[int, int, str]:
    """How many of what the budget counts in, GPUs of one of them (1, or those of a node), and its name."""
    count, gpu, node = parse_gpus(budget.spec.gpus, where="gpus")
    if count != budget.setting.num_gpus:  # the objective took fewer
        return budget.setting.num_gpus, 1, gpu.name
    return (count, 1, gpu.name) if node is None else (count // node.num_gpus, node.num_gpus, node.name)


def list_more_gpus(budget: Budget, doublings: int = 4) -> Iterator[Change]:
    """The same job on two, four, eight and sixteen times the GPUs."""
    count, _, name = _units(budget)
    for times in (2**power for power in range(1, doublings + 1)):
        yield Change((f"gpus={count * times}x{name}",), f"{times} times the GPUs")
