"""Exercise 4: a model of 7B on one card of 80 GB, and what the well-known table of 92 GB leaves out.

In: the planner. Out: parts of docs/exercises.md. Left out: the prose around them.
"""

from collections.abc import Iterable

from benchmarks.exercises.plans import GB, choice, commands, decimal, example, find_peak, kinds
from benchmarks.texts import format_table
from rlplan.planner.plan import Plan
from rlplan.spec.models.adapters import list_lora_parameters
from rlplan.spec.models.catalogue import resolve_model
from rlplan.units import format_bytes, format_seconds
from rlplan.vocabulary import MemoryKind

ALL_ON_THE_GPU = (
    "training.offloads_optimizer=false",
    "placement.placement=hybrid",
    "placement.offload=none",
    "workload.micro_batch_size_per_gpu=4",
    "training.gradient_checkpointing=true",
)
PPO, GRPO = "exercises/ppo-7b", "exercises/grpo-7b"
ONE = "meta-llama/Llama-3.2-1B-Instruct"
SMALL_REWARD, LORA, EIGHT_BIT = f"roles.reward.path={ONE}", "training.lora={rank: 64}", "training.optimizer=adamw_8bit"
SMALL_OTHERS = (f"roles.value.path={ONE}", SMALL_REWARD)
VARIANTS: dict[str, tuple[str, ...]] = {
    "PPO, all on the GPU": (PPO, *ALL_ON_THE_GPU),
    "PPO": (PPO,),
    "PPO, 8-bit Adam": (PPO, EIGHT_BIT),
    "PPO, value and reward of 1B": (PPO, *SMALL_OTHERS),
    "PPO, value and reward of 1B, LoRA": (PPO, *SMALL_OTHERS, LORA),
    "GRPO": (GRPO,),
    "GRPO, 8-bit Adam": (GRPO, EIGHT_BIT),
    "GRPO, reward of 1B": (GRPO, SMALL_REWARD),
    "GRPO, LoRA": (GRPO, LORA),
    "GRPO, LoRA, 8-bit Adam, reward of 1B": (GRPO, SMALL_REWARD, LORA, EIGHT_BIT),
}
TOLD = {
    MemoryKind.WEIGHTS: 56.0,
    MemoryKind.OPTIMIZER: 28.0,
    MemoryKind.ACTIVATIONS: 8.0,
}
"""The well-known table, in GB: four models of 14; "optimizer states (AdamW, FP32)"; "activations"."""


def left_out() -> str:
    """The well-known table beside ours, kind by kind."""
    plan = example(*VARIANTS["PPO, all on the GPU"])
    assert isinstance(plan, Plan), plan
    assert plan.kv is not None, "there are rollouts"
    quoted = {kind.replace("_", " "): size for kind, size in TOLD.items()}
    ours = {kind.replace("_", " "): size for kind, size in kinds(find_peak(plan, "cuda:0")).items()}
    ours[f"KV cache of {plan.kv.max_num_seqs} rollouts at once"] = plan.kv.enough_bytes
    rows = []
    for name in dict.fromkeys([*quoted, *ours]):
        here = ours.get(name, 0)
        quoted_gb = f"{quoted[name]:.0f} GB" if name in quoted else "-"
        rows.append((name, quoted_gb, decimal(here), decimal(here - quoted.get(name, 0.0) * GB)))
    total, all_told = sum(ours.values()), sum(quoted.values())
    rows.append(("together", f"{all_told:.0f} GB", decimal(total), decimal(total - all_told * GB)))
    return format_table(("kind", "the table", "here", "left out"), rows)


def left_out_answer() -> str:
    """The answer in words, with the sums that can be done by hand."""
    model = resolve_model("meta-llama/Llama-2-7b-hf")
    count = model.num_parameters
    value = count - model.vocab_size * model.hidden_size + model.hidden_size
    adapters = sum(tensor.numel for tensor in list_lora_parameters(model, 64, "all-linear"))
    moments, masters, gradients = (decimal(size * count) for size in (8, 4, 2))
    sentences = (
        f"The model has {count:,} parameters. Adam's two fp32 moments are 8 bytes of each: {moments}, not 28 GB.",
        f"The fp32 master weights are {masters} more, gradients in bf16 {gradients}. The value model ({value:,}",
        f"parameters) is trained too, which is {decimal(14 * value)} beside its weights. Weights are those of five",
        f"copies: the rollout engine has its own. Adapters of rank 64 on all linear layers are {adapters:,}",
        f"parameters, {adapters / count:.1%} of the model: {decimal(16 * adapters)} with all their states.",
    )
    return "\n".join(sentences)


def variants() -> str:
    """A row a variant on one card."""
    rows = []
    for name, question in VARIANTS.items():
        plan = example(*question)
        if isinstance(plan, str):
            rows.append((name, plan, "", "", "", "", ""))
            continue
        assert plan.kv is not None, "there are rollouts"
        training = max(size for (_, action), size in list_totals(plan) if action.startswith("train_"))
        generating = max(size for (_, action), size in list_totals(plan) if action == "generate")
        cache = format_bytes(plan.kv.kv_cache_memory_bytes)
        step = format_seconds(plan.seconds) if plan.verdict.rank < 2 else "-"
        host = format_bytes(plan.ledger.host_peak().num_bytes)
        sizes = (f"{format_bytes(generating)} ({cache})", format_bytes(training), host)
        rows.append((name, choice(plan), *sizes, plan.verdict.value, step))
    head = ("variant", "plan, or the nearest", "generating (KV cache)", "training", "the host", "verdict", "a step")
    return format_table(head, rows)


def list_totals(plan: Plan) -> Iterable[tuple[tuple[str, str], int]]:
    """((moment, action), bytes) of the one card."""
    return plan.ledger.device_totals("cuda:0").items()


def variants_commands() -> str:
    """How to get the rows."""
    return commands(VARIANTS.values())
