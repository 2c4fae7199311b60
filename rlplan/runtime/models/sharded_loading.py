"""Loading a model whose ranks share its weights from the start: no rank ever holds more of it than one tensor.

In: a Hugging Face folder, DeepSpeed's ZeRO-3 config; the ranks have met. Out: a module whose parameters are cut.
Rank 0 alone reads the files, tensor by tensor, and the others get their shares over the group.

Inside `deepspeed.zero.Init` every tensor that is made is in the model's 16 bits (DeepSpeed 0.19.8,
`zero_wrapper_for_fp_tensor_constructor`), also what a model computes for itself: angles of rotary positions from
frequencies in bf16 are off by whole turns after a few hundred tokens. Such buffers are computed again outside.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
    _fill(model, Path(folder))
    model.config.architectures = [type(model).__name__]  # what it is now, for when it is saved
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


def _fill(model: Any, folder: Path) -> None:
    """Give every parameter its numbers, one after the other. Raises: KeyError, on every rank, where one is missing."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from safetensors import safe_open

    from rlplan.runtime.weight_sync.contents.checkpoint_names import in_checkpoint

    is_first = dist.get_rank() == 0
    with ExitStack() as stack:
        opened = [
            stack.enter_context(safe_open(str(path), framework="pt")) for path in sorted(folder.glob("*.safetensors"))
        ]
        files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - no dictionary
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                own_name = [(name, parameter)]  # such as experts that are stacked in the file too
                for stored, part in own_name if name in files else in_checkpoint(_language_model(model), own_name):
                    if stored not in files and not name.startswith("score."):
                        raise KeyError(f"{stored} is in none of the files in {folder}")
                    if is_first:
                        part.copy_(files[stored].get_tensor(stored)) if stored in files else part.zero_()


def _language_model(model: Any) -> str:
    """The family by its language model's name: a scalar model of it has the same decoder."""
    return type(model).__name__.replace("ForSequenceClassification", "ForCausalLM")
