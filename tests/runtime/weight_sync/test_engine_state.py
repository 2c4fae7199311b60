"""An engine computes with the trainer's weights: what vLLM keeps of packets is not overwritten, and it is compared.

The vocabulary of 74 is padded to 128 and the packets wrap around the arena, as with most tables that are no multiple of
64. What counts are the trainer's log-probs of what the engine samples, and the engine's own parameters.
"""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlplan.errors import RunError
from tests.factories import EXAMPLES
from tests.runtime.runs.architectures import make_config
from tests.runtime.weight_sync.live_sync import Setup

pytestmark = pytest.mark.engine
CALLER = str(EXAMPLES / "models" / "caller")
BUCKET = 200_000
"""Bytes: the table's packet is overwritten by those of the decoder layers."""
ROUNDING = 1e-4
"""Between vLLM and transformers in fp32."""


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    live = Setup(tmp_path_factory.mktemp("sync"), CALLER, 1, **{"placement.sync_bucket": BUCKET})
    try:
        yield live
    finally:
        live.worker_group.close()


def test_a_padded_table_holds_the_trainers_rows_when_packets_wrap_around_the_arena(setup: Setup) -> None:
    case = setup.case(0, "shared_memory", "full", 1)
    case.sync()
    assert "hold the trainer's weights" in case.weight_sync.verified
    assert case.difference() < ROUNDING
    case.train()
    assert case.difference() > ROUNDING
    case.sync()
    assert case.difference() < ROUNDING


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("transport", "content"), [("gloo", "full"), ("disk", "full"), ("shared_memory", "delta")])
def test_padded_tables_arrive_over_every_transport(setup: Setup, transport: str, content: str, tp: int) -> None:
    case = setup.case(0, transport, content, tp)
    for _ in range(2):
        case.sync()
        assert case.difference() < ROUNDING
        case.train()
    assert case.weight_sync.num_resends == 0


VARIANTS = {
    "untied heads": ("Qwen3ForCausalLM", {"tie_word_embeddings": False}),
    "experts, named one by one": ("Qwen3MoeForCausalLM", {"tie_word_embeddings": False}),
    "stacked experts": ("GraniteMoeForCausalLM", {"tie_word_embeddings": True}),
    "latent attention": ("DeepseekV3ForCausalLM", {"tie_word_embeddings": False}),
    "biases": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
}


def write_variant(variant: str, folder: Path) -> str:
    """A model with random weights and 74 words, beside the caller's tokenizer."""
    import transformers

    architecture, more = VARIANTS[variant]
    config = getattr(transformers, architecture).config_class(**make_config(architecture) | {"vocab_size": 74} | more)
    torch.manual_seed(1)
    getattr(transformers, architecture)._from_config(config, dtype=torch.float32).save_pretrained(folder)
    for file in Path(CALLER).glob("*token*"):
        shutil.copyfile(file, folder / file.name)
    return str(folder)


@pytest.mark.nightly
@pytest.mark.parametrize("variant", VARIANTS)
def test_engines_hold_the_trainers_weights_whatever_vllm_makes_of_them(variant: str, tmp_path: Path) -> None:
    """Fused, stacked, sharded over two ranks: the first sync compares them, and the log-probs agree."""
    live = Setup(tmp_path, write_variant(variant, tmp_path / "model"), 1, **{"placement.sync_bucket": BUCKET})
    try:
        for tp in (1,) if variant == "latent attention" else (1, 2):
            case = live.case(0, "shared_memory", "full", tp)
            case.sync()
            assert "hold the trainer's weights" in case.weight_sync.verified
            assert case.difference() < ROUNDING
            case.train()
            case.sync()
            assert case.difference() < ROUNDING
    finally:
        live.worker_group.close()


@pytest.mark.nightly
def test_merged_adapters_reach_padded_tables_and_are_compared(tmp_path: Path) -> None:
    """The trainer merges them into what it sends; the engine has whole weights."""
    more = {"placement.sync_bucket": BUCKET, "training.lora": {"rank": 4}}
    live = Setup(tmp_path, CALLER, 1, **more)
    try:
        case = live.case(0, "shared_memory", "full", 1)
        for _ in range(2):
            case.sync()
            assert "hold the trainer's weights" in case.weight_sync.verified
            assert case.difference() < ROUNDING
            case.train()
    finally:
        live.worker_group.close()


def change_a_byte(name: str, engine: Any) -> None:
    """Changes an element of a parameter after it was loaded; runs in the engine's process."""
    engine._vllm_worker.model_runner.model.get_parameter(name).data.view(torch.uint8).view(-1)[7] ^= 1


def pack_another_matrix(name: str, engine: Any) -> None:
    """Replaces a packed matrix, whose memory is oneDNN's, by a pack of the same matrix with one element changed."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = engine._vllm_worker.model_runner.model.get_submodule(name)
    matrix = layer.cpu_linear(torch.eye(64), layer.weight, None).T.contiguous()
    matrix[3, 5] *= 1.001
    layer.weight = torch.nn.Parameter(matrix, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)


DAMAGES = [
    (change_a_byte, "model.embed_tokens.weight", "model.embed_tokens.weight"),
    (change_a_byte, "model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
    (pack_another_matrix, "model.layers.1.self_attn.qkv_proj", r"model.layers.1.self_attn.qkv_proj.weight \(packed\)"),
]


@pytest.mark.parametrize(("damage", "name", "expected"), DAMAGES)
def test_what_changes_in_an_engine_after_loading_is_noticed_by_name(
    damage: Callable[[str, Any], None], name: str, expected: str, setup: Setup
) -> None:
    case = setup.case(0, "shared_memory", "full", 1)
    case.sync()
    case.worker_group.apply(case.engines[0], partial(damage, name))
    with pytest.raises(RunError, match=f"1 of its [0-9]+ parameters differ after loading: {expected}\n"):
        case.weight_sync._verify(case.action.processes)
    assert case.difference() < ROUNDING  # the second loading has put it right
