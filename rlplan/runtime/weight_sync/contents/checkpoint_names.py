"""Checkpoint names of weights, for model families where transformers' modules use other names.

In: a weight of a module (transformers 5 stacks a layer's experts in one tensor). Out: its names and views in a
checkpoint of the family, which vLLM's loaders expect: one matrix per expert. Left out: families with equal names.
Source: transformers 5.19, conversion_mapping.py, inverted.
"""

from collections.abc import Iterable, Iterator
from typing import Any

BY_NUMBER = ("w1", "w3", "w2")
"""Gate, up and down projection of an expert, in Mixtral's checkpoints."""
BY_WORD = ("gate_proj", "up_proj", "down_proj")

RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "MixtralForCausalLM": ((".mlp.", ".block_sparse_moe."),),
    "MiniMaxM2ForCausalLM": ((".mlp.", ".block_sparse_moe."),),
    "PhimoeForCausalLM": ((".mlp.router.", ".block_sparse_moe.gate."), (".mlp.", ".block_sparse_moe.")),
    "PhiMoEForCausalLM": ((".mlp.router.", ".block_sparse_moe.gate."), (".mlp.", ".block_sparse_moe.")),
    "GraniteMoeForCausalLM": (
        ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
        ("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear.weight"),
        ("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"),
    ),
}
"""Parts of names to replace for each family's checkpoints, in order."""

STACKED = frozenset({"GptOssForCausalLM", "GraniteMoeForCausalLM"})
"""Families whose checkpoints stack experts as the modules do."""


def rename_for_checkpoint(architecture: str, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) as in checkpoints. A stacked tensor is split into views.

    architecture: a scalar model counts as its family's causal language model, which has the same decoder.
    """
    architecture = architecture.replace("ForSequenceClassification", "ForCausalLM")
    renamed = RENAMED.get(architecture, ())
    words = BY_NUMBER if renamed else BY_WORD
    for name, tensor in weights:
        for ours, theirs in renamed:
            name = name.replace(ours, theirs)
        stem, _, kind = name.rpartition(".experts.")
        if architecture in STACKED or not stem or kind not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        for number, expert in enumerate(tensor):
            parts = expert.chunk(2) if kind == "gate_up_proj" else (expert,)
            for word, part in zip(words[:2] if len(parts) == 2 else words[2:], parts, strict=True):
                yield f"{stem}.experts.{number}.{word}.weight", part
