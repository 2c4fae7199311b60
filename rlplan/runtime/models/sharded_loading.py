"""Loading a model under ZeRO-3: parameters are partitioned from the start, and a rank holds at most one whole tensor.

Rank 0 reads the files tensor by tensor, and the others receive their shards over the process group.

Inside `deepspeed.zero.Init` every new tensor has the model's 16-bit type (DeepSpeed 0.19.8,
`zero_wrapper_for_fp_tensor_constructor`), including buffers that a model computes. Rotary angles from bf16 frequencies
are off by whole turns after a few hundred tokens, so buffers are computed again outside.

In: a Hugging Face folder, DeepSpeed's ZeRO-3 config, initialized process groups. Out: a module with sharded parameters.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any


def build_sharded(folder: str, config: dict[str, Any], dtype: Any, *, is_scalar: bool = False) -> Any:
    """Load a model in evaluation mode. is_scalar: with one output instead of a language-model head.

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
    with no_init_weights():  # random initialization would need whole tensors
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = build()
        _compute_buffers(model, build)
    model.tie_weights()  # before loading, so that a tied head is one parameter and is loaded once
    _fill(model, Path(folder))
    model.config.architectures = [type(model).__name__]  # saved with the model; a scalar head changes the class
    return model.eval()


def _compute_buffers(model: Any, build: Callable[[], Any]) -> None:
    """Replace the buffers of a model built inside `deepspeed.zero.Init` by those of one built outside."""
    with _create_on_meta():
        computed = dict(build().named_buffers())
    for name, buffer in model.named_buffers():
        buffer.data = computed[name].to(buffer.device)


@contextmanager
def _create_on_meta() -> Iterator[None]:
    """Modules created inside the block have parameters on the meta device, and real buffers."""
    from torch import nn

    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else nn.Parameter(param.to("meta"), requires_grad=False))

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]  # replaced on purpose
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _fill(model: Any, folder: Path) -> None:
    """Load the parameters one by one. Raises: KeyError on every rank when a tensor is missing."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from safetensors import safe_open

    from rlplan.runtime.weight_sync.contents.checkpoint_names import rename_for_checkpoint

    is_first = dist.get_rank() == 0
    with ExitStack() as stack:
        opened = [
            stack.enter_context(safe_open(str(path), framework="pt")) for path in sorted(folder.glob("*.safetensors"))
        ]
        files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - no dictionary
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                own_name = [(name, parameter)]  # the file has the model's own name, e.g. for stacked experts
                for stored, part in (
                    own_name if name in files else rename_for_checkpoint(type(model).__name__, own_name)
                ):
                    if stored not in files and not name.startswith("score."):
                        raise KeyError(f"{stored} is in none of the files in {folder}")
                    if is_first:
                        part.copy_(files[stored].get_tensor(stored)) if stored in files else part.zero_()
