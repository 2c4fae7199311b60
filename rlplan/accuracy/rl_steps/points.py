"""Published RL step times: `rl_step_time`, with phases where a source gives them.

In: a point. Out: seconds (or hours) of a step or a stage, and its phases. Left out: switches of shared devices,
checkpoints, evaluation, rewards, what a driver does between phases.
"""

import re
from dataclasses import replace

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict, Prediction, predicts
from rlplan.accuracy.rl_steps.nemo_rl import reference_swap, shared_device_moves
from rlplan.accuracy.rl_steps.settings import RlRun, read_rl_run
from rlplan.dataflow.choice import EngineChoice
from rlplan.memory.roles.gpu.engine import EngineOnGpu, Incoming
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import SettledRollout
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.network.collectives import all_gather_cost
from rlplan.timing.serving.ahead import RolloutsAhead
from rlplan.timing.serving.generation import EngineRollouts, EngineSpeed, generate_cost, slowest_engine_cost
from rlplan.timing.training.mini_batch import MiniBatchShape, train_cost
from rlplan.timing.training.optimizer import optimizer_cost
from rlplan.timing.training.passes import LAUNCH, NUM_FUSED_KERNELS
from rlplan.timing.training.scoring import score_cost
from rlplan.timing.training.settings import TrainSetting
from rlplan.timing.transfer.weight_sync import SyncSetup, sync_cost
from rlplan.units import ceil_div
from rlplan.vocabulary import Placement, Role

MEMORY_OF_ENGINE = 0.8
"""Share of a GPU that the engine has in verl's recipes."""
MAX_NUM_SEQS = 1024
"""Sequences of an engine at once. Source: vLLM's default on GPUs of 70 GiB and more but the A100 (arg_utils.py), which
NeMo-RL leaves; verl sets the same."""
CHAT_BATCH = 16
"""Sequences of a GPU at once in DeepSpeed-Chat. Source: its step 3 scripts, `per_device_generation_batch_size` 16."""

SCORED_TENSORS, TRAINED_TENSORS = 5, 8
"""Tensors of 8 bytes a token. Source: verl's DataProto: ids, mask, positions, responses, and log-probs with entropies
back; for the update also masks, old log-probs, advantages and returns."""
DRIVER_BYTES_PER_S = 0.25e9
"""Of tensors through verl's one controller. Fitted: the parts of verl's two rows that do not fall from 32 to 128 GPUs,
36 s of old log-probs and 62 s of the update. One source, so that nothing is left out to test it on."""


@predicts("rl_step_time")
def predict_rl_step(point: MeasuredPoint) -> Prediction:
    """A step's (or a stage's) time."""
    run = read_rl_run(point)
    phases = {phase: cost.seconds for phase, cost in step_phases(run).items()}
    seconds = sum(phases.values())
    if run.staleness:
        sides = phases["generate"], phases["score"] + phases["train"]
        seconds = max(sides) + phases["sync"]
    scale = run.num_steps / seconds_in(point.measured.unit)
    return Prediction(seconds * scale, parts={phase: value * scale for phase, value in phases.items()})


def seconds_in(unit: str) -> float:
    """Seconds of one unit. Raises: CannotPredict.

    >>> seconds_in("hours for full stage"), seconds_in("s/step"), seconds_in("min")
    (3600.0, 1.0, 60.0)
    """
    word = unit.strip().lower()
    for pattern, seconds in ((r"h(ours?|r)?\b", 3600.0), (r"min", 60.0), (r"ms\b", 1e-3), (r"days?\b", 86400.0)):
        if re.match(pattern, word):
            return seconds
    if re.match(r"s(ec(onds?)?)?\b", word):
        return 1.0
    raise CannotPredict(f"unit {unit!r} is no time")


def step_phases(run: RlRun) -> dict[str, Cost]:
    """What a step consists of: `generate`, `score`, `train`, `sync`."""
    work = mini_batch_shape(run, run.num_rollouts)
    policy = policy_setting(run)
    scored = replace(work, tokens_per_pass=run.recipe.scored_tokens_per_pass) if run.recipe else work
    score = score_cost(policy, scored, run.training).times(run.num_scored)
    num_mini = ceil_div(run.num_rollouts, run.mini_batch)
    mini = mini_batch_shape(run, run.mini_batch)
    train = train_cost(policy, mini, run.training) + optimizer_cost(policy, run.training)
    if run.value is not None:
        value = _setting(run, run.value, Role.VALUE)
        score += score_cost(value, work, run.training).times(2)  # values, and a reward of the same size
        train += train_cost(value, mini, run.training) + optimizer_cost(value, run.training)
    score += driver(run, SCORED_TENSORS).times(run.num_scored)
    sync = hand_over(run)
    if run.recipe is not None:
        score += reference_swap(policy).times(run.num_scored - 1)
        sync += NOTHING if run.staleness else shared_device_moves(policy, run.training)
    train = train.times(num_mini) + driver(run, TRAINED_TENSORS)
    generate = generation(run, others_s=score.seconds + train.seconds, sync_s=sync.seconds)
    return {"generate": generate, "score": score, "train": train, "sync": sync}


def hand_over(run: RlRun) -> Cost:
    """Seconds of new weights on their way to the engines; DeepSpeed-Chat generates with the trainer's own."""
    if run.gathers_tokens:
        return NOTHING
    work = SyncSetup(
        transport="nccl" if run.staleness else "cuda_ipc",
        element_bytes=2,
        num_training=run.training.num_gpus,
        num_generation=run.generation.num_gpus,
        tp=run.engine_tp,
        zero_stage=run.choice.zero_stage,
        same_devices=not run.staleness,
        trainer=run.backend,
    )
    return sync_cost(run.model, work, run.training, run.generation)


def mini_batch_shape(run: RlRun, num_rollouts: int) -> MiniBatchShape:
    """Rollouts as the trainer sees them. A mini-batch is as the prompts come; a step's are balanced by length."""
    mean = run.prompt_len + run.lengths.mean
    return MiniBatchShape(
        num_rollouts=num_rollouts,
        mean_len=mean,
        mean_square_len=mean**2 + run.lengths.variance,
        max_len=run.prompt_len + run.lengths.longest,
        num_head_tokens_per_rollout=mean,
        tokens_per_pass=run.tokens_per_pass,
        is_balanced=num_rollouts == run.num_rollouts,
    )


def policy_setting(run: RlRun) -> TrainSetting:
    """The policy as it is trained."""
    return _setting(run, run.model, Role.POLICY)


def _setting(run: RlRun, model: ModelSpec, role: Role) -> TrainSetting:
    kernels = run.recipe.kernels if run.recipe else None
    return TrainSetting(model, role, run.trained, run.choice, run.training.num_gpus, run.backend, kernels)


def generation(run: RlRun, *, others_s: float, sync_s: float) -> Cost:
    """Seconds of a step's rollouts: the share of one engine, or DeepSpeed-Chat's trainer.

    others_s, sync_s: what goes on beside them where they run ahead.
    """
    if run.gathers_tokens:
        return chat_generation(run)
    num_engines = max(1, run.generation.num_gpus // run.engine_tp)
    rollout, choice = SettledRollout(), EngineChoice(tp=run.engine_tp, sleep_level=1, max_num_seqs=MAX_NUM_SEQS)
    speed = EngineSpeed(run.model, rollout, choice, run.generation)
    work = EngineRollouts(
        num_rollouts=ceil_div(run.num_rollouts, num_engines),
        prompt_len=run.prompt_len,
        num_samples=run.num_samples,
        lengths=run.lengths,
        max_num_seqs=MAX_NUM_SEQS,
        kv_tokens=kv_tokens(run, rollout, choice),
    )
    if run.staleness > 1:
        # NeMo-RL: without `in_flight_weight_updates`, off by default, more than one version brings nothing; with it
        # rollouts keep their KV cache (`recompute_kv_cache_after_weight_updates`, off by default)
        return RolloutsAhead(speed, work, num_engines, run.staleness, keeps_cache=True).cost(others_s, sync_s)
    return generate_cost(speed, work) + slowest_engine_cost(speed, work, num_engines)


def driver(run: RlRun, num_tensors: int) -> Cost:
    """Seconds in which a driver sends a step's rollouts to all workers and takes results back.

    Counts: 8 bytes a token of `num_tensors` tensors, each padded to the longest prompt and response that are allowed.
    Source: verl's DataProto, which one controller cuts, pickles and concatenates. Assumes: verl (FSDP) alone pads.
    """
    if run.backend != "fsdp2":
        return NOTHING
    size = 8.0 * num_tensors * run.num_rollouts * (run.max_prompt + run.lengths.longest)
    return Cost({Resource.HOST: size / DRIVER_BYTES_PER_S})


def kv_tokens(run: RlRun, rollout: SettledRollout, choice: EngineChoice) -> int:
    """Tokens that an engine's cache holds. Raises: CannotPredict where its weights do not fit."""
    gpu = run.generation.gpu
    engine = EngineOnGpu(run.model, rollout, choice, Placement.COLOCATED, gpu.overheads, Incoming(1 << 29))
    share = run.recipe.memory_share if run.recipe else MEMORY_OF_ENGINE
    left = int(share * gpu.memory.value) - engine.weight_bytes
    max_len = int(run.prompt_len + run.lengths.longest)
    tokens = engine.pool.num_tokens(engine.pool.num_blocks(max(0, left)), max_len)
    if tokens < max_len:
        raise CannotPredict(f"an engine of {choice.tp} GPUs does not hold one sequence of {max_len} tokens")
    return tokens


def chat_generation(run: RlRun) -> Cost:
    """Seconds of generation by a ZeRO-3 trainer.

    Counts: every token gathers all weights, for `CHAT_BATCH` sequences of a GPU at a time; or, where that is slower,
    reads them and launches every layer's kernels. Source: DeepSpeed 0.9 hybrid_engine.py (layers are gathered one by
    one where the model does not fit whole).
    """
    model, cluster = run.model, run.training
    gathered = all_gather_cost(2.0 * model.num_parameters, cluster.num_gpus, cluster)
    read = 2.0 * model.num_parameters / (cluster.memory_bytes_per_s * cluster.efficiencies.memory.value)
    launched = LAUNCH * NUM_FUSED_KERNELS * model.num_layers
    local = Cost({Resource.MEMORY: read, Resource.LATENCY: max(0.0, launched - read)})
    rounds = ceil_div(ceil_div(run.num_rollouts, cluster.num_gpus), CHAT_BATCH)
    return max(gathered, local, key=lambda cost: cost.seconds).times(rounds * run.lengths.mean)
