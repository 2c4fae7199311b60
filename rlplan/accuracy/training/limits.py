"""The largest model that trains: `max_model_size`, DeepSpeed-Chat's PPO on one GPU with ZeRO-Offload.

In: a point with the largest OPT that its authors could train. Out: the largest that the formulas say fits.
Left out: other trainers and families, several GPUs: refused.

The smallest run there is must fit: one sequence of DeepSpeed-Chat's own 256 + 256 tokens a micro-batch.
Source: DeepSpeedExamples applications/DeepSpeed-Chat training/step3_rlhf_finetuning (`max_prompt_seq_len`,
`max_answer_seq_len`), dschat/utils/ds_utils.py (ZeRO 2, `offload`, `release_inference_cache`).
"""

import re

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict, Prediction, predicts
from rlplan.accuracy.settings import Settings, gpu_of, total_bytes
from rlplan.memory.model.block_families import block_of
from rlplan.memory.trainers.shape import MicroBatchShape
from rlplan.memory.trainers.sharding import rank_state_under_zero
from rlplan.memory.trainers.step_peak import step_peak
from rlplan.memory.trainers.zero import ZeroSettings, ZeroStates
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.catalogue import find_model, load_catalogue

NUM_TOKENS = 512
HALF_BYTES = 2


@predicts("max_model_size")
def predict_largest(point: MeasuredPoint) -> Prediction:
    """The largest OPT actor whose four models fit, in billions as its name says: `13b`. Right or wrong, not near."""
    settings = Settings(point)
    if "ppo" not in settings.word("algo").lower() or "offload" not in settings.word("offload").lower():
        raise CannotPredict("only PPO with ZeRO-Offload is modelled")
    if re.match(r"\s*([2-9]|\d\d)\s*x\b", point.gpu or ""):
        raise CannotPredict("only one GPU is modelled")
    critic = _stated_size(settings.word("critic"))
    has_engine = settings.flag("hybrid_engine")
    total = total_bytes(point) - _context_bytes(point)
    fitting = [name for name in _opts() if needed_bytes(find_model(name), critic, has_engine) <= total]
    largest = fitting[-1].rpartition("-")[2] if fitting else "none"
    return Prediction(largest, is_right=largest == str(point.measured.value).lower())


def needed_bytes(actor: ModelSpec, critic_numel: int, has_engine: bool) -> int:
    """Bytes on the GPU when the actor takes its training step, beside it its reference, the critic and the reward.

    Counts: ZeRO-2 with the optimizer on the host (`rank_state_under_zero`), with one micro-batch (`step_peak`); 2P of
    the frozen reference, 2 bytes each of critic and reward model; the hybrid engine's joined copy of queries, keys and
    values.
    Source: DeepSpeed 0.19.8 module_inject/containers/features/hybrid_split_qkv.py (`attention_qkv_mp`).
    Assumes: the key-value cache is released before training.

    >>> needed_bytes(find_model("facebook/opt-1.3b"), 350_000_000, True) >> 30
    9
    """
    rank_state = rank_state_under_zero(ZeroStates(ZeroSettings(2, 1, offloads_optimizer=True), actor.parameters))
    shape = MicroBatchShape(block_of(actor), actor.num_layers, actor.vocab_size, NUM_TOKENS, NUM_TOKENS)
    others = HALF_BYTES * (actor.num_parameters + 2 * critic_numel)
    width = actor.q_size + 2 * actor.kv_size
    joined = HALF_BYTES * actor.num_layers * actor.hidden_size * width if has_engine else 0
    return sum(step_peak(rank_state, shape).values()) + others + joined


def _opts() -> list[str]:
    """OPT models, smallest first."""
    names = [name for name in load_catalogue() if name.startswith("facebook/opt-")]
    return sorted(names, key=lambda name: find_model(name).num_parameters)


def _stated_size(name: str) -> int:
    """Parameters that a name such as `OPT-350M` states. Raises: CannotPredict.

    >>> _stated_size("OPT-350M")
    350000000
    """
    match = re.search(r"(\d+(?:\.\d+)?)\s*([mb])\b", name.lower())
    if match is None:
        raise CannotPredict("the size of the critic is not stated")
    return int(float(match.group(1)) * (10**6 if match.group(2) == "m" else 10**9))


def _context_bytes(point: MeasuredPoint) -> int:
    profile = gpu_of(point)
    return profile.overheads.context.value if profile else 0
