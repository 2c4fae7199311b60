"""Settings to simulate: small, with a speed whose seconds can be added up by hand."""

from typing import Any

from benchmarks.simulated.linear_speed import LinearSpeed
from benchmarks.simulated.plain_schedule import plain_schedule
from rlplan.simulate.engine import EngineLimits
from rlplan.simulate.setting import Asynchrony, SimulationSetting, StepRollouts
from rlplan.spec.parts.lengths import ConstantLengths, Lengths, UniformLengths
from rlplan.timing.cost import Cost, Resource
from rlplan.vocabulary import ActionKind, Placement

SPEED = LinearSpeed(base_s=0.01, per_seq_s=0.001, per_token_s=1e-6, prefill_token_s=1e-5)
ROOMY = EngineLimits(max_num_seqs=256, num_blocks=100_000)
TRAIN_S, SYNC_S = 2.0, 0.5


def make_constant(tokens: int) -> Lengths:
    """Every response as long."""
    return Lengths(ConstantLengths(value=tokens), tokens)


def uniform(low: int, high: int) -> Lengths:
    """Every length as likely."""
    return Lengths(UniformLengths(kind="uniform", low=low, high=high), high)


def make_work(**changes: Any) -> StepRollouts:
    """8 prompts of 32 tokens, 4 samples of 50 tokens each, on 2 engines."""
    values: dict[str, Any] = {
        "num_prompts": 8,
        "num_samples": 4,
        "prompt_len": 32,
        "lengths": make_constant(50),
        "num_engines": 2,
        "limits": ROOMY,
    }
    return StepRollouts(**{**values, **changes})


def make_setting(
    work: StepRollouts | None = None,
    asynchrony: Asynchrony | None = None,
    placement: Placement = Placement.DISAGGREGATED,
    num_mini_batches: int = 4,
    train_s: float = TRAIN_S,
    **changes: Any,
) -> SimulationSetting:
    """2 GPUs for training, 2 for generation: `train_s` seconds of training, SYNC_S of hand-over."""
    schedule = plain_schedule(placement, 2, 2, num_mini_batches=num_mini_batches)
    costs = {
        action.id: Cost({Resource.COMPUTE: train_s / num_mini_batches})
        for action in schedule.step
        if action.kind is ActionKind.TRAIN_FORWARD_BACKWARD
    }
    costs["sync_weights"] = Cost({Resource.NETWORK: SYNC_S})
    values: dict[str, Any] = {"num_steps": 6, "num_traced_steps": 6}
    return SimulationSetting(
        schedule, costs, work or make_work(), SPEED, asynchrony=asynchrony, **{**values, **changes}
    )
