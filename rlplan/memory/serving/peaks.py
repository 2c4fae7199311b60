"""Memory of vLLM's computation: prefill, sampler, CUDA graphs, and memory outside of torch.

In: a ModelSpec, ranks, batch limits and a version. Out: bytes per GPU. Left out: weights, KV cache, encoders of images
and sound (counted only roughly, by `encoder_peak_bytes`), all-to-all buffers of expert parallelism.

Symbols: T max_num_batched_tokens, S max_num_seqs, V vocab_size, h hidden_size, I intermediate_size, t tensor-parallel
ranks, e bytes of an element, k experts of a token, Ie width of an expert.
"""

from rlplan.memory.serving.versions import VllmVersion
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.dimensions import Layout, compute_sizes
from rlplan.units import KIB, MIB, ceil_div

RESIDUAL_COPIES = 2.9
"""Copies of a hidden state at the peak: hidden state, residual and most of a norm's output. vLLM's code suggests 3. The
value is fitted to the slope of 107 KiB a token of Llama-3.1-8B (vllm issue 10517, 20,000 to 29,000 tokens). Without
that source it would be 3.0, which changes the peak by 0.8 %."""
SAMPLER_BYTES = 14
"""Bytes per sequence and vocabulary entry in the profile run: bf16 logits 2, fp32 logits 4, probabilities 4,
exponential noise 4. Source: vLLM 0.32.0 v1/sample/sampler.py and ops/topk_topp_sampler.py `forward_native`. Derived,
not fitted."""
SORT_SAMPLER_BYTES = 41
"""Bytes per sequence and vocabulary entry where PyTorch sorts. Derived, it would be 38: logits 2 + 4, sorted values 4,
their indices 8, and inside torch.sort the indices again 8 and CUB's second buffers of keys and indices 12
(ATen/native/cuda/Sort.cpp). Measured: 39.2 (vllm pull 10511), 39.5 (21489) and 45.1 (17122), with a mean of 41. Without
the first it is 42.3, without the second 42.2, without the third 39.4, so the sampler's peak changes by at most 4 %."""
LOGIT_BYTES = 2
"""Bytes of a bf16 logit, where the profile run computes logits but does not sample."""
LAYER_GRAPH_BYTES = 300 * KIB
"""Bytes per layer and captured batch size: the driver keeps a node with arguments for each kernel.

Fitted only to the 0.65 GiB of Gemma 3 4B (vllm pull 21489). Memory of sleeping engines of six models under AgileRL was
not used; fitted to it the value would be 0.32 MiB, with a leave-one-out error of 35 MiB. A constant per size for any
number of layers has an error of 50 MiB. Other logs show 0.31 MiB for Qwen3-32B on two ranks (vLLM 0.10), 0.38 for
Llama-3.2-1B (vllm pull 11349), 0.12 for Llama-70B on eight ranks, and 0.10 for Qwen2.5 0.5B (vLLM issue 50159, an
estimate)."""
RUNNER_SEGMENTS = 22 * MIB
"""Bytes of torch's segments for small tensors of a model runner: 2 MiB for tensors up to 1 MiB, 20 MiB for those up to
10 MiB. Source: torch 2.13 c10 CUDAAllocatorConfig.h (`kSmallBuffer`, `kLargeBuffer`). Not fitted. Without it the median
residual under AgileRL is 20 MiB too low."""
COMPILED_KERNELS = 80 * MIB
"""Bytes of kernels that Triton compiles: attention with heads of two widths (Gemma 4, for which vLLM has no other
backend), and experts. Fitted to 21 residuals of Gemma 4 E2B under vLLM 0.26: the mean error is 0.015 GiB, without it
0.09. Of data that was not fitted, 20 residuals under 0.23 have 0.016 and 21 of OLMoE 0.010 (each 0.09 without it)."""
GEMMA_PATCHES = 280 * 3**2
"""Patches of an image for Gemma 4: 280 tokens of 3 by 3 (`default_output_length`, `pooling_kernel_size`)."""
NON_TORCH_GROWTH = 70 * MIB
"""Bytes of the driver for kernels that the profile run loads. Fitted to vllm pull 21489 (0.07 GiB)."""


def prefill_peak_bytes(
    model: ModelSpec,
    tp: int,
    num_tokens: int,
    element_bytes: int = 2,
    *,
    ep: int = 1,
    attention_dp: int = 1,
) -> int:
    """Bytes in flight at the widest moment of one layer, during a forward pass of T tokens without gradients.

    Counts: e*T*(width + 2.9 h), where width is the largest of: the MLP's gate, up and product 3I/t (of the wider
    layers); the experts' k*(max(2Ie/t, h) + Ie/t); attention's q, k, v and output; latent attention's decompressed keys
    and values. Per-layer inputs of all layers (Gemma 4 E2B) are added.
    Source: vLLM 0.32.0 layers/activation.py, fused_moe/fused_moe.py (`intermediate_cache1` and 3 share memory).
    Assumes: experts process all T tokens in one chunk, as vLLM does up to 16,384. Under expert parallelism (ep above 1)
    every rank has rows for all tokens, and experts of full width. Under data-parallel attention each of d groups
    attends to T / d tokens, gathers T hidden states for its experts, and reduces as many sums (vLLM 0.32.0,
    `AgRsAll2AllManager` of device_communicators/all2all.py, the default).

    >>> from rlplan.spec.models.catalogue import find_model
    >>> prefill_peak_bytes(find_model("meta-llama/Llama-3.1-8B"), 1, 1000)  # 2000 * (3*14336 + 2.9*4096)
    109772800
    """
    layout = Layout(tp=tp, ep=ep, attention_dp=attention_dp, vocab_multiple=64)
    share, own_tokens = compute_sizes(model, layout).share, ceil_div(num_tokens, attention_dp)
    mlp = 2 * share["I"] if model.shared_keys and model.shared_keys.widens_mlp else share["I"]
    widths = [3 * mlp, 2 * share["q"] + 2 * share["kv"]]
    exchanged = 0
    if model.experts:
        width = share["Ie"]
        routed = model.experts.num_active * (max(2 * width, model.hidden_size) + width)
        if attention_dp == 1:
            widths.append(routed + 3 * share["Is"])
        else:
            exchanged = num_tokens * (routed + 2 * model.hidden_size) + ceil_div(own_tokens, tp) * 3 * share["Is"]
    if model.latent_attention:
        widths.append(2 * share["qm"] + share["kvm"] + share["om"])
    if model.linear_attention:
        widths.append(3 * share["lk"] + 4 * share["lv"])
    own = max(own_tokens * max(widths), exchanged)
    inputs = model.num_layers * model.per_layer_input.width if model.per_layer_input else 0
    return int(element_bytes * (own + own_tokens * (RESIDUAL_COPIES * model.hidden_size + inputs)))


def sampler_peak_bytes(version: VllmVersion, model: ModelSpec, num_tokens: int, num_seqs: int) -> int:
    """Bytes in flight while the profile run samples for every sequence, including the forward pass's output.

    Counts: S*V*(14, or 41 with a full sort) + 2*T*h; every rank gathers the whole vocabulary.
    Source: vLLM 0.32.0 gpu_model_runner.py `_dummy_sampler_run`.

    >>> from rlplan.memory.serving.versions import LATEST
    >>> from rlplan.spec.models.catalogue import find_model
    >>> sampler_peak_bytes(LATEST, find_model("meta-llama/Llama-3.1-8B"), 2048, 256)  # 256*128256*14 + 2*2048*4096
    476446720
    """
    per_entry = SORT_SAMPLER_BYTES if version.sorts_vocabulary else SAMPLER_BYTES
    if not version.profiles_sampler:
        per_entry = LOGIT_BYTES
    num_seqs = min(num_seqs, num_tokens)
    return num_seqs * model.vocab_size * per_entry + 2 * num_tokens * model.hidden_size


def count_graph_sizes(version: VllmVersion, num_seqs: int) -> int:
    """Number of batch sizes for which vLLM captures CUDA graphs.

    Counts: 1, 2, 4, then every 8th up to min(2S, 512) (67 in all; V0: up to S, 35 in all). From 0.11 on every 16th
    above 256, and full graphs for decoding in addition to piecewise ones. Source: vLLM 0.32.0 config/vllm.py
    `_set_cudagraph_sizes`; 0.8.4 and 0.6.4 config.py.

    >>> count_graph_sizes(VllmVersion(0, 9, 0), 256), count_graph_sizes(VllmVersion(0, 6, 4, is_v0=True), 256)
    (67, 35)
    >>> count_graph_sizes(VllmVersion(0, 32, 0), 256)  # 51 piecewise and 35 of whole decoding steps
    86
    """
    if version.is_v0:
        return _count_sizes(num_seqs)
    if (version.major, version.minor) < (0, 11):
        return _count_sizes(512)
    largest = min(2 * num_seqs, 512)
    return _count_sizes(min(largest, 256)) + max(0, largest - 256) // 16 + _count_full_sizes(num_seqs)


def _count_sizes(largest: int) -> int:
    return sum(size <= largest for size in (1, 2, 4)) + largest // 8


def _count_full_sizes(num_seqs: int) -> int:
    largest = min(num_seqs, 512)
    return _count_sizes(min(largest, 256)) + max(0, largest - 256) // 16


def cuda_graph_bytes(
    version: VllmVersion,
    num_layers: int,
    num_seqs: int,
    *,
    enforce_eager: bool = False,
    num_captures: int = 1,
) -> int:
    """Bytes of captured graphs of one rank, resident until the engine ends (sleep keeps them).

    Counts: 300 KiB for each layer of the rank, captured size and capture of that size (num_captures 2 where adapters
    are served, `VllmVersion.captures_with_adapters`). Assumes: tensor parallelism hardly changes the size.

    >>> round(cuda_graph_bytes(VllmVersion(0, 10, 0), 64, 256) / 2**30, 2)  # Qwen3-32B on two ranks: 1.30 in its log
    1.23
    """
    sizes = 0 if enforce_eager else count_graph_sizes(version, num_seqs)
    return num_captures * sizes * num_layers * LAYER_GRAPH_BYTES


def expert_workspace_bytes(model: ModelSpec, tp: int, num_tokens: int, element_bytes: int = 2, *, ep: int = 1) -> int:
    """Bytes of the workspaces of MoE kernels, which the profile run allocates and an awake engine never frees.

    Counts: e*T*k*(max(Ie/t, h) + max(2Ie/t, h)), with the output in the first of them; 0 without experts. In an awake
    engine they are part of `prefill_peak_bytes`. Sleep keeps them, because they are outside the pools that it frees.
    Source: vLLM 0.32.0 fused_moe/experts/triton_moe.py `workspace_shapes`, v1/worker/workspace.py.
    Validation: a sleeping OLMoE engine under AgileRL grows by 70.2 and 70.6 kB a token; this and `input_buffer_bytes`
    give 69.6.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> expert_workspace_bytes(find_model("allenai/OLMoE-1B-7B-0924"), 1, 1)  # 2 * 8 * (2048 + 2048)
    65536
    """
    if not model.experts:
        return 0
    width, hidden = compute_sizes(model, Layout(tp=tp, ep=ep, vocab_multiple=64)).share["Ie"], model.hidden_size
    return element_bytes * num_tokens * model.experts.num_active * (max(width, hidden) + max(2 * width, hidden))


def input_buffer_bytes(version: VllmVersion, model: ModelSpec, num_tokens: int, element_bytes: int = 2) -> int:
    """Bytes of the input embeddings that vLLM's Model Runner V1 allocates outside of its profile run.

    Counts: e*T*h, awake and asleep; 0 under Model Runner V2, which has none for text, and for images a buffer that is
    loaded with the weights. Source: vLLM 0.32.0 gpu_model_runner.py (`inputs_embeds`, allocated before the weights and
    never freed), gpu/mm/encoder_runner.py. Validation: sleeping engines of AgileRL. From 8,192 to 65,536 tokens
    Qwen2.5 1.5B and Gemma 4 grow by 170 to 200 MiB under 0.23, 168 by this; SmolLM2 under 0.23 and Gemma 4 under
    0.26, which run with V2, by 2 to 32.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> model = find_model("Qwen/Qwen2.5-0.5B")
    >>> input_buffer_bytes(VllmVersion(0, 23, 0), model, 131_072) >> 20  # 2 * 896 * 131,072
    224
    >>> input_buffer_bytes(VllmVersion(0, 26, 0), model, 131_072)
    0
    """
    return 0 if version.has_runner_v2(model) else element_bytes * num_tokens * model.hidden_size


def non_torch_bytes(version: VllmVersion, tp: int, context: int, communicator: int) -> int:
    """Bytes outside of torch that vLLM subtracts from its fraction of the GPU.

    Counts: V0: context, communicator and growth. V1: only growth, because its first snapshot comes after the others.
    Source: vLLM 0.6.5 worker.py; 0.32.0 gpu_worker.py `init_device`, utils/mem_utils.py `memory_profiling`.
    """
    fixed = (context + (communicator if tp > 1 else 0)) if version.counts_context else 0
    return fixed + NON_TORCH_GROWTH


def encoder_peak_bytes(model: ModelSpec, num_tokens: int) -> int:
    """Bytes in flight while the profile run encodes as many images as T tokens hold; 0 without a vision tower.

    Counts: 2 bytes a patch times (2w + 3v), w and v the tower's MLP and hidden width, and the pixels.
    Source: vLLM 0.32.0 gpu_model_runner.py `profile_run`, models/siglip.py, models/gemma4_mm.py (`_encoder_chunk`).
    Assumes: a text token replaces 4 patches, or 16 in SigLIP towers of 4,096 patches (Gemma 3). Gemma 4's images are
    encoded one by one, because vLLM cuts them into chunks that fit. AgileRL's generations have no images to compare.
    """
    if model.vision is None:
        return 0
    sizes = model.vision.sizes
    merged = 16 if sizes.get("n", 0) >= 4096 else 4
    pixels = sizes.get("p", 3 * sizes.get("s", 14) ** 2)
    patches = GEMMA_PATCHES if model.vision.tower == "gemma4" else num_tokens * merged
    return 2 * patches * (2 * sizes.get("w", 0) + 3 * sizes.get("v", 0) + pixels)
