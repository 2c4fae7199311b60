"""A live DeepSpeed engine on CPU ranks, and the bytes that its tensors really take.

Run as a program it is one rank: it builds the engine that the JSON argument describes, trains one step and prints, for
three moments, the bytes of every owner of tensors. `measure` starts the ranks and gives their answers.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120
VOCABULARY = 96


def measure(settings: Mapping[str, Any]) -> list[dict[str, dict[str, int]]]:
    """For each rank: moment (`built`, `accumulated`, `stepped`) to owner to bytes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(settings["num_ranks"]):
        environment = dict(
            os.environ,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(settings["num_ranks"]),
            LOCAL_SIZE=str(settings["num_ranks"]),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
            PYTHONPATH=str(ROOT),
        )
        command = [sys.executable, __file__, json.dumps(dict(settings))]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    answers = []
    for process in ranks:
        out, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, errors.decode()[-3000:]
        answers.append(json.loads(out.decode().strip().splitlines()[-1]))
    return answers


def main() -> None:
    """One rank."""
    settings = json.loads(sys.argv[1])
    import deepspeed
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = build_model(settings)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=settings["config"])
    moments = {"built": owners(engine, settings["config"])}
    tokens = torch.arange(8).reshape(1, 8) + 1
    for _ in range(settings["config"]["gradient_accumulation_steps"]):
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        if "accumulated" not in moments:
            moments["accumulated"] = owners(engine, settings["config"])
        engine.step()
    moments["stepped"] = owners(engine, settings["config"])
    print(json.dumps(moments), flush=True)


def build_model(settings: Mapping[str, Any]) -> Any:
    """The Hugging Face model, wrapped by PEFT where `lora_rank` is given."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**settings["model"])
    torch.set_default_dtype(torch.bfloat16 if settings["config"].get("bf16") else torch.float32)
    model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith(tuple(settings.get("trainable", [""])))
    return model


def owners(engine: Any, config: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by owner; `all` is every distinct storage that Python can reach, so that nothing is forgotten."""
    import gc

    import torch

    gc.collect()
    zero, inner = engine.optimizer, getattr(engine.optimizer, "optimizer", engine.optimizer)
    states = [value for state in inner.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    everything = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    parameters = list(engine.module.parameters())
    partitions = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
    rows = {
        "parameters": storage_bytes([parameter.data for parameter in parameters]),
        "partitions": storage_bytes(partitions),
        "states": storage_bytes(states),
        "gradients": storage_bytes(p.grad for p in parameters if p.grad is not None),
        "all": storage_bytes([*everything, *(p.grad for p in parameters if p.grad is not None)]),
        "python": sum(1 for _ in everything),
    }
    for name, value in vars(zero).items():
        size = storage_bytes(tensors_in(value))
        if size:
            rows[f"zero.{name}"] = size
    return rows


def tensors_in(value: Any, depth: int = 0) -> list[Any]:
    """Tensors inside lists, tuples, dictionaries and buckets."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if depth > 4:
        return []
    if isinstance(value, Mapping):
        value = list(value.values())
    elif type(value).__name__.startswith("IPGBucket"):
        value = value.buffer if isinstance(value.buffer, list) else [value.buffer]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item, depth + 1)]
    return []


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the distinct storages behind tensors."""
    sizes = {}
    for tensor in tensors:
        if tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            if storage.nbytes():
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


if __name__ == "__main__":
    main()
