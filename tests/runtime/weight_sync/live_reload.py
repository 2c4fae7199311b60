"""vLLM's layerwise reload of two tables whose vocabulary is padded, fed from an arena that is written over.

`main` tries each way of keeping the tables whole and says what they hold afterwards; the tests read that.
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SENT, OVERWRITTEN = 1.0, 99.0


def main(path: str, vocabulary: int) -> None:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    from tests.runtime.live.live_forks import answer

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with torch.no_grad(), set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "env://", 0, "gloo")
        initialize_model_parallel(1, 1)
        answer(Path(path), {way: _reload(vocabulary, way) for way in ("vllm alone", "counted", "copied")})


def _reload(vocabulary: int, way: str) -> dict[str, Any]:
    """Load both tables and a bias, write the arena over, and end the reload."""
    import torch
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    from rlplan.runtime.weight_sync.engine_state import (
        copy_buffered,
        find_buffered_parameters,
        set_loaded_sizes,
    )

    width = 8
    model: Any = torch.nn.Sequential()
    model.embed = VocabParallelEmbedding(vocabulary, width, params_dtype=torch.float32)
    model.head = ParallelLMHead(vocabulary, width, params_dtype=torch.float32, bias=True)
    record_metadata_for_reloading(model)
    arena = torch.full(((2 * width + 1) * vocabulary,), SENT)
    if way == "counted":
        set_loaded_sizes(model)
    initialize_layerwise_reload(model)
    embed, head, bias = arena.split([width * vocabulary, width * vocabulary, vocabulary])
    for parameter, part in ((model.embed.weight, embed), (model.head.weight, head)):
        parameter.weight_loader(parameter, part.view(vocabulary, width))
    model.head.bias.weight_loader(model.head.bias, bias)
    buffered = find_buffered_parameters(model, {arena.untyped_storage().data_ptr()})
    copied_bytes = copy_buffered(model, arena) if way == "copied" else 0
    arena.fill_(OVERWRITTEN)
    finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))
    values = {name: sorted(set(tensor[:vocabulary].flatten().tolist())) for name, tensor in model.named_parameters()}
    return {"held": buffered, "copied_bytes": copied_bytes, "values": values}
