"""Conversion of requests to vLLM's sampling parameters, and of vLLM's outputs to completions.

In: a RolloutRequest, or vLLM's output of a sample. Out: its sampling parameters, or a Completion.
"""

from collections.abc import Sequence
from typing import Any

from rlplan.runtime.rollout.experience import Completion, RolloutRequest, WeightSpan


def build_sampling_parameters(
    request: RolloutRequest, index: int, stop: Sequence[str | int], *, ignores_eos: bool
) -> Any:
    """Sampling parameters of sample `index`. stop: texts and tokens that end a response and are part of it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    texts = [part for part in stop if isinstance(part, str)]
    return SamplingParams(
        temperature=0.0 if index >= request.num_samples - request.num_greedy else request.temperature,
        top_p=1.0,
        top_k=-1,
        seed=request.seed + index,  # a seed per sample, so that samples do not depend on the batch
        logprobs=0,  # log-probs of the sampled tokens only
        flat_logprobs=True,  # flat arrays instead of one object per token
        detokenize=bool(texts),  # vLLM needs text only to find stop texts
        stop=texts or None,
        stop_token_ids=[part for part in stop if isinstance(part, int)] or None,
        include_stop_str_in_output=True,
        max_tokens=request.lengths[index] if request.lengths else request.max_tokens,
        ignore_eos=ignores_eos or bool(request.lengths),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def read_completion(candidate: Any, version: int | None = None, experts: Any = None) -> Completion:
    """Convert a finished sample. experts: `Completion.experts`.

    version: the adapter version that all tokens were sampled with; None for full weights, whose versions vLLM reports.
    """
    flat = candidate.logprobs  # the first log-prob of each position is the sampled token's
    spans = tuple(WeightSpan(_parse_version(s.version), s.start, s.end) for s in candidate.weight_versions or ())
    return Completion(
        tokens=tuple(candidate.token_ids),
        logprobs=tuple(flat.logprobs[start] for start in flat.start_indices),
        finish_reason=str(candidate.finish_reason),
        spans=spans if version is None else (WeightSpan(version, 0, len(candidate.token_ids)),),
        experts=experts,
    )


def _parse_version(label: str) -> int:
    """Version number of a weight label; vLLM labels weights that it loaded from files `default`, which is version 0."""
    return int(label) if label.isdigit() else 0
