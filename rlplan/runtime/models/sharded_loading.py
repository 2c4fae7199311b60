"""Loading a model whose ranks share its weights from the start: no rank ever holds more of it than one tensor.

In: a Hugging Face folder, DeepSpeed's ZeRO-3 config; the ranks have met. Out: a module whose parameters are cut.
Rank 0 alone reads the files, tensor by tensor, and the others get their shares over the group. Left out: checkpoints
whose names are not the module's own.

Inside `deepspeed.zero.Init` every tensor that is made is in the model's 16 bits (DeepSpeed 0.19.8,
`zero_wrapper_for_fp_tensor_constructor`), also what a model computes for itself: angles of rotary positions from
frequencies in bf16 are off by whole turns after a few hundred tokens. Such buffers are computed again outside.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any


def build_cut(folder: str, config: dict[str, Any], dtype: Any, *, is_scalar: bool = False) -> Any:
    """A model in evaluation mode, its weights those of the folder. is_scalar: with one output instead of a head.

    Collective: every rank calls it. A scalar head that the folder lacks starts at zero.
    """
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.initialization import no_init_weights

    from rlplan.runtime.models.packed_attention import PACKED, register_packed_attention

    register_packed_attention()
    shape = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind: Any = AutoModelForCausalLM
    if is_scalar:
        kind, shape.num_labels = AutoModelForSequenceClassification, 1
    build = partial(kind.from_config, shape, dtype=dtype, attn_implementation=PACKED, trust_remote_code=False)
    with no_init_weights():  # there is nothing whole to draw start weights into
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = build()
        _compute_buffers(model, build)
    model.tie_weights()
    _fill(dict(model.named_parameters()), Path(folder))
    return model.eval()


def _compute_buffers(model: Any, build: Callable[[], Any]) -> None:
    """Give a model that was built inside `deepspeed.zero.Init` the buffers that it has when it is built outside."""
    with _parameters_on_meta():
        computed = dict(build().named_buffers())
    for name, buffer in model.named_buffers():
        buffer.data = computed[name].to(buffer.device)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are made inside keep the shapes of their parameters alone; their buffers are real."""
    from torch import nn

    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else nn.Parameter(param.to("meta"), requires_grad=False))

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]  # replaced on purpose
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _fill(parameters: dict[str, Any], folder: Path) -> None:
    """Give every parameter its numbers, one after the other."""
    import deepspeed
    import torch
    import torch.distributed as dist

    is_first, missing = dist.get_rank() == 0, set(parameters)
    for name, tensor in _tensors(folder, reads=is_first):
        if name not in missing:
            continue  # such as a language head that the role has not
        missing.remove(name)
        with deepspeed.zero.GatheredParameters([parameters[name]], modifier_rank=0), torch.no_grad():
            if is_first:
                parameters[name].copy_(tensor)
    for name in sorted(missing):
        if not name.startswith("score."):
            raise KeyError(f"{name} is in none of the files in {folder}")
        with deepspeed.zero.GatheredParameters([parameters[name]], modifier_rank=0), torch.no_grad():
            parameters[name].zero_()


def _tensors(folder: Path, *, reads: bool) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of every file, in one order on all ranks; None where they are not read here."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name) if reads else None
