"""The sorter in 4 bits without values: names and shapes as AutoAWQ, GPTQModel and compressed-tensors write them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rlplan.spec.model import load_model
from tests.factories import EXAMPLES
from tests.runtime.live.four_bits import GROUP, make_quantization

SORTER = EXAMPLES / "models" / "sorter"


def packed_base(folder: Path, method: str = "awq", quantization: dict[str, Any] | None = None, **config: Any) -> Path:
    """A folder of the policy of `make_job` in 4 bits. quantization, config: what differs in its config.json."""
    folder.mkdir(parents=True)
    config_json = json.loads((SORTER / "config.json").read_text("utf-8"))
    config_json |= config | {"quantization_config": make_quantization(method) | (quantization or {})}
    (folder / "config.json").write_text(json.dumps(config_json), encoding="utf-8")
    tensors: dict[str, Any] = {}
    for parameter in load_model(SORTER).parameters:
        if not parameter.name.endswith("proj.weight"):
            tensors[parameter.name] = np.zeros(parameter.shape, np.float16)
            continue
        stem, (rows, columns) = parameter.name.removesuffix("weight"), parameter.shape
        tensors |= {stem + key: array for key, array in _arrays(method, rows, columns).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def _arrays(method: str, rows: int, columns: int) -> dict[str, Any]:
    groups = columns // GROUP
    if method == "compressed-tensors":
        return {
            "weight_packed": np.zeros((rows, columns // 8), np.int32),
            "weight_scale": np.zeros((rows, groups), np.float16),
            "weight_shape": np.zeros(2, np.int64),
        }
    shape = (columns, rows // 8) if method == "awq" else (columns // 8, rows)
    arrays = {"qweight": np.zeros(shape, np.int32), "qzeros": np.zeros((groups, rows // 8), np.int32)}
    arrays["scales"] = np.zeros((groups, rows), np.float16)
    return arrays | ({"g_idx": np.zeros(columns, np.int32)} if method == "gptq" else {})
