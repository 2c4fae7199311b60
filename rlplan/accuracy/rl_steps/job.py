"""A published RL step as a job with a forced layout, from settings of verl, NeMo-RL and OpenRLHF.

In: a point. Out: the job as a mapping. Raises CannotPredict where a setting that decides the time is missing, and for
runs that no job can express. Left out: seconds and verdicts (points.py).

Settings that a source does not state are assumed, the same for every point; each constant below names its assumption.
"""

import re
from functools import lru_cache
from math import ceil, exp
from typing import Any

from rlplan.accuracy.named_models import find_point_model, make_policy
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predictions import CannotPredict
from rlplan.accuracy.settings import WORDS, find_gpu
from rlplan.accuracy.training.settings import RunSettings, num_ranks
from rlplan.frameworks.profile import find_release
from rlplan.spec.base import shorten_value
from rlplan.spec.hardware.catalogue import find_usual_node
from rlplan.spec.parts.lengths import ConstantLengths, Lengths, LogNormalLengths

USUAL_PROMPT = 200
"""Tokens of a prompt where none is stated. Assumed: mathematics with a template (DAPO-17k: 100 to 250)."""
USUAL_MAX_PROMPT = 2048
"""Longest allowed prompt in tokens, to which verl pads (its recipes for mathematics: 1,024 to 2,048)."""
USUAL_MEAN, REASONING_MEAN = 2450.0, 10_000.0
"""Mean tokens of untruncated responses where no mean is stated: of ordinary models, and of models trained for long
reasoning. Assumed: a 7B model writes 1,500 to 4,000 tokens on competition mathematics with limits of 20 to 32 thousand
(geometric middle); DeepScaleR's page states 10,484 for R1-Distill-Qwen-1.5B.
"""
LENGTH_SPREAD = 4000 / 2450
"""Factor of an assumed mean in both directions, the ends of that range; a step's seconds grow with its tokens."""
REASONING = re.compile(r"r1-distill|deepscaler|qwq|thinking|openthinker|skywork-or1|deepseek-r1|magistral", re.I)
"""Names of models that were trained for long reasoning."""
SIGMA = 1.0
"""Standard deviation of the logarithm of response lengths. Assumed: a few in a thousand then reach ten times the mean,
as many as DAPO clips.
"""
NUM_SAMPLES = 16
"""Responses per prompt where the number is not stated (GRPO in NeMo-RL's and verl's recipes)."""
MAX_NUM_SEQS = 1024
"""Concurrent sequences of an engine. Source: vLLM's default on GPUs with at least 70 GiB except the A100
(arg_utils.py), which NeMo-RL keeps; verl sets the same.
"""
UTILIZATIONS = {"nemo_rl": (0.6, 0.8)}
"""`gpu_memory_utilization` of colocated and of disaggregated engines in NeMo-RL's recipes."""
USUAL_UTILIZATIONS = (0.8, 0.8)
"""The same in verl's recipes."""
RECOMPUTED = re.compile(r"llama-?3\.1-8b|qwen3-235b|deepseek-(v3|r1)|nemotron-?3-super", re.IGNORECASE)
"""Models whose NeMo-RL recipes set `activation_checkpointing`; those of Qwen3-30B-A3B and Qwen3-32B leave it off.

Recipes for FSDP2 with tensor parallelism set it for every model (`fsdp2tp8-actckpt`).
"""
USUAL_RELEASES = {"verl": "0.6"}
"""The release where none is stated: verl's of October 2025, in the middle of those from 0.2 to 0.9."""
FIRST_RELEASES = {r"\bv1_\w+_trainer": "0.9"}
"""Words of features, and the first release that has them (verl docs/advance/v1_async_trainer.md)."""
GPUS_PER_NODE = 8
"""GPUs of a node where a split counts nodes."""
SCORED_SEQUENCES = 2
"""NeMo-RL's `logprob_batch_size`: sequences of maximum length in a pass without gradients, 1 to 4 by model."""
LONG_RESPONSE, LONG_ULYSSES = 16_384, 4
"""Smallest response limit for which verl's recipes use Ulysses, and their Ulysses degree."""


def rl_job(point: MeasuredPoint) -> dict[str, Any]:
    """The job of a published step. Raises: CannotPredict."""
    settings = RunSettings(point)
    text = f"{settings.join_words(WORDS['step_words'])} {point.source.lower()}"
    if "deepspeed-chat" in text or "dschat" in point.id:
        raise CannotPredict("DeepSpeed-Chat gathers every layer for every generated token: a job cannot express that")
    framework = find_framework(text)
    backend = "megatron" if re.search(r"megatron|mcore", text) else "deepspeed" if framework == "openrlhf" else "fsdp2"
    is_async = bool(re.search(r"\b[1-9]\d*-off|one.step.off|(fully.|_|\b)async\b", text.replace("async_tp", "")))
    is_async = is_async and "sync mode" not in text and "colocate sync" not in text
    total = num_ranks(settings)
    num_training, num_generation = _read_devices(settings, total, is_async=is_async)
    is_shared = num_training + num_generation > total
    prompt, lengths = _read_lengths(
        settings,
        reasons=REASONING.search(f"{point.model} {point.id}") is not None,
        context=find_point_model(point).max_position_embeddings,
    )
    release = _read_release(settings, framework, text)
    axes, longest = _read_axes(settings, backend, num_training), _read_max_prompt(settings, prompt) + lengths.longest
    job: dict[str, Any] = {
        "policy": make_policy(point, longest=longest),
        "algorithm": _make_algorithm(settings, text),
        "framework": release,
        "hardware": _make_hardware(point, total),
        "workload": _make_workload(settings, prompt, lengths),
        "training": _make_training(point, settings, framework, backend, axes, longest),
        "rollout": _make_rollout(settings, text, release, is_shared=is_shared),
        "placement": {"placement": "colocated"},
    }
    if framework == "nemo_rl":
        tokens = SCORED_SEQUENCES * int(prompt + lengths.longest)
        job["scoring"] = {role: {"max_tokens_per_micro_batch": tokens} for role in ("policy", "reference")}
        if is_shared and job["training"]["offloads_optimizer"] == "auto":
            # optimizer_offload_fraction is 0 (examples/configs/grpo_math_1B.yaml, v0.4.0 to v0.6.0)
            job["training"]["offloads_optimizer"] = False
    if not is_shared:
        job["placement"] = {"placement": "disaggregated", "num_generation_devices": num_generation}
        if is_async:
            job["placement"]["max_staleness"] = _read_staleness(settings, text)
        if "fully async" in text:
            # the engines' log-probs are the old ones (verl docs/advance/fully_async.md)
            job["scoring"] = {"policy_log_probs": "never"}
    return job


def find_framework(text: str) -> str:
    """The framework that a text names, verl where it names none with a profile."""
    frameworks: dict[str, str] = WORDS["frameworks"]
    return next((name for name, pattern in frameworks.items() if re.search(pattern, text)), "verl")


def count_steps(point: MeasuredPoint, num_rollouts: int) -> float:
    """Steps within the measured time: one, or those of a whole stage. Raises: CannotPredict."""
    settings = RunSettings(point)
    if not re.search(r"stage|epoch|run\b", point.measured.unit.lower()):
        return 1.0
    key = settings.first(("queries", "num_queries", "num_rollouts_total"))
    if key is None:
        raise CannotPredict("the number of queries of the stage is not stated")
    return settings.read_count(key) * _read_first(settings, ("epochs",), 1) / num_rollouts


def _read_release(settings: RunSettings, framework: str, text: str) -> str:
    """The framework with the release that `version` states, or the usual one: `nemo_rl@0.3` for `NeMo RL v0.3`."""
    stated = re.search(r"\d+\.\d+(\.\d+)*", str(settings.raw("version") or ""))
    implied = (release for words, release in FIRST_RELEASES.items() if re.search(words, text))
    version = stated.group() if stated else next(implied, USUAL_RELEASES.get(framework))
    if version and not stated:
        settings.assume("release", version)
    return f"{framework}@{version}" if version else framework


def _make_hardware(point: MeasuredPoint, count: int) -> str:
    """The GPUs in short form: `12xhgx-h20`, or `6xh20` where they do not fill hosts. Raises: CannotPredict."""
    gpu = find_gpu(point)
    if gpu is None:
        raise CannotPredict(f"no profile of the GPU '{shorten_value(point.gpu)}'")
    node = find_usual_node(gpu)
    if node is None or count % node.num_gpus:
        return f"{count}x{gpu.name}"
    return f"{count // node.num_gpus}x{node.name}"


def _make_algorithm(settings: RunSettings, text: str) -> dict[str, Any]:
    without = "dapo" in text or re.search(r"\bkl(_coef)?[= ]0(\.0*)?\b(?!\.)|no ref", text) is not None
    name = str(settings.raw("algo") or "").lower()
    algorithm: dict[str, Any] = {"name": "ppo" if "ppo" in name else "grpo"}
    if without:
        algorithm["kl_coef"] = 0.0
    return algorithm


def _make_workload(settings: RunSettings, prompt: float, lengths: Lengths) -> dict[str, Any]:
    num_samples = _read_first(settings, ("rollout_n", "n", "num_samples", "group_size", "generations_per_prompt"), 0)
    num_rollouts = _read_rollouts(settings, num_samples)
    mini = _read_first(settings, ("train_gbs", "mini_batch", "ppo_mini_batch_size"), 0)
    if "mini_batch" in settings and "train_gbs" not in settings:
        mini *= num_samples or 1
    samples = num_samples or NUM_SAMPLES
    spec = lengths.spec
    return {
        "num_prompts_per_step": max(1, num_rollouts // samples),
        "num_samples_per_prompt": samples,
        "mini_batch_size": min(mini or num_rollouts, num_rollouts),
        "max_prompt_len": _read_max_prompt(settings, prompt),
        "mean_prompt_len": int(prompt),
        "max_response_len": lengths.longest,
        "response_lengths": {"kind": "constant"} if isinstance(spec, ConstantLengths) else spec.model_dump(),
    }


def _read_max_prompt(settings: RunSettings, prompt: float) -> int:
    """Tokens of the longest prompt; the usual length where one limit covers prompt and response together."""
    if settings.first(("max_seq", "max_seq_len", "max_total_sequence_length")):
        return int(prompt)
    return max(
        int(prompt), _read_first(settings, ("max_prompt", "max_prompt_len", "max_prompt_length"), USUAL_MAX_PROMPT)
    )


def _make_training(
    point: MeasuredPoint, settings: RunSettings, framework: str, backend: str, axes: dict[str, int], longest: int
) -> dict[str, Any]:
    """The keys of `training`. longest: tokens of the longest sequence.

    Assumed: activations are recomputed, except where NeMo-RL's recipes do not. A pass has one longest sequence for
    NeMo-RL (`train_micro_batch_size` 1), else two.
    """
    offload = str(settings.raw("offload") or "").lower()
    training: dict[str, Any] = {
        "backend": backend,
        **axes,
        "gradient_checkpointing": framework != "nemo_rl"
        or RECOMPUTED.search(point.model or "") is not None
        or (backend == "fsdp2" and axes["tp"] > 1),
        "offloads_optimizer": "optimizer" in offload or "auto",
        "max_tokens_per_micro_batch": (1 if framework == "nemo_rl" else 2) * longest * axes["ulysses"] * axes["cp"],
    }
    if stage := settings.first(("zero_stage", "zero")):
        training["zero_stage"] = settings.read_count(stage, at_least=0)
    return training


def _make_rollout(settings: RunSettings, text: str, label: str, *, is_shared: bool) -> dict[str, Any]:
    """The keys of `rollout`. label: the framework with its release, which decides on CUDA graphs if no word does."""
    release = find_release(label)
    key = settings.first(("gen_parallel", "gen_tp", "rollout_tp", "infer_tp", "vllm_tp"))
    words = f"{settings.raw('rollout')} {settings.raw('split')}"
    stated = re.search(r"(\d+)", str(settings.raw(key))) if key else re.search(r"\btp(\d+)\b", words, re.IGNORECASE)
    shared, alone = UTILIZATIONS.get(release.name, USUAL_UTILIZATIONS)
    rollout: dict[str, Any] = {
        "tp": int(stated.group(1)) if stated else "auto",
        "attention_dp": 1,
        "has_cuda_graphs": not release.runs_eagerly and "eager" not in str(settings.raw("rollout")).lower(),
        "quantization": str(settings.raw("rollout_quantization") or "none"),
        "gpu_memory_utilization": shared if is_shared else alone,
        "max_num_seqs": MAX_NUM_SEQS,
    }
    if "sglang" in text:
        rollout["engine"] = "sglang"
    return rollout


def _read_staleness(settings: RunSettings, text: str) -> int:
    """The staleness: NeMo-RL's `8-off` is 8; one step where an asynchronous run does not say.

    A part of a step, as verl's staleness_threshold, is rounded up: a job counts whole versions.
    """
    if (key := settings.first(("staleness", "staleness_threshold"))) is not None:
        return ceil(settings.number(key, low=0))
    stated = re.search(r"\b([1-9]\d*)-off", text)
    return int(stated.group(1)) if stated else 1


def _read_first(settings: RunSettings, keys: tuple[str, ...], default: int) -> int:
    key = settings.first(keys)
    if key is None and default:
        settings.assume(keys[0], default)
    return settings.read_count(key) if key else default


def _read_devices(settings: RunSettings, total: int, *, is_async: bool) -> tuple[int, int]:
    """GPUs that train and that generate; an asynchronous run that does not say has half of each."""
    key = settings.first(("split", "train_rollout_gpus", "resource_split", "gpus_split"))
    if key and (match := re.match(r"\s*(\d+)[^+:/]*[:+/]\s*(\d+)(.*\bnodes?\b)?", str(settings.raw(key)))):
        scale = GPUS_PER_NODE if match.group(3) else 1
        return scale * int(match.group(1)), scale * int(match.group(2))
    stated = re.search(r"(\d+)\s*[:+]\s*(\d+)", f"{settings.raw('mode')} {settings.gpu}")
    if stated and int(stated.group(1)) + int(stated.group(2)) == total:
        return int(stated.group(1)), int(stated.group(2))
    train = settings.first(("train_gpus", "trainer_gpus", "actor_gpus"))
    rollout = settings.first(("rollout_gpus", "gen_gpus", "generation_gpus"))
    if train and rollout:
        return settings.read_count(train), settings.read_count(rollout)
    if is_async:
        half = max(1, total // 2)
        return half, half
    return total, total


def _read_rollouts(settings: RunSettings, num_samples: int) -> int:
    """Rollouts per step: NeMo-RL's gen_gbs counts rollouts, verl's train_batch counts prompts."""
    key = settings.first(("num_rollouts", "gen_gbs", "rollout_batch_size", "global_batch", "rollouts_per_step"))
    if key:
        return settings.read_count(key)
    prompts = settings.first(("train_batch", "train_batch_size", "num_prompts", "prompts_per_step"))
    if prompts is None:
        raise CannotPredict("the number of rollouts of a step is not stated")
    return settings.read_count(prompts) * max(1, num_samples)


def _read_lengths(settings: RunSettings, *, reasons: bool, context: int) -> tuple[float, Lengths]:
    """Tokens of a prompt, and the distribution of response lengths.

    context: longest sequence that the model was trained on. An assumed mean is that of responses that end within it,
    also where a recipe raises the limit.
    """
    prompt = float(_read_first(settings, ("prompt", "prompt_len", "mean_prompt", "isl"), USUAL_PROMPT))
    fixed = settings.first(("gen", "response_len", "osl"))
    if fixed:
        tokens = settings.read_count(fixed)
        return prompt, Lengths(ConstantLengths(value=tokens), tokens)
    whole = settings.first(("max_seq", "max_seq_len", "max_total_sequence_length"))
    limit_key = settings.first(("max_response", "max_response_len", "max_response_length", "max_new_tokens"))
    if not (whole or limit_key):
        raise CannotPredict("the longest response is not stated")
    limit = settings.read_count(limit_key) if limit_key else max(1, int(settings.read_count(whole or "") - prompt))
    if (key := settings.first(("avg_seq", "mean_seq", "avg_seq_len"))) is not None:
        mean = max(1.0, settings.number(key, low=1) - prompt)
    elif (key := settings.first(("avg_response", "mean_response", "response_mean", "mean_response_len"))) is not None:
        mean = settings.number(key, low=1)
    else:
        end = max(1, min(limit, round(context - prompt)))
        mean = _make_uncut(REASONING_MEAN, end).mean if reasons else min(limit / 2, _make_uncut(USUAL_MEAN, end).mean)
        settings.assume("mean_response", round(mean))
    return prompt, lognormal(round(min(mean, limit), 1), limit)


def _make_uncut(mean: float, limit: int) -> Lengths:
    """Log-normal lengths with a mean before truncation, truncated at a limit."""
    return Lengths(LogNormalLengths(kind="lognormal", median=mean * exp(-(SIGMA**2) / 2), sigma=SIGMA), limit)


@lru_cache(maxsize=64)
def lognormal(mean: float, limit: int) -> Lengths:
    """Log-normal lengths truncated at a limit, with a given mean after truncation; constant where the two are equal.

    >>> round(lognormal(1000.0, 4096).mean)
    1000
    """
    if mean >= 0.97 * limit:
        return Lengths(ConstantLengths(value=limit), limit)
    low, high = 1.0, 1e3 * limit
    for _ in range(60):
        median = (low * high) ** 0.5
        lengths = Lengths(LogNormalLengths(kind="lognormal", median=median, sigma=SIGMA), limit)
        low, high = (median, high) if lengths.mean < mean else (low, median)
    return lengths


def _read_axes(settings: RunSettings, backend: str, num_gpus: int) -> dict[str, int]:
    """The policy's degrees of parallelism, from NeMo-RL's `[tp, cp, ep, pp]` or from single keys.

    Assumed: a Ulysses degree of 4 from 16,384 tokens, as in verl's recipes for long responses. Raises: CannotPredict.
    """
    tp, cp, ep, pp = (settings.degree(name, f"train_{name}") for name in ("tp", "cp", "ep", "pp"))
    if listed := re.findall(r"\d+", str(settings.raw("train_tp_cp_ep_pp") or "")):
        if len(listed) < 4:
            raise CannotPredict("setting 'train_tp_cp_ep_pp' is not four numbers")
        tp, cp, ep, pp = (max(1, int(number)) for number in listed[:4])
    else:
        named = dict(re.findall(r"\b(tp|cp|ep|pp)(\d+)\b", str(settings.raw("train") or "").lower()))
        degrees = zip(("tp", "cp", "ep", "pp"), (tp, cp, ep, pp), strict=True)
        tp, cp, ep, pp = (int(named.get(name, degree)) for name, degree in degrees)
    if tp * cp * pp > num_gpus:
        raise CannotPredict(f"tp x cp x pp = {tp * cp * pp} is more than {num_gpus} GPUs")
    keys = ("ulysses", "sp", "sp_size", "ulysses_sp")
    ulysses = settings.degree(*keys)
    limit = settings.first(("max_response", "max_response_len", "max_response_length"))
    if backend == "fsdp2" and settings.first(keys) is None and limit and settings.read_count(limit) >= LONG_RESPONSE:
        ulysses = min(LONG_ULYSSES, num_gpus)
    return {"tp": tp, "pp": pp, "cp": cp, "ep": min(ep, max(1, num_gpus // pp)), "ulysses": ulysses}
