"""verl's staleness sweep, simulated: inputs, the one number that is calibrated, and what comes out.

    published   Qwen2.5-Math-7B, DAPO, 128 H20 as 64 for rollouts and 64 for training, 100 hand-overs of weights:
                staleness_threshold 0 / 0.1 / 0.3 / 0.5 took 4 h 25, 3 h 53, 3 h 18, 3 h 13
    calibrated  on the first of them alone: `LENGTH_SCALE`
    predicted   the other three, as ratios to the first

Every input below was written down, with its source, before the other three were simulated; the commits show it. (The
published hours themselves were known all along: they stand in the task.)

    python -m benchmarks.staleness_sweep inputs       the engine's speed, from two colocated runs
    python -m benchmarks.staleness_sweep calibrate    LENGTH_SCALE, from the first of the four
    python -m benchmarks.staleness_sweep              all four
"""

import math
import sys
from collections.abc import Callable
from statistics import NormalDist

from rlplan.dataflow.gpu_step import GpuStep, build_gpu_schedule
from rlplan.simulate.engine import EngineLimits
from rlplan.simulate.result import SimulationResult
from rlplan.simulate.run import simulate
from rlplan.simulate.setting import Asynchrony, RolloutWork, SimulationSetting
from rlplan.simulate.speed import LinearSpeed
from rlplan.spec.lengths import Lengths, LogNormalLengths
from rlplan.timing.cost import Cost, Resource
from rlplan.vocabulary import ActionKind, Phase, Placement

PUBLISHED_S = {0.0: 4 * 3600 + 25 * 60, 0.1: 3 * 3600 + 53 * 60, 0.3: 3 * 3600 + 18 * 60, 0.5: 3 * 3600 + 13 * 60}
"""staleness_threshold -> seconds of 100 steps. Source: verl, docs/advance/fully_async.md (read 2026-08)."""

NUM_STEPS = 100

# ------------------------------------------------------------------------------------------------- who does what
# Source: verl (2026-02), verl/experimental/fully_async_policy/shell/dapo_7b_math_fsdp2_64_64.sh, which belongs to the
# experiment: 8 + 8 nodes of 8 GPUs, gen_tp=4, n_resp_per_prompt=16, train_prompt_mini_bsz=32, require_batches=4,
# trigger_parameter_sync_step=4, partial_rollout=True, max_response_length=28672, use_rollout_log_probs=True (so there
# is no pass for old log-probs), no reference model, rewards by rule.
NUM_ENGINES = 16
NUM_SAMPLES = 16
MINI_BATCH = 32
REQUIRE_BATCHES = 4
TRIGGER = 4
NUM_PROMPTS = MINI_BATCH * REQUIRE_BATCHES * TRIGGER
MAX_RESPONSE = 28672

# Source: the same version's fully_async_rollouter.py: at most 16 prompts an engine at once; a hand-over counts what is
# queued and unfinished and lets (1 + staleness_threshold) x 512 be begun before the next (`staleness.num_allowed`).
GROUPS_AT_ONCE = 16 * NUM_ENGINES

# Source: verl's rollout.yaml, max_num_seqs; 0.8 x 97285 MiB x 4 GPUs less 15.2 GB of weights, 57344 bytes a token.
LIMITS = EngineLimits(max_num_seqs=1024, num_blocks=300_000)

# ------------------------------------------------------------------------------------------- the colocated runs
# Source: shared/data/measured_points.json, verl-dapo-7b-h20-128 and -32: 512 prompts x 16, means over 400 steps.
COLOCATED_GENERATION_S = {128: 177.85, 32: 357.41}
COLOCATED_UPDATE_S = {128: 113.81, 32: 269.80}

# Update seconds are fixed + per GPU: two equations, two unknowns. 6656 GPU seconds of work, 61.8 s that more GPUs do
# not shorten (16 optimizer steps, the longest sequence of each mini-batch, states to the host and back).
WORK_GPU_S = (COLOCATED_UPDATE_S[32] - COLOCATED_UPDATE_S[128]) / (1 / 32 - 1 / 128)
FIXED_S = COLOCATED_UPDATE_S[128] - WORK_GPU_S / 128

# The colocated script has offload=True and fsdp_size=2, the asynchronous one actor_offload=False. What falls away:
# fp32 weights and Adam's moments, 12 bytes x 7.62e9 / 2 a GPU, in and out, pageable. 10 GB/s: assumed (a core copies
# into the driver's pinned buffer).
OFFLOAD_S = 2 * 12 * 7.62e9 / 2 / 10e9

# Mean tokens of a rollout in the colocated runs, out of the work: 4 passes with recomputation over 7.07e9 parameters in
# products, 2 FLOP each, and attention at 4000 tokens (4 passes x 2 x 28 layers x 3584 x 4000), at 0.6 of 148 TFLOP/s.
FLOPS_PER_TOKEN = 8 * 7.07e9 + 4 * 2 * 28 * 3584 * 4000
MEAN_TOKENS = WORK_GPU_S * 148e12 * 0.6 / (NUM_PROMPTS * NUM_SAMPLES * FLOPS_PER_TOKEN)
PROMPT_LEN = 150
"""Assumed: problems of DAPO-Math-17k in their template."""

# ------------------------------------------------------------------------------------------------ response lengths


def sigma_of(mean: float) -> float:
    """Of a log-normal with this mean whose longest of 8192 is 28672 at the median.

    That such long ones occur says the colocated generation: a + b / GPUs gives a = 118 s, which is 28672 steps of
    4.1 ms, and a step of one sequence takes 3.2 ms by the roofline (weights 1.2 ms, 28 layers of 30 us and two
    all-reduces of 20 us). ln(28672 / mean) = z sigma - sigma^2 / 2.
    """
    z = NormalDist().inv_cdf(0.5 ** (1 / (NUM_PROMPTS * NUM_SAMPLES)))
    return z - math.sqrt(z * z - 2 * math.log(MAX_RESPONSE / mean))


MEAN_RESPONSE = MEAN_TOKENS - PROMPT_LEN
SIGMA = sigma_of(MEAN_RESPONSE)


def lengths(scale: float) -> Lengths:
    """Of the responses. scale: of the mean, against the 400 steps of the colocated runs."""
    median = scale * MEAN_RESPONSE / math.exp(SIGMA * SIGMA / 2)
    return Lengths(LogNormalLengths(kind="lognormal", median=median, sigma=SIGMA), MAX_RESPONSE)


# ---------------------------------------------------------------------------------------------------- engine speed
# A step of n sequences: base + n x per_seq + tokens held x per_token. The last by the roofline: 57344 / 4 bytes at
# 0.8 x 4 TB/s. A prefill at 0.6 x 4 x 148 TFLOP/s. base and per_seq: from the two colocated generations, 32 and 8
# engines, played by the simulator (`inputs` prints them). per_seq is about five times what products alone would take
# (43 us): sampling, log-probs and the server's own work for each token.
PER_TOKEN_S = 57344 / 4 / (0.8 * 4e12)
PREFILL_TOKEN_S = 2 * 7.07e9 / (0.6 * 4 * 148e12)
BASE_S = 0.004453
PER_SEQ_S = 0.0002120

SYNC_S = 2.0
"""Source: 15.2 GB at the 8.25 GB/s that verl's NCCL checkpoint engine reaches (measured_points.json)."""

LENGTH_SCALE = 0.476
"""Calibrated on staleness_threshold = 0 alone: responses of the first 100 steps against those of 400."""


def speed(base_s: float = BASE_S, per_seq_s: float = PER_SEQ_S) -> LinearSpeed:
    """Of one engine of four H20."""
    return LinearSpeed(base_s, per_seq_s, PER_TOKEN_S, PREFILL_TOKEN_S)


def generation_s(num_gpus: int, engine: LinearSpeed, num_steps: int = 20) -> float:
    """Seconds of generation in a colocated step."""
    schedule = build_gpu_schedule(GpuStep(Placement.HYBRID, num_gpus, num_gpus, tp=4))
    work = RolloutWork(NUM_PROMPTS, NUM_SAMPLES, PROMPT_LEN, lengths(1.0), num_gpus // 4, LIMITS)
    setting = SimulationSetting(schedule, rollouts=work, speed=engine, num_steps=num_steps)
    return simulate(setting).phase_s[Phase.ROLLOUT] / num_steps


def fit_engine() -> LinearSpeed:
    """base_s and per_seq_s that give both colocated generations: seconds are linear in both."""
    (few, many), (base, per_seq) = (32, 128), (0.003, 0.0001)
    for _ in range(6):
        now = [generation_s(n, speed(base, per_seq)) for n in (few, many)]
        by_base = [generation_s(n, speed(base * 1.01, per_seq)) for n in (few, many)]
        by_seq = [generation_s(n, speed(base, per_seq * 1.01)) for n in (few, many)]
        a, b = ((after - before) / (0.01 * base) for before, after in zip(now, by_base, strict=True))
        c, d = ((after - before) / (0.01 * per_seq) for before, after in zip(now, by_seq, strict=True))
        left = [COLOCATED_GENERATION_S[n] - seconds for n, seconds in zip((few, many), now, strict=True)]
        base += (left[0] * d - left[1] * c) / (a * d - b * c)
        per_seq += (a * left[1] - b * left[0]) / (a * d - b * c)
    return speed(base, per_seq)


# -------------------------------------------------------------------------------------------------------- the sweep


def update_s(scale: float) -> float:
    """Seconds of all mini-batches of a step on 64 GPUs."""
    tokens = (lengths(scale).mean + PROMPT_LEN) / (lengths(1.0).mean + PROMPT_LEN)
    return FIXED_S - OFFLOAD_S + tokens * WORK_GPU_S / 64


def run(threshold: float, scale: float, num_steps: int = NUM_STEPS, seed: int = 0) -> SimulationResult:
    """The first `num_steps` hand-overs of one run."""
    num_mini = REQUIRE_BATCHES * TRIGGER
    step = GpuStep(Placement.DISAGGREGATED, 64, 64, num_mini_batches=num_mini, tp=4)
    schedule = build_gpu_schedule(step)
    each = Cost({Resource.COMPUTE: update_s(scale) / num_mini})
    costs = {action.id: each for action in schedule.step if action.kind is ActionKind.TRAIN_FORWARD_BACKWARD}
    costs["sync_weights"] = Cost({Resource.NETWORK: SYNC_S})
    asynchrony = Asynchrony(threshold, True, True, num_takes=TRIGGER, max_groups_at_once=GROUPS_AT_ONCE)
    work = RolloutWork(NUM_PROMPTS, NUM_SAMPLES, PROMPT_LEN, lengths(scale), NUM_ENGINES, LIMITS)
    return simulate(SimulationSetting(schedule, costs, work, speed(), num_steps, asynchrony), seed)


def calibrate(seconds: Callable[[float], float], target: float) -> float:
    """The length scale that gives the target, by bisection: longer responses take longer."""
    low, high = 0.02, 2.0
    for _ in range(9):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) < target else (low, middle)
    return math.sqrt(low * high)


def main() -> None:
    """What the module docstring says."""
    command = sys.argv[1] if len(sys.argv) > 1 else "all"
    if command == "inputs":
        engine = fit_engine()
        print(f"mean response {MEAN_RESPONSE:.0f}, sigma {SIGMA:.3f}; update: {FIXED_S:.1f} s, {WORK_GPU_S:.0f} GPU s")
        print(f"base {engine.base_s:.6f} s, per sequence {engine.per_seq_s:.7f} s")
        print({n: round(generation_s(n, engine), 1) for n in COLOCATED_GENERATION_S})
    elif command == "calibrate":
        scale = calibrate(lambda scale: run(0.0, scale, 25).seconds * NUM_STEPS / 25, PUBLISHED_S[0.0])
        print(f"length scale {scale:.3f}, update {update_s(scale):.1f} s")
    else:
        first = None
        for threshold, published in PUBLISHED_S.items():
            result = run(threshold, LENGTH_SCALE)
            first = first or result.seconds
            ratio, measured = result.seconds / first, published / PUBLISHED_S[0.0]
            use = ", ".join(f"{group.name} {group.utilisation:.0%}" for group in result.groups)
            print(
                f"{threshold}: {result.seconds / 3600:.2f} h, published {published / 3600:.2f} h; ratio {ratio:.3f}, "
                f"published {measured:.3f} ({ratio / measured - 1:+.1%}); {use}; staleness {result.mean_staleness:.2f}"
            )


if __name__ == "__main__":
    main()
