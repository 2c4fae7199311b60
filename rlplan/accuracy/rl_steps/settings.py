"""The settings of a published RL step, in the words of verl, NeMo-RL, OpenRLHF and DeepSpeed-Chat.

In: a point. Out: RlRun: rollouts, lengths, who generates and trains on how many GPUs. Raises CannotPredict where what
decides the time is missing. Left out: seconds (points.py), a learned reward's own settings.

What sources do not state is assumed, the same for every point, and listed at each constant below.
"""

import re
from dataclasses import replace
from functools import lru_cache

from rlplan.accuracy.named_models import model_by_name, model_of
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict
from rlplan.accuracy.rl_steps.nemo_rl import Recipe, read_recipe
from rlplan.accuracy.timed_hardware import cluster_of, with_ranks
from rlplan.accuracy.training.settings import RunSettings
from rlplan.dataflow.choice import TrainerChoice
from rlplan.records import dataclass
from rlplan.spec.model import ModelSpec
from rlplan.spec.parts.lengths import ConstantLengths, Lengths, LogNormalLengths
from rlplan.spec.resolved import SettledTraining
from rlplan.timing.network.cluster import Cluster
from rlplan.vocabulary import Backend

USUAL_PROMPT = 200
"""Tokens of a prompt where none is stated. Assumed: mathematics with a template (DAPO-17k: 100 to 250)."""
USUAL_MAX_PROMPT = 2048
"""Tokens of the longest prompt that is allowed, to which verl pads (its recipes for mathematics: 1,024 to 2,048)."""
MEAN_OF_LIMIT = 0.06
"""Mean response over the limit, where the limit is far above what a model says and no mean is stated. Assumed: a 7B
model on competition mathematics says 1,500 to 4,000 tokens under limits of 20 to 32 thousand. Of the two rows that it
decides (verl, 32 and 128 GPUs), 0.05 gives -22 and +6 %, 0.06 -14 and +12 %, 0.08 +5 and +25 %."""
SIGMA = 1.0
"""Of the logarithm of response lengths. Assumed: a few of a thousand then reach ten times the mean, as DAPO clips."""
SHORT_LIMIT = 2048
"""Limits up to which responses are taken to be half of the limit."""
NUM_SAMPLES = 16
"""Responses of a prompt where they are not stated (GRPO in NeMo-RL's recipes and verl's)."""
WORDS = (
    *("algo", "algorithm", "policy", "train", "trainer", "rollout", "mode", "engine", "framework", "backend"),
    *("kl", "kl_coef", "reference", "ref", "async", "schedule"),
)
"""Settings in whose words the software, the algorithm and the schedule are looked for."""
CRITIC = re.compile(r"ppo", re.IGNORECASE)


@dataclass(frozen=True)
class RlRun:
    """A published step."""

    settings: RunSettings
    model: ModelSpec
    value: ModelSpec | None
    """The value model, None without."""
    training: Cluster
    """The same GPUs as `generation` where they are shared."""
    generation: Cluster
    num_rollouts: int
    num_samples: int
    mini_batch: int
    prompt_len: float
    max_prompt: int
    lengths: Lengths
    engine_tp: int
    trained: SettledTraining
    choice: TrainerChoice
    backend: Backend
    tokens_per_pass: int
    num_scored: int
    """Forward passes of the policy's size over all rollouts (old log-probs, a reference)."""
    gathers_tokens: bool
    """A ZeRO-3 trainer generates itself and gathers every layer for every token (DeepSpeed-Chat)."""
    num_steps: float
    """Steps of a stage that was timed whole."""
    staleness: int
    """Versions that rollouts may be behind, where generation runs beside training; else 0."""
    recipe: Recipe | None = None
    """Of NeMo-RL."""


def read_rl_run(point: MeasuredPoint) -> RlRun:
    """The step of a point. Raises: CannotPredict."""
    settings, model, cluster = RunSettings(point), model_of(point), cluster_of(point)
    text = f"{settings.words_of(WORDS)} {point.source.lower()}"
    is_chat = "deepspeed-chat" in text or "dschat" in point.id
    is_async = bool(re.search(r"\b[1-9]\d*-off|one.step.off|fully.async|\basync\b", text.replace("async_tp", "")))
    is_async = is_async and "sync mode" not in text and "colocate sync" not in text
    training, generation = _devices(settings, cluster, is_async=is_async)
    num_samples = _first(settings, ("rollout_n", "n", "num_samples", "group_size", "generations_per_prompt"), 0)
    num_rollouts = _rollouts(settings, num_samples)
    prompt, lengths = _lengths(settings)
    backend: Backend = "megatron" if re.search(r"megatron|mcore", text) else "deepspeed" if is_chat else "fsdp2"
    max_len = prompt + lengths.longest
    recipe = read_recipe(text, point.model or "", int(max_len), is_async=is_async)
    choice = _choice(settings, backend, training.num_gpus)
    choice = replace(choice, gradient_checkpointing=recipe.recomputes) if recipe else choice
    usual_pass = int(2 * max_len) * choice.ulysses * choice.cp
    mini = _first(settings, ("train_gbs", "mini_batch", "ppo_mini_batch_size"), 0)
    mini = mini * (num_samples or 1) if "mini_batch" in settings and "train_gbs" not in settings else mini
    return RlRun(
        settings=settings,
        model=model,
        value=_value_model(settings, model),
        training=training,
        generation=generation,
        num_rollouts=num_rollouts,
        num_samples=num_samples or (1 if is_chat else NUM_SAMPLES),
        mini_batch=min(mini or num_rollouts, num_rollouts),
        prompt_len=prompt,
        max_prompt=_first(settings, ("max_prompt", "max_prompt_len", "max_prompt_length"), USUAL_MAX_PROMPT),
        lengths=lengths,
        engine_tp=_engine_tp(settings, model, generation),
        trained=SettledTraining.model_validate({"logits": "plain"}),
        choice=choice,
        backend=backend,
        tokens_per_pass=0 if is_chat else recipe.tokens_per_pass if recipe else usual_pass,
        num_scored=_num_scored(text, is_chat=is_chat),
        gathers_tokens=is_chat,
        num_steps=_num_steps(point, settings, num_rollouts),
        staleness=_staleness(text) if is_async else 0,
        recipe=recipe,
    )


def _staleness(text: str) -> int:
    """`8-off` of NeMo-RL; one step off where an asynchronous run does not say."""
    stated = re.search(r"\b([1-9]\d*)-off", text)
    return int(stated.group(1)) if stated else 1


def _first(settings: RunSettings, keys: tuple[str, ...], default: int) -> int:
    key = settings.first(keys)
    if key is None and default:
        settings.assume(keys[0], default)
    return settings.count(key) if key else default


def _devices(settings: RunSettings, cluster: Cluster, *, is_async: bool) -> tuple[Cluster, Cluster]:
    """GPUs that train and that generate. An asynchronous run that does not say has as many of each."""
    key = settings.first(("split", "train_rollout_gpus", "resource_split", "gpus_split"))
    if key and (match := re.match(r"\s*(\d+)\D*[:+/]\s*(\d+)", str(settings.raw(key)))):
        return with_ranks(cluster, int(match.group(1))), with_ranks(cluster, int(match.group(2)))
    stated = re.search(r"(\d+)\s*[:+]\s*(\d+)", f"{settings.raw('mode')} {settings.gpu}")
    if stated and int(stated.group(1)) + int(stated.group(2)) == cluster.num_gpus:
        return with_ranks(cluster, int(stated.group(1))), with_ranks(cluster, int(stated.group(2)))
    train = settings.first(("train_gpus", "trainer_gpus", "actor_gpus"))
    rollout = settings.first(("rollout_gpus", "gen_gpus", "generation_gpus"))
    if train and rollout:
        return with_ranks(cluster, settings.count(train)), with_ranks(cluster, settings.count(rollout))
    if is_async:
        half = max(1, cluster.num_gpus // 2)
        return with_ranks(cluster, half), with_ranks(cluster, half)
    return cluster, cluster


def _rollouts(settings: RunSettings, num_samples: int) -> int:
    """Rollouts of a step: NeMo-RL's gen_gbs and DeepSpeed-Chat's batch are rollouts, verl's train_batch is prompts."""
    key = settings.first(("num_rollouts", "gen_gbs", "rollout_batch_size", "global_batch", "rollouts_per_step"))
    if key:
        return settings.count(key)
    prompts = settings.first(("train_batch", "train_batch_size", "num_prompts", "prompts_per_step"))
    if prompts is None:
        raise CannotPredict("the number of rollouts of a step is not stated")
    return settings.count(prompts) * max(1, num_samples)


def _lengths(settings: RunSettings) -> tuple[float, Lengths]:
    """Tokens of a prompt, and how responses are distributed."""
    prompt = float(_first(settings, ("prompt", "prompt_len", "mean_prompt", "isl"), USUAL_PROMPT))
    fixed = settings.first(("gen", "response_len", "osl"))
    if fixed:
        tokens = settings.count(fixed)
        return prompt, Lengths(ConstantLengths(value=tokens), tokens)
    whole = settings.first(("max_seq", "max_seq_len", "max_total_sequence_length"))
    limit_key = settings.first(("max_response", "max_response_len", "max_response_length", "max_new_tokens"))
    if not (whole or limit_key):
        raise CannotPredict("the longest response is not stated")
    limit = settings.count(limit_key) if limit_key else max(1, int(settings.count(whole or "") - prompt))
    if (key := settings.first(("avg_seq", "mean_seq", "avg_seq_len"))) is not None:
        mean = max(1.0, settings.number(key, low=1) - prompt)
    elif (key := settings.first(("avg_response", "mean_response", "response_mean", "mean_response_len"))) is not None:
        mean = settings.number(key, low=1)
    else:
        mean = limit / 2 if limit <= SHORT_LIMIT else limit * MEAN_OF_LIMIT
    return prompt, lognormal(round(min(mean, limit), 1), limit)


@lru_cache(maxsize=64)
def lognormal(mean: float, limit: int) -> Lengths:
    """Log-normal lengths cut at a limit, whose mean is as given; constant where the mean is the limit.

    >>> round(lognormal(1000.0, 4096).mean)
    1000
    """
    if mean >= 0.97 * limit:
        return Lengths(ConstantLengths(value=limit), limit)
    low, high = 1.0, 1e3 * limit
    for _ in range(60):
        median = (low * high) ** 0.5
        found = Lengths(LogNormalLengths(kind="lognormal", median=median, sigma=SIGMA), limit)
        low, high = (median, high) if found.mean < mean else (low, median)
    return found


def _engine_tp(settings: RunSettings, model: ModelSpec, cluster: Cluster) -> int:
    """Ranks of an engine: as stated (`TP32`), else the fewest whose memory holds the weights twice over."""
    key = settings.first(("gen_parallel", "gen_tp", "rollout_tp", "infer_tp", "vllm_tp"))
    if key and (match := re.search(r"(\d+)", str(settings.raw(key)))):
        return int(match.group(1))
    ranks = 1
    while ranks < cluster.num_gpus and 4 * model.num_parameters / ranks > 0.8 * cluster.gpu.memory.value:
        ranks *= 2
    return ranks


def _choice(settings: RunSettings, backend: Backend, num_gpus: int) -> TrainerChoice:
    """How the policy is trained: NeMo-RL's `[tp, cp, ep, pp]`, keys of their own, else all in ZeRO-3.

    Assumed: activations are recomputed. Ulysses is 4 from 16,384 tokens on, as in verl's recipes for long responses.
    """
    tp, cp, ep, pp = (settings.degree(name, f"train_{name}") for name in ("tp", "cp", "ep", "pp"))
    if listed := re.findall(r"\d+", str(settings.raw("train_tp_cp_ep_pp") or "")):
        if len(listed) < 4:
            raise CannotPredict("setting 'train_tp_cp_ep_pp' is not four numbers")
        tp, cp, ep, pp = (max(1, int(number)) for number in listed[:4])
    if tp * cp * pp > num_gpus:
        raise CannotPredict(f"tp x cp x pp = {tp * cp * pp} is more than {num_gpus} GPUs")
    ulysses = settings.degree("ulysses", "sp", "sp_size", "ulysses_sp")
    stated = settings.first(("ulysses", "sp", "sp_size", "ulysses_sp"))
    limit = settings.first(("max_response", "max_response_len", "max_response_length"))
    if backend == "fsdp2" and stated is None and limit and settings.count(limit) >= 16384:
        ulysses = min(4, num_gpus)
    stage = 1 if backend == "megatron" else _first(settings, ("zero_stage", "zero"), 3)
    return TrainerChoice(
        zero_stage=stage,
        gradient_checkpointing=True,
        offloads_optimizer=False,
        offloads_parameters=False,
        micro_batch=_first(settings, ("micro_batch", "train_mbs"), 4),
        ulysses=ulysses,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=min(ep, max(1, num_gpus // pp)),
    )


def _value_model(settings: RunSettings, model: ModelSpec) -> ModelSpec | None:
    """A value model: as named, the policy's size where PPO names none, none for algorithms without one."""
    name = settings.raw("critic") or settings.raw("value_model")
    if not name:
        return model if CRITIC.search(str(settings.raw("algo") or "")) else None
    text = str(name)
    try:
        return model_by_name(text if "/" in text else f"facebook/{text.lower()}")
    except CannotPredict:
        if re.search(r"opt-350m", text.lower()):
            return model_by_name("facebook/opt-125m")
        raise


def _num_scored(text: str, *, is_chat: bool) -> int:
    """Forward passes of the policy's size: old log-probs, and a reference unless the algorithm goes without (DAPO)."""
    without = "dapo" in text or re.search(r"\bkl(_coef)?[= ]0(\.0*)?\b(?!\.)|no ref", text) is not None
    return 1 if without and not is_chat else 2


def _num_steps(point: MeasuredPoint, settings: RunSettings, num_rollouts: int) -> float:
    """Steps of what was timed: one, or those of a whole stage."""
    if not re.search(r"stage|epoch|run\b", point.measured.unit.lower()):
        return 1.0
    key = settings.first(("queries", "num_queries", "num_rollouts_total"))
    if key is None:
        raise CannotPredict("the number of queries of the stage is not stated")
    return settings.count(key) * _first(settings, ("epochs",), 1) / num_rollouts
