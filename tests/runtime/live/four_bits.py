"""Checkpoints in 4 bits, packed here: rounded to nearest, as vLLM reads AWQ, GPTQ and compressed-tensors.

In: a folder with a model. Out: a folder with the same model in 4 bits; the model that those bits stand for, to compare
engines with. No calibration: these are the layouts, and the worst rounding that they have.
"""

import json
import shutil
from pathlib import Path
from typing import Any

METHODS = ("awq", "gptq", "compressed-tensors")
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index of the neighbour in each nibble of an int32, the lowest nibble first (AutoAWQ's `pack_intweight`)."""


def quantize(folder: Path, out: Path, method: str) -> Any:
    """Write a folder's model in 4 bits. Returns: the model in fp32 with the weights that these stand for."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tensors: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight"):
            stored, values = pack(parameter.data, method)
            tensors |= {name.removesuffix("weight") + key: tensor.contiguous() for key, tensor in stored.items()}
        else:
            values = parameter.data.to(torch.bfloat16).float()
            tensors[name] = values.to(torch.bfloat16)
        parameter.data.copy_(values)
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text("utf-8"))
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": make_quantization(method)}), "utf-8")
    return model


def make_quantization(method: str) -> dict[str, Any]:
    """The quantization section of a checkpoint's config.json."""
    if method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    if method == "gptq":
        return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    return {
        "quant_method": method,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def pack(weight: Any, method: str) -> tuple[dict[str, Any], Any]:
    """(the tensors of one matrix by the ends of their names, the values that they stand for)."""
    import torch

    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // GROUP, GROUP)
    if method == "awq":
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / 15).to(torch.bfloat16)
        zeros = (-low / scales.float()).round().clamp(0, 15)
    else:
        scales = (groups.abs().amax(-1) / 7).to(torch.bfloat16)
        zeros = torch.full_like(scales, 8.0).float()
    steps = scales.float()[..., None]
    levels = (groups / steps + zeros[..., None]).round().clamp(0, 15)
    values = ((levels - zeros[..., None]) * steps).reshape(rows, columns)
    levels = levels.reshape(rows, columns)
    if method == "awq":
        stored = {"qweight": _words(_as_awq(levels.T)), "qzeros": _words(_as_awq(zeros.T)), "scales": scales.T}
    elif method == "gptq":  # zero points are stored less one
        stored = {"qweight": _words(levels).T, "qzeros": _words(zeros.T - 1), "scales": scales.T}
        stored["g_idx"] = (torch.arange(columns) // GROUP).to(torch.int32)
    else:
        shape = torch.tensor([rows, columns])
        stored = {"weight_packed": _words(levels), "weight_scale": scales, "weight_shape": shape}
    return stored, values


def _as_awq(levels: Any) -> Any:
    return levels.reshape(levels.shape[0], -1, 8)[:, :, AWQ_ORDER].reshape(levels.shape)


def _words(levels: Any) -> Any:
    """Eight neighbours of a row in each int32, the first lowest."""
    import torch

    eights = levels.to(torch.int64).reshape(levels.shape[0], -1, 8)
    words = sum(eights[..., index] << (4 * index) for index in range(8))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
