"""Properties of vLLM versions that change its memory arithmetic, and its default batch limits.

In: a version as logs and issues write it, and a GPU's total bytes. Out: properties and default batch limits.
Left out: versions before 0.6, whose profiler also counted memory cached by the allocator; platforms other than CUDA.
"""

import re
from dataclasses import dataclass

from rlplan.errors import SpecError
from rlplan.spec.base import shorten_value
from rlplan.spec.model import ModelSpec
from rlplan.units import GIB

OLDEST = (0, 6)
"""First supported version: since 0.6 the profile run counts a peak of tensors. Source: vLLM 0.6.0 worker.py."""
UNSTATED, UNNUMBERED_V1 = (0, 10), (0, 17)
"""Assumed versions where none is stated, and where only `V1` is. Start-up logs that state only `V1` show no full sort,
like those of 0.17 and later, or of earlier versions with FlashInfer."""

DENSE_ON_V2 = ("LlamaForCausalLM", "MistralForCausalLM")
"""Dense architectures that ran with Model Runner V2 from vLLM 0.23 on, two versions before the other dense models."""
MIXTURES_ON_V2 = ("Qwen", "Deepseek")
"""Prefixes of MoE architectures that ran with Model Runner V2 before vLLM 0.29."""


@dataclass(frozen=True, slots=True, order=True)
class VllmVersion:
    """A version of vLLM."""

    major: int
    minor: int
    patch: int = 0
    is_v0: bool = False
    """Whether it is the V0 engine. V1 is the default since 0.8."""

    @property
    def _number(self) -> tuple[int, int, int]:
        return self.major, self.minor, self.patch

    @property
    def counts_context(self) -> bool:
        """Whether CUDA context and NCCL are subtracted from the fraction: V0 subtracts all memory outside of torch.

        Source: vLLM 0.6.5 worker.py `non_torch_memory`. V1 subtracts only what has grown since its first snapshot.
        """
        return self.is_v0

    @property
    def counts_cuda_graphs(self) -> bool:
        """Whether CUDA graphs are subtracted from the fraction under Model Runner V1.

        Source: vLLM 0.32.0 gpu_worker.py: `default since v0.21.0`.
        """
        return self._number >= (0, 21, 0)

    @property
    def sorts_vocabulary(self) -> bool:
        """Whether the profile run samples with PyTorch's full sort: V0, and V1 before its Triton kernels of 0.17.

        Source: vLLM pull 33538 (Triton top-k and top-p, merged between 13 and 20 February 2026), release notes of
        0.16.0 (cut on 8 February) and 0.17.0 (which names it). Validation: issue 27508, 1.71 GiB of KV cache of
        gpt-oss-120b under 0.11.0; the prediction is 1.37 with the sort and 6.54 without.
        Assumes: FlashInfer's sampler, which does not sort, is not used. Before 0.11.1 V1 used it where FlashInfer was
        installed; pull 26859 made it opt-in, pull 40376 the default again in 2026.
        """
        return self.is_v0 or (0, 8, 3) <= self._number < (0, 17, 0)

    @property
    def profiles_sampler(self) -> bool:
        """Whether the profile run samples at all."""
        return self.is_v0 or self._number >= (0, 8, 3)

    @property
    def splits_cache_groups(self) -> bool:
        """Whether sliding-window layers keep only their window. Source: vLLM 0.9.2, hybrid KV cache manager."""
        return not self.is_v0 and self._number >= (0, 9, 2)

    @property
    def counts_group_capacity(self) -> bool:
        """Whether the tokens in the log are concurrency times length. Source: vLLM 0.32.0 `get_kv_cache_capacity`.

        Earlier versions log blocks over groups times the block size. Assumes: changed with 0.21.
        """
        return self._number >= (0, 21, 0)

    @property
    def keeps_workspaces_asleep(self) -> bool:
        """Whether sleep leaves MoE workspaces on the GPU. After 0.26 they moved to a pool of their own, which it frees.

        Source: vLLM 0.32.0 gpu_worker.py (`init_workspace_manager`, pool `workspace`); OLMoE asleep under 0.26.
        Assumes: changed with 0.32, the first later version whose source was read.
        """
        return self._number < (0, 32, 0)

    def has_runner_v2(self, model: ModelSpec) -> bool:
        """Whether vLLM runs the model with Model Runner V2 by default.

        Source: vLLM pulls 39337 (Qwen3), 42665 (Llama, Mistral), 42667 (MoE of Qwen and DeepSeek) and 44443 (all dense
        models), release notes of 0.23, 0.25 and 0.29 (all models). The memory of sleeping OLMoE, Qwen2.5, SmolLM2 and
        Gemma 4 under 0.23 and 0.26 agrees. Assumes: 0.22 for Qwen3, 0.24 for MoE.
        """
        if self._number >= (0, 29, 0):
            return True
        if model.experts:
            return self._number >= (0, 24, 0) and model.architecture.startswith(MIXTURES_ON_V2)
        first = (0, 23, 0) if model.architecture in DENSE_ON_V2 else (0, 25, 0)
        return self._number >= ((0, 22, 0) if model.architecture == "Qwen3ForCausalLM" else first)

    def reserves_graphs(self, model: ModelSpec) -> bool:
        """Whether CUDA graphs are subtracted from the fraction. Model Runner V2 reserved nothing for them before 0.29.

        Source: vLLM issue 49224, pull 53306.
        """
        return self.counts_cuda_graphs and (self._number >= (0, 29, 0) or not self.has_runner_v2(model))

    def captures_with_adapters(self, model: ModelSpec) -> bool:
        """Whether each batch size is captured a second time, with adapters.

        Source: vLLM 0.32.0 config/compilation.py (`cudagraph_specialize_lora`); Model Runner V2 of 0.23 captures only
        without adapters (vllm pull 43084), which agrees with SmolLM2's residuals. Assumes: 0.25 for V2's change.
        """
        return self._number >= (0, 25, 0) or not self.has_runner_v2(model)

    @property
    def num_batches_in_flight(self) -> int:
        """Batches scheduled at once: two with asynchronous scheduling. Source: vLLM 0.32.0 `max_concurrent_batches`."""
        return 2 if self._number >= (0, 14, 0) else 1


LATEST = VllmVersion(0, 32, 0)
"""The version that rlplan's lock file pins."""


ASYNC, ASYNC_DATE = VllmVersion(0, 14), "2026-01-17"
"""First version that schedules asynchronously by default, and its day. Source: vLLM pull request 27614."""


def find_version(stated: str | None, date: str = "") -> VllmVersion:
    """The stated version, else the one that rlplan installs. Raises: SpecError for one that is not modelled.

    date: day of the framework's release. A day before asynchronous scheduling gives a version without it.

    >>> find_version(None, "2025-08-01") < ASYNC <= find_version(None, "2026-03-01")
    True
    """
    if stated:
        return parse_version(stated)
    return VllmVersion(ASYNC.major, ASYNC.minor - 1) if date and date < ASYNC_DATE else LATEST


def parse_version(text: str) -> VllmVersion:
    """Parse the version that a log or issue states. Raises: SpecError for one that is not modelled.

    >>> parse_version("~0.6.5 V0") == VllmVersion(0, 6, 5, is_v0=True), parse_version("V1").minor
    (True, 17)
    >>> parse_version("v0.8.4").is_v0
    False
    """
    match = re.search(r"(?<!\d)(\d{1,2})\.(\d{1,3})(?:\.(\d{1,3}))?", text)
    says_v0 = re.search(r"\bV0\b(?!\.)", text, re.IGNORECASE) is not None
    says_v1 = re.search(r"\bV1\b(?!\.)", text, re.IGNORECASE) is not None
    if match is None:
        if re.search(r"\b(main|nightly|latest)\b", text, re.IGNORECASE):
            return LATEST
        if says_v0:
            return VllmVersion(0, 7, 3, is_v0=True)
        return VllmVersion(*(UNNUMBERED_V1 if says_v1 else UNSTATED))
    major, minor, patch = (int(part or 0) for part in match.groups())
    if (major, minor) < OLDEST:
        raise SpecError(
            f"vLLM {shorten_value(text)} is not modelled",
            where="vllm",
            rule=f"{OLDEST[0]}.{OLDEST[1]} and newer: before, the profiler counted what the allocator had cached",
            way_out="measure it, or use a newer version",
        )
    return VllmVersion(major, minor, patch, is_v0=says_v0 or (not says_v1 and (major, minor) < (0, 8)))


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """vLLM's limits of a batch."""

    max_num_seqs: int
    """Concurrent sequences."""
    max_num_batched_tokens: int
    """Tokens of one forward pass."""


def find_default_limits(
    version: VllmVersion, total_bytes: int, max_model_len: int, *, is_a100: bool = False
) -> BatchLimits:
    """Default limits of vLLM's server. Its `LLM` class has twice the tokens, and four times as many on small GPUs.

    Source: vLLM 0.32.0 arg_utils.py `get_batch_defaults`; 0.6.4 and 0.8.4 config.py and arg_utils.py.
    Counts: V0 takes max(length, 2048) tokens. Beyond a length of 32,768 it prefills in chunks of 512 tokens (2048 from
    0.7).
    Differs: B200-class cards (160 GiB and more) have a row of their own only from 0.11.

    >>> find_default_limits(LATEST, 80 * GIB, 8192), find_default_limits(LATEST, 24 * GIB, 8192).max_num_batched_tokens
    (BatchLimits(max_num_seqs=1024, max_num_batched_tokens=8192), 2048)
    """
    if version.is_v0:
        chunk = 512 if version.minor < 7 else 2048
        return BatchLimits(256, chunk if max_model_len > 32768 else max(max_model_len, 2048))
    is_large = total_bytes >= 70 * GIB and not (is_a100 and version.minor >= 9)
    if total_bytes >= 160 * GIB and version.minor >= 11:
        num_tokens = 16384
    elif is_large:
        num_tokens = 8192
    else:
        num_tokens = 2048
    num_seqs = 1024 if is_large or version.minor < 9 else 256
    return BatchLimits(num_seqs, min(num_tokens, num_seqs * max_model_len))
