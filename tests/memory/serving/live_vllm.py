"""Live vLLM engines on CPU ranks, and the bytes that their tensors really take.

`main` is one rank: for each case it builds a whole engine with random weights, notes what it holds, and shuts it down.
An engine takes two seconds.
"""

import gc
import json
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.runtime.live.live_forks import SERVING, answer, read_answers, start

DEADLINE_S = 240
ANSWERS = "answers.json"


def measure(cases: Sequence[Mapping[str, Any]], tp: int) -> list[list[dict[str, Any]]]:
    """Bytes of each rank in each case: see `hold`. A case: `config`, `dtype`, `block_size`, `kv_bytes`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"WORLD_SIZE": tp, "LOCAL_WORLD_SIZE": tp, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, str(rank)) for rank in range(tp)]
        ranks = []
        for rank, place in enumerate(places):
            place.mkdir()
            environment = {name: str(value) for name, value in {**group, "RANK": rank, "LOCAL_RANK": rank}.items()}
            target, log = "tests.memory.serving.live_vllm:main", place / "log"
            arguments = (list(cases), tp, str(place))
            ranks.append(start(target, *arguments, log=log, environment=environment, libraries=SERVING))
        try:
            return read_answers(ranks, [place / ANSWERS for place in places], DEADLINE_S)
        finally:
            for process in ranks:
                process.close()


def main(cases: Sequence[Mapping[str, Any]], tp: int, path: str) -> None:
    """One rank. path: of a folder to work in."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry

    # vLLM imports each new model class in a process of its own first, eight seconds each, so as not to touch CUDA.
    registry._run_in_subprocess = lambda inspect: inspect()
    # It also collects garbage nine times an engine, a third of a second each: once is enough.
    collect, gc.collect = gc.collect, lambda generation=2: 0
    folder, store, answers = Path(path), opened_store(tp), []
    for number, case in enumerate(cases):
        answers.append(hold(case, tp, folder / str(number), store))
        cleanup_dist_env_and_memory()
        collect()
    answer(folder / ANSWERS, answers)


def opened_store(tp: int) -> Any:
    """Where the ranks meet in every case. One for all: a rank that is early would meet the others in the last one's."""
    from torch.distributed import TCPStore

    if tp == 1:
        return None
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), tp, is_master=os.environ["RANK"] == "0")


def hold(case: Mapping[str, Any], tp: int, folder: Path, store: Any) -> dict[str, Any]:
    """Build a case's engine, list its rows, shut it down."""
    from vllm import LLM

    from rlplan.runtime.measure import memory_meter
    from rlplan.runtime.workers.engine.weight_packing import watch_weight_packing

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(case["config"]), encoding="ascii")
    parameters: list[tuple[str, list[int], int]] = []
    with met(tp, folder.name, store), watch_parameters(parameters), watch_weight_packing() as packing:
        llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype={"fp32": "float32", "bf16": "bfloat16"}[case["dtype"]],
            max_model_len=128,
            max_num_seqs=2,
            max_num_batched_tokens=128,
            block_size=case["block_size"],
            kv_cache_memory_bytes=case["kv_bytes"],
            tensor_parallel_size=tp,
            distributed_executor_backend="external_launcher" if tp > 1 else "uni",
            **latent_attention(case["config"]),
        )
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    cache = llm.llm_engine.vllm_config.cache_config
    answer = {
        "parameters": parameters,
        "buffers": [(name, buffer.nbytes) for name, buffer in runner.model.named_buffers()],
        "kept": packing.kept_bytes,
        "packed": packing.packed_bytes,
        "num_blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
        "kv_cache": memory_meter.storage_bytes(runner.kv_caches),
        "unnamed": unnamed_bytes(runner.model, runner.kv_caches),
        "has_tiles": has_tiles(),
        "packs_bf16": packs_bf16(),
    }
    core.shutdown()
    return answer


def met(tp: int, case: str, store: Any) -> Any:
    """Ranks that have met, and inside the block shared memory that no other engine of this host has the name of."""
    from contextlib import nullcontext

    import torch.distributed as dist

    from rlplan.runtime.workers.engine.lock_step import name_memory_by_port

    if tp == 1:
        return nullcontext()
    dist.init_process_group("gloo", store=dist.PrefixStore(case, store), rank=int(os.environ["RANK"]), world_size=tp)
    # A name for each case: shared memory of the one before may be let go late.
    return name_memory_by_port(int(os.environ["MASTER_PORT"] + case))


def latent_attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same on every CPU: left to itself vLLM takes one for tiles where there are any, and that has no fp32."""
    return {"attention_backend": "CPU_MLA"} if "kv_lora_rank" in config else {}


def watch_parameters(rows: list[tuple[str, list[int], int]]) -> Any:
    """Inside the `with` block, list name, shape and element size of what a model has loaded, before it is packed."""
    from contextlib import contextmanager

    from vllm.model_executor.model_loader import base_loader

    @contextmanager
    def watching() -> Any:
        original = base_loader.process_weights_after_loading

        def list_tensors(model: Any, *arguments: Any, **keywords: Any) -> Any:
            rows.extend((name, list(p.shape), p.element_size()) for name, p in model.named_parameters())
            return original(model, *arguments, **keywords)

        base_loader.process_weights_after_loading = list_tensors
        try:
            yield
        finally:
            base_loader.process_weights_after_loading = original

    return watching()


def unnamed_bytes(model: Any, caches: Sequence[Any]) -> int:
    """Bytes of tensors that hang on the model's modules and are no parameters, buffers or KV cache."""
    import torch

    from rlplan.runtime.measure import memory_meter

    owned = [*model.parameters(), *model.buffers(), *caches]
    known = {tensor.untyped_storage().data_ptr() for tensor in owned}
    values = (value for module in model.modules() for value in vars(module).values())
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return memory_meter.storage_bytes(t for t in tensors if t.untyped_storage().data_ptr() not in known)


def packs_bf16() -> bool:
    """Whether oneDNN packs bf16 weights on this CPU: without AVX-512 vLLM multiplies with torch and keeps them."""
    import torch

    return bool(torch.cpu._is_avx512_supported())


def has_tiles() -> bool:
    """Whether this CPU multiplies bf16 in tiles (AMX): vLLM then packs small weights otherwise."""
    import torch

    return bool(torch.cpu._is_amx_tile_supported())
