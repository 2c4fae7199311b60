"""Requests and completions in vLLM's terms and back.

In: a RolloutRequest, or what vLLM made of a sample. Out: its sampling parameters, or a Completion.
"""

from collections.abc import Sequence
from typing import Any

from rlplan.runtime.rollout.experience import Completion, RolloutRequest, WeightSpan


def sampling_parameters(request: RolloutRequest, index: int, stop: Sequence[str | int], *, ignores_eos: bool) -> Any:
    """How sample `index` of a request is drawn. stop: texts and tokens that end a response; they belong to it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    texts = [part for part in stop if isinstance(part, str)]
    return SamplingParams(
        temperature=0.0 if index >= request.num_samples - request.num_greedy else request.temperature,
        top_p=1.0,
        top_k=-1,
        seed=request.seed + index,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(texts),
        stop=texts or None,
        stop_token_ids=[part for part in stop if isinstance(part, int)] or None,
        include_stop_str_in_output=True,
        max_tokens=request.lengths[index] if request.lengths else request.max_tokens,
        ignore_eos=ignores_eos or bool(request.lengths),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion_of(candidate: Any, version: int | None = None) -> Completion:
    """A finished sample. Of each position the first log-prob is the sampled token's.

    version: of the adapter that all of it was sampled with; None for whole weights, of which vLLM says it.
    """
    flat = candidate.logprobs
    spans = tuple(WeightSpan(_version(s.version), s.start, s.end) for s in candidate.weight_versions or ())
    return Completion(
        tokens=tuple(candidate.token_ids),
        logprobs=tuple(flat.logprobs[start] for start in flat.start_indices),
        finish_reason=str(candidate.finish_reason),
        spans=spans if version is None else (WeightSpan(version, 0, len(candidate.token_ids)),),
    )


def _version(label: str) -> int:
    """vLLM calls the weights that it has loaded itself `default`: version 0."""
    return int(label) if label.isdigit() else 0
