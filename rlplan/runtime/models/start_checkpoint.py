"""Models on disk: the start checkpoint that every process loads, and the policy that a run leaves behind.

In: a Hugging Face folder. Out: a module, or a folder. Weights are safetensors; nothing is unpickled, no code is loaded.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlplan.errors import RunError
from rlplan.runtime.run_folder.disk_errors import disk_number, writing_file

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def load_language_model(folder: str, dtype: Any = None) -> Any:
    """A Hugging Face causal LM in evaluation mode (dropout would blur the ratio), on the CPU. dtype: else fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **_loading(dtype)).eval()


def load_scalar_model(folder: str, dtype: Any = None) -> Any:
    """A Hugging Face sequence classifier with one label. From a language model its head starts at zero."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model, information = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, output_loading_info=True, **_loading(dtype)
    )
    if "score.weight" in information["missing_keys"]:
        torch.nn.init.zeros_(model.score.weight)
    model.config.architectures = [type(model).__name__]  # what it is now, for whoever saves it
    return model.eval()


def _loading(dtype: Any) -> dict[str, Any]:
    import torch

    from rlplan.runtime.models.packed_attention import PACKED, register_packed_attention

    register_packed_attention()
    safe = {"trust_remote_code": False, "use_safetensors": True}
    return {"dtype": dtype or torch.float32, "attn_implementation": PACKED} | safe


def warm_up(architecture: str, *, backward: bool) -> None:
    """Make torch and transformers load what they load lazily: the model's code, math kernels, thread pools.

    All of it then belongs to the process before any model, and not to the first thing that a model does.
    """
    import torch
    import transformers

    getattr(transformers, architecture)
    x = torch.ones(1, 2, 64, 64, requires_grad=backward)
    y = torch.nn.functional.scaled_dot_product_attention(x @ x, x, x, is_causal=True).logsumexp(-1).sum()
    if backward:
        y.backward()


def write_random_checkpoint(model_folder: Path, out: Path, seed: int) -> None:
    """Draw start weights for a folder that has only a config. The same seed gives the same file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(str(model_folder), trust_remote_code=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_policy(model.config, model.named_parameters(), out, model_folder)


def save_policy(config: Any, weights: Iterable[tuple[str, Any]], out: Path, tokenizer_folder: Path) -> dict[str, int]:
    """Write a model as one safetensors file with its config, beside a copy of the tokenizer; the weights' checksums.

    Each tensor is copied to the host, for under ZeRO they are all views of one buffer, which the format refuses.
    """
    from safetensors.torch import save_file

    from rlplan.runtime.weight_sync.checksums import of_named
    from rlplan.runtime.weight_sync.contents.checkpoint_names import in_checkpoint

    tensors, checksums = dict[str, Any](), dict[str, int]()
    family = config.architectures[0].replace("ForSequenceClassification", "ForCausalLM")
    for name, parameter in in_checkpoint(family, weights):
        checksums |= of_named([(name, parameter)])
        tensors[name] = parameter.detach().to("cpu", copy=True)
    with writing_file(out / "model.safetensors", sum(tensor.nbytes for tensor in tensors.values())):
        out.mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
        config.save_pretrained(str(out))
        for name in TOKENIZER_FILES:
            if (tokenizer_folder / name).is_file():
                shutil.copyfile(tokenizer_folder / name, out / name)
    return checksums


if __name__ == "__main__":
    import sys

    try:
        write_random_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    except RunError as error:
        print(error, file=sys.stderr)
        sys.exit(disk_number(error.__cause__ or error))  # the driver says it once more
