"""Exercise 3: 64 GPUs in 8 nodes, a model of 70B.

In: examples/ppo-70b-64xh100.yaml. Out: parts of docs/exercises.md. Left out: the prose around them.
"""

from benchmarks.exercises.plans import a_pass, choice, example, kinds, table
from rlplan.planner.answers.plan_results import choice_words, phase_costs
from rlplan.planner.plan import Plan
from rlplan.units import format_bytes, format_rate, format_seconds

EXAMPLE = "ppo-70b-64xh100"


def big() -> Plan:
    """The plan of the example. Raises: AssertionError where there is none."""
    found = example(EXAMPLE)
    assert isinstance(found, Plan), found
    return found


def design() -> str:
    """What is chosen for 64 GPUs."""
    budget = big()
    step, trainer, engine = budget.choice.arrangement, budget.choice.trainer, budget.choice.engine
    ranks = trainer.tp * trainer.pp * trainer.cp * trainer.ulysses
    sync = budget.costs["sync_weights"]
    low, high = budget.interval()
    transport = budget.choice.way
    passes = f"{'full' if trainer.gradient_checkpointing else 'no'} recomputation, {a_pass(budget)} a pass"
    ways = f"tp {trainer.tp}, pp {trainer.pp}, dp {step.num_training // ranks}, ZeRO-{trainer.zero_stage}"
    peak = f"{format_bytes(budget.binding.num_bytes)} of {format_bytes(budget.binding_capacity)}"
    assert budget.kv is not None, "there are rollouts"
    cache = f"{format_bytes(budget.kv.kv_cache_memory_bytes)} a GPU, {budget.kv.num_tokens:,} tokens an engine"
    mostly = sync.bound_by.value.replace("_", " ")
    rows = [
        ("placement", choice(budget)),
        ("training", f"{ways}, {passes}"),
        ("generation", f"{step.num_generation // engine.tp} engines of tp {engine.tp}"),
        ("hand-over of weights", f"{transport}, {format_seconds(sync.seconds)} ({mostly})"),
        ("KV cache", cache),
        ("fullest GPU", f"{peak} in {budget.binding.action_id}; {format_bytes(low)} to {format_bytes(high)}"),
        ("verdict", budget.verdict.value),
        ("a step", f"{format_seconds(budget.seconds)}, {format_rate(budget.tokens_per_s)}"),
        (
            "as it is typed",
            " ".join(f"`{key}={value}`" for key, value in choice_words(budget.choice, budget.job).items()),
        ),
    ]
    return table(("question", "answer"), rows)


def design_memory() -> str:
    """Bytes of one GPU at its fullest moment, by kind, and at the other moments in sum."""
    budget = big()
    rows = [(str(kind).replace("_", " "), format_bytes(size)) for kind, size in kinds(budget.binding).items()]
    return table((f"one GPU in {budget.binding.action_id}", "bytes"), rows)


def design_time() -> str:
    """Seconds of each phase."""
    budget = big()
    rows = [
        (
            str(phase),
            format_seconds(cost.seconds),
            f"{cost.seconds / budget.seconds:.0%}",
            cost.bound_by.value.replace("_", " "),
        )
        for phase, cost in phase_costs(budget.timing.step).items()
    ]
    return table(("phase", "seconds", "part of the step", "mostly"), rows)


TARGETS = ("rlplan", "fsdp2", "megatron")


def design_targets() -> str:
    """The same question for each target that could run it."""
    rows = []
    for target in TARGETS:
        ways = ("training.tp=auto", "training.pp=auto") if target == "megatron" else ()
        found = example(EXAMPLE, f"target={target}", *ways)
        if isinstance(found, str):
            rows.append((target, found, "-", "-"))
            continue
        peak = f"{format_bytes(found.binding.num_bytes)}, {found.verdict.value}"
        rows.append((target, choice(found), peak, format_seconds(found.seconds)))
    return table(("target", "plan", "fullest GPU", "a step"), rows)
