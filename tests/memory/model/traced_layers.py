"""Bytes that each decoder layer of a real module saves for its backward pass, found under fake tensors."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from rlplan.runtime.measure.tracing import traced_model


def saved_by_layer(
    config: dict[str, Any],
    num_tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    adapt: Callable[[Any], None] = lambda model: None,
) -> list[int]:
    """Bytes of the distinct storages that each layer saves, parameters apart; what it shares counts where it is first.

    The last number is what is saved after the layers. adapt: freezes weights, or puts adapters beside them.
    """
    with traced_model(config, dtype) as model:
        adapt(model)
        decoder = model.get_decoder()
        decoder = getattr(decoder, "model", decoder)
        stack = next(part for name in ("layers", "h", "blocks") if (part := getattr(decoder, name, None)) is not None)
        known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        sizes: dict[int, int] = defaultdict(int)
        saved, at = [], [-1]

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            saved.append(tensor)  # nothing may be freed and its address used again while we count
            if storage._cdata not in known:
                known.add(storage._cdata)
                sizes[at[0]] += storage.nbytes()
            return tensor

        for index, layer in enumerate(stack):
            layer.register_forward_pre_hook(lambda *_, index=index: at.__setitem__(0, index))
            layer.register_forward_hook(lambda *_: at.__setitem__(0, len(stack)))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            decoder(input_ids=torch.zeros(1, num_tokens, dtype=torch.long), use_cache=False)
        return [sizes[index] for index in range(len(stack) + 1)]
