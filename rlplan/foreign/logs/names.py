"""The names under which other stacks log the seconds and lengths of a step: one table, read by read.py.

In: nothing. Out: for each stack what each of its metrics means. Left out: losses, rewards, memory; timers inside of
other timers (verl's `timing_s/generate_sequences` is a part of `timing_s/gen`), which would count twice.

Every name here is in seconds, tokens or shares. Sources: verl's console logs in its public issues; TRL 0.22's docs,
Logging, and trainer states on the hub; OpenRLHF's README, PPO observability; slime's metrics in public runs; NeMo-RL's
performance guides.
"""

from dataclasses import dataclass, field

from rlplan.vocabulary import Phase

STEP = "step"
MEAN_RESPONSE, MAX_RESPONSE, CUT_SHARE = "mean_response_len", "longest_response_len", "cut_share"
MEAN_PROMPT = "mean_prompt_len"
LENGTHS = (MEAN_RESPONSE, MAX_RESPONSE, CUT_SHARE, MEAN_PROMPT)
MEANINGS = (STEP, *(phase.value for phase in Phase), *LENGTHS)
"""What a field can mean: seconds of the step, of a phase, or a length."""
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
"""Seconds of a unit of time."""


@dataclass(frozen=True)
class Stack:
    """The names of one stack."""

    name: str
    meanings: dict[str, str]
    """By metric; several of one meaning are added up."""
    step_keys: tuple[str, ...] = ("step",)
    """Which step a row is of."""
    instead: dict[str, str] = field(default_factory=dict)
    """A metric that is only read where the other is not there."""


def _of(**meanings: str) -> dict[str, str]:
    """From meaning to names, turned round: `train="a b"` is {"a": "train", "b": "train"}."""
    return {name: meaning for meaning, names in meanings.items() for name in names.split()}


STACKS = (
    Stack(
        "verl",
        _of(
            step="timing_s/step",
            rollout="timing_s/gen",
            score="timing_s/old_log_prob timing_s/ref timing_s/values timing_s/reward timing_s/adv",
            train="timing_s/update_actor timing_s/update_critic",
            sync="timing_s/update_weights",
            switch="timing_s/reshard",
            checkpoint="timing_s/save_checkpoint",
            evaluate="timing_s/testing",
            mean_response_len="response_length/mean",
            longest_response_len="response_length/max",
            cut_share="response_length/clip_ratio",
            mean_prompt_len="prompt_length/mean",
        ),
        ("training/global_step", "step"),
    ),
    Stack(
        "TRL",
        _of(
            step="step_time",
            mean_response_len="completions/mean_length",
            longest_response_len="completions/max_length",
            cut_share="completions/clipped_ratio",
        ),
    ),
    Stack(
        "OpenRLHF",
        _of(
            step="timing/step_total",
            rollout="timing/generation",
            score="timing/make_experience",
            train="timing/ppo_train",
            sync="timing/broadcast",
            mean_response_len="response_length",
        ),
        ("global_step", "step"),
    ),
    Stack(
        "slime",
        _of(
            step="perf/step_time",
            rollout="perf/rollout_time",
            score="perf/log_probs_time perf/ref_log_probs_time",
            train="perf/actor_train_time perf/train_time",
            sync="perf/update_weights_time",
            switch="perf/sleep_time perf/wake_up_time",
            mean_response_len="rollout/response_len/mean",
            longest_response_len="rollout/response_len/max",
            cut_share="rollout/truncated_ratio",
        ),
        ("rollout/step", "step"),
        {"perf/train_time": "perf/actor_train_time"},
    ),
    Stack(
        "NeMo-RL",
        _of(
            step="timing/train/total_step_time",
            rollout="timing/train/generation timing/train/exposed_generation",
            score="timing/train/policy_and_reference_logprobs timing/train/reward_calculation",
            train="timing/train/policy_training",
            sync="timing/train/prepare_for_generation/total timing/train/weight_sync",
            checkpoint="timing/train/checkpointing",
            mean_response_len="train/mean_gen_tokens_per_sample",
        ),
        ("train/step", "step"),
        {"timing/train/exposed_generation": "timing/train/generation"},
    ),
    Stack(
        "rlplan",
        _of(
            step="step_s",
            rollout="seconds/generate",
            train="seconds/train_forward_backward seconds/optimizer_step",
            sync="seconds/sync_weights",
            evaluate="seconds/evaluate",
            checkpoint="seconds/checkpoint",
            mean_response_len="response_len/mean",
            longest_response_len="response_len/max",
            cut_share="response_len/truncated_fraction",
        ),
    ),
)
