"""The closed form of a generation phase and the simulator, which share the engine's speed and nothing else."""

import pytest

from benchmarks.simulated.plain_schedule import plain_schedule
from rlplan.dataflow.choice import EngineChoice
from rlplan.planner.setting import read_setting
from rlplan.simulate.engine import EngineLimits
from rlplan.simulate.run import simulate
from rlplan.simulate.setting import SimulationSetting, StepRollouts
from rlplan.spec.hardware.catalogue import get_gpu
from rlplan.spec.parts.lengths import ConstantLengths, Lengths, LengthSpec, LogNormalLengths, UniformLengths
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.serving import generation
from rlplan.vocabulary import Placement
from tests.factories import gpu_job

CONSTANT = ConstantLengths(value=1000)
UNIFORM = UniformLengths(kind="uniform", low=100, high=3000)
LOGNORMAL = LogNormalLengths(kind="lognormal", median=800, sigma=0.9)


@pytest.mark.parametrize(
    ("spec", "max_num_seqs", "kv_tokens", "within"),
    [
        (CONSTANT, 256, 600_000, 0.01),
        (CONSTANT, 64, 600_000, 0.01),
        (UNIFORM, 256, 600_000, 0.02),
        (UNIFORM, 64, 600_000, 0.08),
        (UNIFORM, 256, 150_000, 0.12),
        (LOGNORMAL, 256, 600_000, 0.08),
        (LOGNORMAL, 64, 600_000, 0.08),
        (LOGNORMAL, 256, 60_000, 0.08),
    ],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_the_closed_form_of_generation_is_the_mean_of_simulated_steps(
    spec: LengthSpec, max_num_seqs: int, kv_tokens: int, within: float
) -> None:
    plan = gpu_job({"policy": "Qwen/Qwen2.5-7B", "hardware": "8xH100", "algorithm": "grpo"})
    cluster = Cluster(get_gpu("h100-sxm", where="test"), 8, 8)
    choice = EngineChoice(tp=1, sleep_level=0)
    speed = generation.EngineSpeed(read_setting(plan).policy, plan.rollout, choice, cluster)
    lengths = Lengths(spec, 8192)
    closed = generation.generate_cost(
        speed, generation.EngineRollouts(256, 512, 8, lengths, max_num_seqs, kv_tokens)
    ).seconds
    work = StepRollouts(32, 8, 512, lengths, 1, EngineLimits(max_num_seqs, kv_tokens // 16))
    schedule = plain_schedule(Placement.HYBRID, 1, 1)
    simulated = simulate(SimulationSetting(schedule, {}, work, speed, 20), 1).mean_step_s
    assert closed == pytest.approx(simulated, rel=within)
