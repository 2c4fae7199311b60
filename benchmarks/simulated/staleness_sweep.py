"""verl's staleness sweep, simulated: inputs, the one number that is calibrated, and what comes out.

    published   Qwen2.5-Math-7B, DAPO, 128 H20 as 64 for rollouts and 64 for training, 100 weight syncs:
                staleness_threshold 0 / 0.1 / 0.3 / 0.5 took 4 h 25, 3 h 53, 3 h 18, 3 h 13
    calibrated  on the first of them alone: `length_scale`
    predicted   the other three, as ratios to the first

Every input below was written down, with its source, before the other three were simulated; the commits show it. (The
published hours themselves were known all along: they stand in the task.)

    python -m benchmarks.simulated.staleness_sweep inputs       the engine's speed, from two colocated runs
    python -m benchmarks.simulated.staleness_sweep calibrate    length_scale, from the first of the four
    python -m benchmarks.simulated.staleness_sweep              all four
    python -m benchmarks.simulated.staleness_sweep sensitivity  all four where an assumed input is another, recalibrated
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

from benchmarks.simulated.linear_speed import LinearSpeed
from benchmarks.simulated.plain_schedule import plain_schedule
from rlplan.simulate.engine import EngineLimits
from rlplan.simulate.result import SimulationResult
from rlplan.simulate.run import simulate
from rlplan.simulate.setting import Asynchrony, SimulationSetting, StepRollouts
from rlplan.spec.parts.lengths import Lengths, LogNormalLengths
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

# Source: the same version's fully_async_rollouter.py: at most 16 prompts an engine at once; a weight sync counts what
# is queued and unfinished and lets (1 + staleness_threshold) x 512 be begun before the next (`staleness.num_allowed`).
GROUPS_AT_ONCE = 16 * NUM_ENGINES

# Source: verl's rollout.yaml, max_num_seqs; 0.8 x 97285 MiB x 4 GPUs less 15.2 GB of weights, 57344 bytes a token.
LIMITS = EngineLimits(max_num_seqs=1024, num_blocks=300_000)

# ------------------------------------------------------------------------------------------- the colocated runs
# Source: rlplan/accuracy/data/measured_points.json,
# verl-dapo-7b-h20-128 and -32: 512 prompts x 16. Taken as means over the whole run of 400 steps (assumed).
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


def solve_sigma(mean: float) -> float:
    """Sigma of a log-normal with this mean whose longest of 8192 is 28672 at the median.

    That such long ones occur says the colocated generation: a + b / GPUs gives a = 118 s, which is 28672 steps of
    4.1 ms, and a step of one sequence takes 3.2 ms by the roofline (weights 1.2 ms, 28 layers of 30 us and two
    all-reduces of 20 us). ln(28672 / mean) = z sigma - sigma^2 / 2.
    """
    z = NormalDist().inv_cdf(0.5 ** (1 / (NUM_PROMPTS * NUM_SAMPLES)))
    return z - math.sqrt(z * z - 2 * math.log(MAX_RESPONSE / mean))


# ---------------------------------------------------------------------------------------------------- engine speed
# A step of n sequences: base + n x per_seq + tokens held x per_token. The last by the roofline: 57344 / 4 bytes at
# 0.8 x 4 TB/s. A prefill at 0.6 x 4 x 148 TFLOP/s. base and per_seq: from the two colocated generations, 32 and 8
# engines, played by the simulator (`inputs` prints them). per_seq is about five times what products alone would take
# (43 us): sampling, log-probs and the server's own work for each token.
PER_TOKEN_S = 57344 / 4 / (0.8 * 4e12)
PREFILL_TOKEN_S = 2 * 7.07e9 / (0.6 * 4 * 148e12)

SYNC_S = 2.0
"""Source: 15.2 GB at the 8.25 GB/s that verl's NCCL checkpoint engine reaches (measured_points.json)."""


@dataclass(frozen=True)
class Inputs:
    """Assumed and fitted inputs of the simulation.

    mean_response: of the 400 colocated steps. length_scale: of the first 100 steps against them.
    base_s, per_seq_s: of the engine. offload_s: seconds of an update that the asynchronous run does not have.
    """

    mean_response: float = MEAN_TOKENS - PROMPT_LEN
    sigma: float = solve_sigma(MEAN_TOKENS - PROMPT_LEN)
    offload_s: float = OFFLOAD_S
    base_s: float = 0.004453
    per_seq_s: float = 0.0002120
    length_scale: float = 0.476

    def lengths(self, scale: float) -> Lengths:
        """Lengths of the responses, `scale` times as long as in the colocated runs."""
        median = scale * self.mean_response / math.exp(self.sigma * self.sigma / 2)
        return Lengths(LogNormalLengths(kind="lognormal", median=median, sigma=self.sigma), MAX_RESPONSE)

    @property
    def speed(self) -> LinearSpeed:
        """Speed of one engine of four H20."""
        return LinearSpeed(self.base_s, self.per_seq_s, PER_TOKEN_S, PREFILL_TOKEN_S)

    @property
    def update_s(self) -> float:
        """Seconds of all mini-batches of a step on 64 GPUs."""
        tokens = [self.lengths(scale).mean + PROMPT_LEN for scale in (self.length_scale, 1.0)]
        return FIXED_S - self.offload_s + tokens[0] / tokens[1] * WORK_GPU_S / 64


INPUTS = Inputs()
"""The inputs, fixed beforehand; length_scale is calibrated on staleness_threshold = 0 alone."""


def generation_s(num_gpus: int, inputs: Inputs = INPUTS, num_steps: int = 20) -> float:
    """Seconds of generation in a colocated step."""
    schedule = plain_schedule(Placement.HYBRID, num_gpus, num_gpus, tp=4)
    work = StepRollouts(NUM_PROMPTS, NUM_SAMPLES, PROMPT_LEN, inputs.lengths(1.0), num_gpus // 4, LIMITS)
    setting = SimulationSetting(schedule, rollouts=work, speed=inputs.speed, num_steps=num_steps)
    return simulate(setting).phase_s[Phase.ROLLOUT] / num_steps


def fit_engine(inputs: Inputs, num_steps: int = 20) -> Inputs:
    """base_s and per_seq_s that give both colocated generations: seconds are nearly linear in both."""
    runs = (32, 128)
    for _ in range(6):

        def seconds(tried: Inputs) -> list[float]:
            return [generation_s(num_gpus, tried, num_steps) for num_gpus in runs]

        now = seconds(inputs)
        by_base = seconds(replace(inputs, base_s=inputs.base_s * 1.01))
        by_seq = seconds(replace(inputs, per_seq_s=inputs.per_seq_s * 1.01))
        a, b = ((after - before) / (0.01 * inputs.base_s) for before, after in zip(now, by_base, strict=True))
        c, d = ((after - before) / (0.01 * inputs.per_seq_s) for before, after in zip(now, by_seq, strict=True))
        left = [COLOCATED_GENERATION_S[num_gpus] - got for num_gpus, got in zip(runs, now, strict=True)]
        if max(map(abs, left)) < 0.2:
            break
        inputs = replace(
            inputs,
            base_s=inputs.base_s + (left[0] * d - left[1] * c) / (a * d - b * c),
            per_seq_s=inputs.per_seq_s + (a * left[1] - b * left[0]) / (a * d - b * c),
        )
    return inputs


# -------------------------------------------------------------------------------------------------------- the sweep


def run(threshold: float, inputs: Inputs = INPUTS, num_steps: int = NUM_STEPS, seed: int = 0) -> SimulationResult:
    """The first `num_steps` weight syncs of one run."""
    num_mini = REQUIRE_BATCHES * TRIGGER
    schedule = plain_schedule(Placement.DISAGGREGATED, 64, 64, num_mini_batches=num_mini, tp=4)
    each = Cost({Resource.COMPUTE: inputs.update_s / num_mini})
    costs = {action.id: each for action in schedule.step if action.kind is ActionKind.TRAIN_FORWARD_BACKWARD}
    costs["sync_weights"] = Cost({Resource.NETWORK: SYNC_S})
    asynchrony = Asynchrony(threshold, interrupts=True, num_takes=TRIGGER, max_groups_at_once=GROUPS_AT_ONCE)
    lengths = inputs.lengths(inputs.length_scale)
    work = StepRollouts(NUM_PROMPTS, NUM_SAMPLES, PROMPT_LEN, lengths, NUM_ENGINES, LIMITS)
    return simulate(SimulationSetting(schedule, costs, work, inputs.speed, num_steps, asynchrony), seed)


def calibrate(inputs: Inputs, num_steps: int = 25) -> Inputs:
    """The inputs with the length scale that gives the first point, by bisection: longer responses take longer."""
    low, high = 0.02, 2.0
    for _ in range(9):
        middle = math.sqrt(low * high)
        seconds = run(0.0, replace(inputs, length_scale=middle), num_steps).seconds * NUM_STEPS / num_steps
        low, high = (middle, high) if seconds < PUBLISHED_S[0.0] else (low, middle)
    return replace(inputs, length_scale=math.sqrt(low * high))


def ratios(inputs: Inputs, num_steps: int) -> list[float]:
    """Ratios of the seconds of all four to those of the first."""
    seconds = [run(threshold, inputs, num_steps).seconds for threshold in PUBLISHED_S]
    return [each / seconds[0] for each in seconds]


def variants() -> Iterator[tuple[str, Inputs]]:
    """Other values of what was assumed."""
    yield "as fixed", INPUTS
    yield "offload 0 s (nothing falls away)", replace(INPUTS, offload_s=0.0)
    yield "offload 1.9 s (pinned, 49 GB/s)", replace(INPUTS, offload_s=OFFLOAD_S * 10 / 49)
    yield "offload 15 s (6 GB/s)", replace(INPUTS, offload_s=OFFLOAD_S * 10 / 6)
    yield "sigma 0.85", fit_engine(replace(INPUTS, sigma=0.85), 5)
    yield "sigma 1.2", fit_engine(replace(INPUTS, sigma=1.2), 5)
    longer = (MEAN_TOKENS * 0.75) - PROMPT_LEN
    yield "MFU 0.45", fit_engine(replace(INPUTS, mean_response=longer, sigma=solve_sigma(longer)), 5)


def main() -> None:
    """Print the ratios that the module docstring describes."""
    command = sys.argv[1] if len(sys.argv) > 1 else "all"
    if command == "inputs":
        fitted = fit_engine(INPUTS)
        print(f"mean response {INPUTS.mean_response:.0f}, sigma {INPUTS.sigma:.3f}; {fitted}")
        print({num_gpus: round(generation_s(num_gpus, fitted), 1) for num_gpus in COLOCATED_GENERATION_S})
    elif command == "calibrate":
        print(calibrate(INPUTS))
    elif command == "sensitivity":
        for name, inputs in variants():
            again = calibrate(inputs)
            shown_ratios = ", ".join(f"{ratio:.3f}" for ratio in ratios(again, 25)[1:])
            print(
                f"{name}: {shown_ratios} (length scale {again.length_scale:.3f}, update {again.update_s:.0f} s)",
                flush=True,
            )
    else:
        results = {threshold: run(threshold) for threshold in PUBLISHED_S}
        for threshold, published in PUBLISHED_S.items():
            result = results[threshold]
            ratio, measured = result.seconds / results[0.0].seconds, published / PUBLISHED_S[0.0]
            use = ", ".join(f"{group.name} {group.utilisation:.0%}" for group in result.groups)
            print(
                f"{threshold}: {result.seconds / 3600:.2f} h, published {published / 3600:.2f} h; ratio {ratio:.3f}, "
                f"published {measured:.3f} ({ratio / measured - 1:+.1%}); {use}; staleness {result.mean_staleness:.2f}"
            )


if __name__ == "__main__":
    main()
