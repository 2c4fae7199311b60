"""Cases: everything that is measured, part by part.

In: nothing, or that it should be tiny. Out: frozen cases in the order in which they run: each part begins with those
that differ most, so that a part which is cut off still says something of everything.
Left out: how a case is measured (training.py, device.py, serving.py) and predicted (predict.py).
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from rlplan.spec.models.catalogue import load_catalogue

TRAINED = {
    "train-0.5b": "Qwen/Qwen2.5-0.5B",
    "train-1.5b": "Qwen/Qwen2.5-1.5B",
    "train-3b": "Qwen/Qwen2.5-3B",
    "train-7b": "Qwen/Qwen2.5-7B",
    "train-8b": "meta-llama/Llama-3.1-8B",
}
TEN_MINUTES = ("torch", "vllm", "steps")
"""Parts of the first ten minutes on a GPU, each one call: what needs torch alone, then vLLM, then everything."""
PARTS = ("device", *TRAINED, "zero", "logprob", "serving")
LOSSES = ("plain", "chunked", "in_place")
TOKENS = (2048, 8192, 32_768)
TINY_TOKENS = 1024
LORA_RANK = 16
BUCKET_SIZE = 500_000_000
"""Elements of DeepSpeed's reduction bucket: its own default."""
TINY_BUCKET_SIZE = 100_000
BLOCK_SIZE = 16
CPU_BLOCK_SIZE = 32
"""Tokens of a block of vLLM's cache; on a CPU its attention takes multiples of 32 only."""
KV_BYTES = 8 << 30
TINY_KV_BYTES = 16 << 20
"""Bytes of vLLM's cache where they are given."""
TINY_SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
}
"""Sizes that replace a config's in a dry run; the family stays."""


@dataclass(frozen=True)
class Case:
    """One measurement, in a process of its own.

    action: what is done, by the name that runs it. model: an id of the catalogue. method: `full` or `lora` (adapters
    on every linear layer). num_tokens: of the one sequence of a micro-batch. stage: DeepSpeed's, None for plain torch.
    offload: `none`, `optimizer` or `all` (weights too).
    """

    part: str
    action: str
    model: str = ""
    method: str = "full"
    recomputes: bool = True
    loss: str = "in_place"
    num_tokens: int = 0
    stage: int | None = None
    offload: str = "none"
    is_tiny: bool = False

    @property
    def id(self) -> str:
        """A name that says everything which tells it from the others."""
        words = [self.part, self.action, self.model.rpartition("/")[2].lower()]
        if self.action == "train":
            words += [self.method, "recompute" if self.recomputes else "no-recompute", self.loss]
        if self.stage is not None:
            words += [f"zero{self.stage}", f"offload-{self.offload}"]
        words += [str(self.num_tokens)] if self.num_tokens else []
        return "-".join(word for word in words if word) + ("-tiny" if self.is_tiny else "")

    @property
    def config(self) -> dict[str, Any]:
        """The model's `config.json`, from the catalogue."""
        config = dict(load_catalogue()[self.model].config)
        return config | TINY_SHAPE if self.is_tiny else config

    @property
    def bucket_size(self) -> int:
        """Elements of DeepSpeed's reduction bucket."""
        return TINY_BUCKET_SIZE if self.is_tiny else BUCKET_SIZE

    @property
    def gives_kv_bytes(self) -> bool:
        """Whether vLLM receives its cache size; else it profiles, which works on a GPU only."""
        return self.action == "sleep" or self.is_tiny

    @property
    def block_size(self) -> int:
        """Tokens of a block of vLLM's cache."""
        return CPU_BLOCK_SIZE if self.is_tiny else BLOCK_SIZE

    @property
    def kv_bytes(self) -> int:
        """Bytes of vLLM's cache where they are given."""
        return TINY_KV_BYTES if self.is_tiny else KV_BYTES

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return asdict(self)


def list_cases(part: str, *, is_tiny: bool = False) -> list[Case]:
    """The cases of a part."""
    makers = {"device": _device, "zero": _zero, "logprob": _logprob, "serving": _serving}
    makers |= {"torch": _torch, "vllm": _vllm, "steps": _steps}
    return list(makers[part](is_tiny) if part in makers else _training(part, is_tiny))


def _device(is_tiny: bool) -> Iterator[Case]:
    for action in ("memory", "matmul", "copy", "host-link"):
        yield Case("device", action, is_tiny=is_tiny)


def _training(part: str, is_tiny: bool) -> Iterator[Case]:
    model = TRAINED[part]
    if is_tiny:
        kinds = [("full", True, "plain"), ("full", False, "chunked"), ("lora", False, "in_place")]
        several = [(TINY_TOKENS, *kind) for kind in kinds]
    else:
        several = list(product(TOKENS, ("full", "lora"), (True, False), LOSSES))
    for tokens, method, recomputes, loss in several:
        yield Case(part, "train", model, method, recomputes, loss, tokens, is_tiny=is_tiny)


def _zero(is_tiny: bool) -> Iterator[Case]:
    models = [TRAINED["train-0.5b"]] if is_tiny else [TRAINED[f"train-{size}"] for size in ("0.5b", "1.5b", "3b", "7b")]
    # A job cannot offload the optimizer in stage 1, so that no plan could be compared with the measurement.
    settings = [*((stage, "none") for stage in (1, 2, 3)), (2, "optimizer"), (3, "optimizer"), (3, "all")]
    if is_tiny:
        settings = [(2, "optimizer"), (3, "none")]
    for model, (stage, offload) in product(models, settings):
        tokens = TINY_TOKENS if is_tiny else 4096
        yield Case("zero", "train", model, "full", True, "in_place", tokens, stage, offload, is_tiny)
    if not is_tiny:
        for model, method, stage in product(models[:2], ("full", "lora"), (2, 3)):
            yield Case("zero", "train", model, method, False, "plain", 4096, stage)


def _logprob(is_tiny: bool) -> Iterator[Case]:
    models = [TRAINED["train-8b"]] if is_tiny else list(TRAINED.values())
    for tokens, model in product((TINY_TOKENS,) if is_tiny else (4096, 16_384), models):
        for action in ("score-policy", "score-reference", "score-value"):
            yield Case("logprob", action, model, num_tokens=tokens, is_tiny=is_tiny)


def _serving(is_tiny: bool) -> Iterator[Case]:
    models = [TRAINED["train-0.5b"]] if is_tiny else [TRAINED[f"train-{size}"] for size in ("0.5b", "7b", "8b")]
    yield Case("serving", "hand-over", is_tiny=is_tiny)
    for model in models:
        for action in ("engine", "sleep"):
            yield Case("serving", action, model, num_tokens=TINY_TOKENS if is_tiny else 8192, is_tiny=is_tiny)


def _torch(is_tiny: bool) -> Iterator[Case]:
    """Cases for torch alone; the two trainer steps need transformers too."""
    tokens = TINY_TOKENS if is_tiny else 8192
    yield Case("torch", "attention", num_tokens=tokens, is_tiny=is_tiny)
    yield Case("torch", "head", num_tokens=tokens, is_tiny=is_tiny)
    yield Case("torch", "sync", is_tiny=is_tiny)
    yield Case("torch", "checksums", is_tiny=is_tiny)
    for size in ("0.5b",) if is_tiny else ("0.5b", "1.5b"):
        yield Case("torch", "packed-step", TRAINED[f"train-{size}"], loss="by_rows", num_tokens=tokens, is_tiny=is_tiny)
    for action in ("memory", "host-link", "offload", "matmul", "copy"):
        yield Case("torch", action, is_tiny=is_tiny)


def _vllm(is_tiny: bool) -> Iterator[Case]:
    for action in ("hand-over", "engine", "sleep"):
        model = "" if action == "hand-over" else TRAINED["train-0.5b"]
        yield Case("vllm", action, model, num_tokens=TINY_TOKENS if is_tiny else 8192, is_tiny=is_tiny)


def _steps(is_tiny: bool) -> Iterator[Case]:
    """Whole steps of GRPO in two placements, then DeepSpeed's stages alone."""
    for action in ("step-colocated", "step-hybrid"):
        yield Case("steps", action, is_tiny=is_tiny)
    tokens = TINY_TOKENS if is_tiny else 4096
    for stage, offload in ((3, "none"), (2, "none"), (1, "none"), (3, "optimizer")):
        loss = "in_place"
        yield Case("steps", "train", TRAINED["train-0.5b"], "full", True, loss, tokens, stage, offload, is_tiny)
