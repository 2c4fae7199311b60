"""Models that are cut while they are built, beside the same models whole, in bf16: what both say of 2,000 tokens.

`main` is one rank, for several architectures: it gets a folder to work in and writes `answer.json` there.
"""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlplan.emit.execution import execution_spec
from rlplan.runtime.models.start_checkpoint import write_random_checkpoint
from rlplan.runtime.rollout.experience import SequencePair
from rlplan.runtime.workers.scorer import Scorer
from rlplan.runtime.workers.trainer.policy_trainer import PolicyTrainer
from tests.factories import EXAMPLES, make_plan
from tests.runtime.live.live_forks import answer

LENGTHS = (20, 200, 2000)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "rope_parameters": LLAMA3},
    "mistral": {"architectures": ["MistralForCausalLM"], "rope_theta": 10_000.0, "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1_000_000.0},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1_000_000.0},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "sliding_window": 64},
}
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 128,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.25,  # wide enough for what a token attends to, and so its place, to count
}
OVERRIDES: dict[str, Any] = {
    "training.zero_stage": 3,
    "training.dtype": "bfloat16",
    "placement.spreads_scoring": True,
    "workload.max_response_len": max(LENGTHS),
}

VARIANTS: dict[str, dict[str, Any]] = {
    "stage 0": {"training.zero_stage": 0},
    "stage 2": {"training.zero_stage": 2},
    "stage 3": {},
    "recomputed": {"training.zero_stage": 1, "training.gradient_checkpointing": True},
    "adapters": {"training.zero_stage": 2, "training.lora": {"rank": 4}},
    "nf4": {"training.zero_stage": 2, "training.lora": {"rank": 4}, "training.lora.base_dtype": "nf4"},
}
"""Variants of a model that was loaded whole; adapters begin at zero."""


class CutTrainer(PolicyTrainer):
    """Builds its model as on GPUs, where as many ranks as a host has would each load all of it."""

    _loads_sharded = True  # type: ignore[assignment]


def pairs(vocabulary: int = 60) -> list[SequencePair]:
    """A made-up sequence of each length."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]
    return [SequencePair(tuple(tokens[:4]), tuple(tokens[4:])) for tokens in drawn]


def start_checkpoint(name: str, folder: Path) -> Path:
    """A model of an architecture with random weights."""
    shape, out = folder / "shape", folder / "model"
    shape.mkdir(parents=True)
    for file in (EXAMPLES / "models" / "sorter").glob("token*"):
        (shape / file.name).write_bytes(file.read_bytes())
    (shape / "config.json").write_text(json.dumps({"model_type": name, **SIZES, **ARCHITECTURES[name]}))
    write_random_checkpoint(shape, out, seed=1)
    return out


def apart(scores: list[tuple[float, ...]], other: list[tuple[float, ...]]) -> list[float]:
    """The largest difference of each sequence."""
    return [max(abs(a - b) for a, b in zip(x, y, strict=True)) for x, y in zip(scores, other, strict=True)]


def buffers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, type) of each."""
    return ((name.rpartition(".")[2], str(buffer.dtype)) for name, buffer in model.named_buffers())


def compare(name: str, folder: Path, port: int) -> dict[str, Any]:
    """Differences of a sharded scorer, reward model and trainer from whole ones."""
    model = str(start_checkpoint(name, folder))
    frozen, trained = (
        make_plan(**OVERRIDES, **{"policy.path": model, "hardware.num_devices": count}) for count in (2, 1)
    )
    job, config = trained.job, execution_spec(frozen).deepspeed["reference"]
    answer: dict[str, Any] = {}
    for role in ("reference", "reward"):
        whole, share = Scorer("whole", job, role, 1), Scorer("share", job, role, 1)
        whole.start(model)
        share.start_share(0, 1, ("127.0.0.1", port), model, config)
        answer[role] = apart(whole.score(pairs(), role), share.score(pairs(), role))
        answer["buffers"] = [list(buffers(each.model)) for each in (whole, share)]
    trainer = CutTrainer("policy_trainer/0", job, execution_spec(trained).deepspeed["policy"], 1)
    trainer.start(0, 1, ("127.0.0.1", port), model)
    reference = Scorer("whole", job, "reference", 1)
    reference.start(model)
    expected = reference.score(pairs(), "reference")
    answer["trainer"] = apart(expected, trainer.score(pairs(), "policy"))
    trainer.stop()
    if name == "qwen3":
        answer["variants"] = {variant: loaded_whole(model, variant, port, expected) for variant in VARIANTS}
    return answer


def loaded_whole(model: str, variant: str, port: int, expected: list[tuple[float, ...]]) -> dict[str, Any]:
    """Differences of a trainer that has loaded the model as a CPU's ranks do."""
    plan = make_plan(**OVERRIDES | VARIANTS[variant] | {"policy.path": model, "hardware.num_devices": 1})
    trainer = PolicyTrainer("policy_trainer/0", plan.job, execution_spec(plan).deepspeed["policy"], 1)
    trainer.start(0, 1, ("127.0.0.1", port), model)
    answer = {
        "apart": apart(expected, trainer.score(pairs(), "policy")),
        "buffers": list(buffers(trainer.engine.module)),
    }
    trainer.stop()
    return answer


def main(path: str, names: list[str]) -> None:
    """Some architectures."""
    import deepspeed

    folder = Path(path)

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled on its first use, as workers know
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = {name: compare(name, folder / name, port) for name in names}
    answer(folder / "answer.json", answers)
