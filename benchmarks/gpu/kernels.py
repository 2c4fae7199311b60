"""The trainer's own kernels against plain fp32: attention over packed sequences, log-probs from the head, a whole step.

In: a case and a device. Out: the largest difference from fp32, bytes and rates, by name. On a GPU these are the code
paths that had never run there: `torch.nn.attention.varlen`, `HeadLogprobs` in 16 bits, checksums on the device.
Left out: DeepSpeed (training.py), more than one GPU.
"""

import time
from typing import Any

import torch
from torch.nn import functional

from benchmarks.gpu.cases import Case
from benchmarks.gpu.device import finish, time_action
from benchmarks.gpu.meters import make_meter
from benchmarks.gpu.training import LEARNING_RATE, language_model, random_tokens
from rlplan.memory.model.logits import ROWS_ON_GPU
from rlplan.runtime.models.logprob_model import HeadLogprobs, LogprobModel, TokenBatch
from rlplan.runtime.models.packed_attention import PACKED, packed_attention, register_packed_attention
from rlplan.runtime.weight_sync.checksums import Checksums
from rlplan.units import GIB, MIB

LARGEST_ERROR = 0.03
"""Norm of the difference from fp32 over the norm in fp32. bf16 keeps 8 bits: products of it differ by about 0.4 %."""
NUM_STEPS = 3
"""Timed steps of the trainer, after two that warm up."""


def measure_attention(case: Case, device: torch.device, used_before: int | None) -> dict[str, float]:
    """Packed attention in bf16, both passes, against torch's fp32 attention of one sequence after the other.

    Raises: RuntimeError where output or gradients differ by more than LARGEST_ERROR.
    """
    heads, groups, width = (4, 2, 8) if case.is_tiny else (12, 2, 128)
    lens = (5, 5, 9, 1) if case.is_tiny else (case.num_tokens // 2, case.num_tokens // 4, case.num_tokens // 4)
    shapes = [(1, number, sum(lens), width) for number in (heads, groups, groups)]
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    weights = torch.randn(1, sum(lens), heads, width, device=device, dtype=torch.bfloat16)
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]

    def attend() -> list[torch.Tensor]:
        output, _ = packed_attention(torch.nn.Identity(), *inputs, None, sequence_lens=lens)
        return [output, *torch.autograd.grad(output, inputs, weights)]

    parts, first = [], 0
    for length in lens:
        q, k, v = (tensor[:, :, first : first + length] for tensor in exact)
        k, v = (tensor.repeat_interleave(heads // groups, 1) for tensor in (k, v))
        parts.append(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2))
        first += length
    output = torch.cat(parts, 1)
    expected = [output, *torch.autograd.grad(output, exact, weights.float())]
    measured = _compare(("output", "query", "key", "value"), attend(), expected)
    seconds = time_action(attend, device)
    # Two products of a causal triangle forward, five backward: 7 x 2 x width x T^2 / 2 for each head.
    flops = 7 * width * heads * sum(length * length for length in lens)
    return measured | {"attention_s": seconds, "attention_flops_per_s": flops / seconds}


def measure_head(case: Case, device: torch.device, used_before: int | None) -> dict[str, float]:
    """`HeadLogprobs` in bf16, both passes, against log softmax of fp32 logits.

    Raises: RuntimeError where log-probs or gradients differ by more than LARGEST_ERROR.
    """
    num_rows, hidden_size, vocab_size = (40, 32, 256) if case.is_tiny else (case.num_tokens, 1536, 151_936)
    hidden = torch.randn(num_rows, hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
    head = (torch.randn(vocab_size, hidden_size, device=device) / hidden_size**0.5).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab_size, (num_rows,), device=device)
    weights = torch.randn(num_rows, device=device)

    def compute() -> list[torch.Tensor]:
        logprobs, *_ = HeadLogprobs.apply(hidden, head, targets, 1.0, "seen", ROWS_ON_GPU, None)
        return [logprobs, *torch.autograd.grad(logprobs, (hidden, head), weights)]

    exact = [tensor.detach().float().requires_grad_() for tensor in (hidden, head)]
    logprobs = -functional.cross_entropy(exact[0] @ exact[1].T, targets, reduction="none")
    expected = [logprobs, *torch.autograd.grad(logprobs, exact, weights)]
    measured = _compare(("logprobs", "hidden", "head"), compute(), expected)
    del exact, logprobs, expected
    meter = make_meter(device, used_before)
    with meter:
        resident = meter.resident()
        compute()
        peak = meter.peaks()["allocated_bytes"]
    return measured | {"head_s": time_action(compute, device), "head_added_bytes": peak - resident}


def measure_packed_step(case: Case, device: torch.device, used_before: int | None) -> dict[str, float]:
    """Optimizer steps of the trainer's model on packed sequences, with recomputation, under plain AdamW in bf16."""
    register_packed_attention()
    model = language_model(case, device, attention=PACKED)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    wrapped = LogprobModel(model, 1.0, entropies="seen")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=True)
    batch = _pack(random_tokens(case, device))

    def step() -> None:
        logprobs, _ = wrapped(batch)
        (-logprobs.mean()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    meter = make_meter(device, used_before)
    with meter:
        step()
        measured = meter.peaks()
        measured["resident_bytes"] = meter.resident()
    finish(device)
    started = time.perf_counter()
    for _ in range(NUM_STEPS):
        step()
    finish(device)
    seconds = (time.perf_counter() - started) / NUM_STEPS
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    # 6 FLOPs a parameter and token (Kaplan et al. 2020), without attention and without the recomputed pass.
    flops = 6 * num_parameters * case.num_tokens
    return measured | {
        "step_s": seconds,
        "tokens_per_s": case.num_tokens / seconds,
        "model_flops_per_s": flops / seconds,
    }


def measure_checksums(case: Case, device: torch.device, used_before: int | None) -> dict[str, float]:
    """Rate of the weight sync's checksums, and whether the device computes what the host does.

    Raises: RuntimeError where the checksums of the same tensor differ.
    """
    tensor = torch.randn((MIB if case.is_tiny else GIB) // 2, device=device).bfloat16()
    checksums = Checksums(torch.bfloat16)
    seconds = time_action(lambda: checksums.compute(tensor), device)
    if checksums.compute(tensor) != Checksums(torch.bfloat16).compute(tensor.cpu()):
        raise RuntimeError("the device's checksum is not the host's")
    return {"checksum_bytes_per_s": tensor.numel() * tensor.element_size() / seconds}


def _pack(tokens: torch.Tensor) -> TokenBatch:
    """Four sequences in one row [1, tokens]; of each the first quarter is its prompt."""
    total = tokens.shape[-1]
    lens = (total // 2, total // 4, total // 8, total - total // 2 - total // 4 - total // 8)
    positions, places, first = [], [], 0
    for length in lens:
        positions += list(range(first + length // 4 - 1, first + length - 1))
        places += list(range(length))
        first += length
    chosen = torch.tensor(positions, device=tokens.device)
    lengths = tuple(length - length // 4 for length in lens)
    place_ids = torch.tensor([places], device=tokens.device)
    return TokenBatch(tokens, place_ids, lens, chosen, tokens.reshape(-1)[chosen + 1], lengths)


def _compare(names: tuple[str, ...], results: list[Any], expected: list[Any]) -> dict[str, float]:
    """Relative difference of each tensor. Raises: RuntimeError above LARGEST_ERROR."""
    measured = {}
    for name, tensor, exact in zip(names, results, expected, strict=True):
        measured[f"{name}_difference"] = float((tensor.float() - exact).norm() / exact.norm())
    worst = max(measured, key=lambda name: measured[name])
    if not measured[worst] <= LARGEST_ERROR:  # also where it is not a number
        raise RuntimeError(f"{worst} from fp32 is {measured[worst]:.3g}, more than {LARGEST_ERROR}")
    return measured
