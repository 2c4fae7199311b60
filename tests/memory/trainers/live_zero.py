"""Live DeepSpeed engines on CPU ranks, and the bytes that their tensors really take.

A rank builds the engine of each case, trains one step and gives, for three moments, the bytes of every owner of
tensors. `measure` starts the ranks, once for all cases.
"""

import socket
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlplan.runtime.processes.machine_speed import scale_seconds
from tests.runtime.live.live_forks import answer, read_answers, start

DEADLINE_S = 300
SETTLE_S = 0.05
"""How long gloo's thread may hold a bucket after the answer to it; scaled."""


def measure(num_ranks: int, cases: Mapping[str, Any]) -> dict[str, list[dict[str, dict[str, int]]]]:
    """Bytes by owner at each moment (`built`, `accumulated`, `stepped`), for each case and rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"WORLD_SIZE": num_ranks, "LOCAL_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{rank}.json" for rank in range(num_ranks)]
        ranks = []
        for rank, path in enumerate(paths):
            place = {name: str(value) for name, value in {**group, "RANK": rank, "LOCAL_RANK": rank}.items()}
            target, log = "tests.memory.trainers.live_zero:main", path.with_suffix(".log")
            ranks.append(start(target, dict(cases), str(path), log=log, environment=place))
        try:
            answers = read_answers(ranks, paths, DEADLINE_S)
        finally:
            for process in ranks:
                process.close()
    return {name: [answer[name] for answer in answers] for name in cases}


def main(cases: Mapping[str, Any], path: str) -> None:
    """One rank. path: of its answers."""
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    answers = {name: run(case) for name, case in cases.items()}
    torch.distributed.barrier()  # a rank that answers may be ended
    answer(Path(path), answers)


def run(case: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """One case, from the model to the end of its first step."""
    import deepspeed
    import torch

    earlier = {storage.data_ptr(): storage for storage in map(torch.Tensor.untyped_storage, reachable())}
    model = build_model(case)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=case["config"])
    moments = {"built": owners(engine, earlier)}
    tokens = torch.arange(8).reshape(1, 8) + 1
    for _ in range(case["config"]["gradient_accumulation_steps"]):
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        if "accumulated" not in moments:
            moments["accumulated"] = owners(engine, earlier)
        engine.step()
    moments["stepped"] = owners(engine, earlier)
    engine.destroy()
    return moments


def build_model(case: Mapping[str, Any]) -> Any:
    """The Hugging Face model, all of it trained, or adapters beside its linear layers, or parameters of some names."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**case["model"])
    torch.set_default_dtype(torch.bfloat16 if case["config"].get("bf16") else torch.float32)
    model = AutoModelForCausalLM.from_config(config).train()
    if case.get("lora_rank"):
        add_adapters(model, case["lora_rank"])
    torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith(tuple(case.get("trainable", [""])))
    return model


def add_adapters(model: Any, rank: int) -> None:
    """LoRA as PEFT has it: two matrices inside every linear layer but the head, whose product is added."""
    import torch

    def add(layer: Any, inputs: Any, output: Any) -> Any:
        return output + layer.lora_B(layer.lora_A(inputs[0]))

    for module in list(model.modules()):
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            module.lora_A = torch.nn.Linear(module.in_features, rank, bias=False)
            module.lora_B = torch.nn.Linear(rank, module.out_features, bias=False)
            module.register_forward_hook(add)


def reachable() -> list[Any]:
    """Every tensor that Python can reach."""
    import gc

    import torch

    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]


def owners(engine: Any, earlier: Mapping[int, Any]) -> dict[str, int]:
    """Bytes by owner; `all` is every distinct storage that Python can reach, so that nothing is forgotten.

    earlier: storages that were reachable before the engine was built, which are held so that no address is used again.
    """
    import torch

    torch.distributed.barrier()  # a bucket on its way is held by whoever sends it
    time.sleep(scale_seconds(SETTLE_S))
    everything = reachable()
    zero, inner = engine.optimizer, getattr(engine.optimizer, "optimizer", engine.optimizer)
    states = [value for state in inner.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    parameters = list(engine.module.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    partitions = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
    rows = {
        "parameters": storage_bytes([parameter.data for parameter in parameters]),
        "partitions": storage_bytes(partitions),
        "states": storage_bytes(states),
        "gradients": storage_bytes(gradients),
        "all": storage_bytes([*everything, *gradients], earlier),
    }
    for name, value in vars(zero).items():
        size = storage_bytes(find_tensors(value))
        if size:
            rows[f"zero.{name}"] = size
    return rows


def find_tensors(value: Any, depth: int = 0) -> list[Any]:
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
        return [tensor for item in value for tensor in find_tensors(item, depth + 1)]
    return []


def storage_bytes(tensors: Iterable[Any], without: Mapping[int, Any] | None = None) -> int:
    """Bytes of the distinct storages behind tensors."""
    sizes = {}
    for tensor in tensors:
        if tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            if storage.nbytes():
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(size for address, size in sizes.items() if address not in (without or {}))
