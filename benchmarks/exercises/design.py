"""Exercise 3: 64 GPUs in 8 nodes, a model of 70B.

In: examples/ppo-70b-64xh100.yaml. Out: parts of docs/exercises.md. Left out: the prose around them.
"""

from benchmarks.exercises.plans import a_pass, choice, example, kinds
from benchmarks.texts import format_table
from rlplan.planner.answers.plan_results import list_overrides, sum_phase_costs
from rlplan.planner.plan import Plan
from rlplan.units import format_bytes, format_rate, format_seconds

EXAMPLE = "ppo-70b-64xh100"


def big() -> Plan:
    """The plan of the example. Raises: AssertionError where there is none."""
    plan = example(EXAMPLE)
    assert isinstance(plan, Plan), plan
    return plan


def design() -> str:
    """The plan for 64 GPUs."""
    plan = big()
    step, trainer, engine = plan.choice.arrangement, plan.choice.trainer, plan.choice.engine
    ranks = trainer.tp * trainer.pp * trainer.cp * trainer.ulysses
    sync = plan.costs["sync_weights"]
    low, high = plan.interval()
    transport = plan.choice.sync_mode
    passes = f"{'full' if trainer.gradient_checkpointing else 'no'} recomputation, {a_pass(plan)} a pass"
    axes = f"tp {trainer.tp}, pp {trainer.pp}, dp {step.num_training // ranks}, ZeRO-{trainer.zero_stage}"
    peak = f"{format_bytes(plan.binding.num_bytes)} of {format_bytes(plan.binding_capacity)}"
    assert plan.kv is not None, "there are rollouts"
    cache = f"{format_bytes(plan.kv.kv_cache_memory_bytes)} a GPU, {plan.kv.num_tokens:,} tokens an engine"
    mostly = sync.bound_by.value.replace("_", " ")
    rows = [
        ("placement", choice(plan)),
        ("training", f"{axes}, {passes}"),
        ("generation", f"{step.num_generation // engine.tp} engines of tp {engine.tp}"),
        ("weight sync", f"{transport}, {format_seconds(sync.seconds)} ({mostly})"),
        ("KV cache", cache),
        ("fullest GPU", f"{peak} in {plan.binding.action_id}; {format_bytes(low)} to {format_bytes(high)}"),
        ("verdict", plan.verdict.value),
        ("a step", f"{format_seconds(plan.seconds)}, {format_rate(plan.tokens_per_s)}"),
        (
            "as printed",
            " ".join(f"`{key}={value}`" for key, value in list_overrides(plan.choice, plan.job).items()),
        ),
    ]
    return format_table(("question", "answer"), rows)


def design_memory() -> str:
    """Bytes of one GPU at its fullest moment, by kind, and at the other moments in sum."""
    plan = big()
    rows = [(str(kind).replace("_", " "), format_bytes(size)) for kind, size in kinds(plan.binding).items()]
    return format_table((f"one GPU in {plan.binding.action_id}", "bytes"), rows)


def design_time() -> str:
    """Seconds of each phase."""
    plan = big()
    rows = [
        (
            str(phase),
            format_seconds(cost.seconds),
            f"{cost.seconds / plan.seconds:.0%}",
            cost.bound_by.value.replace("_", " "),
        )
        for phase, cost in sum_phase_costs(plan.timing.step).items()
    ]
    return format_table(("phase", "seconds", "part of the step", "mostly"), rows)


FRAMEWORKS = (
    ("rlplan, DeepSpeed", ("framework=rlplan",)),
    ("verl, FSDP2", ("framework=verl", "training.backend=fsdp2")),
    ("verl, Megatron-Core", ("framework=verl", "training.backend=megatron", "training.tp=auto", "training.pp=auto")),
)


def design_frameworks() -> str:
    """The same question for each framework and trainer that could run it."""
    rows = []
    for name, overrides in FRAMEWORKS:
        plan = example(EXAMPLE, *overrides)
        if isinstance(plan, str):
            rows.append((name, plan, "-", "-"))
            continue
        peak = f"{format_bytes(plan.binding.num_bytes)}, {plan.verdict.value}"
        rows.append((name, choice(plan), peak, format_seconds(plan.seconds)))
    return format_table(("framework", "plan", "fullest GPU", "a step"), rows)
