"""Models on disk: the start checkpoint that every process loads, and the policy that a run leaves behind.

In: a Hugging Face folder. Out: a module, or a folder. Weights are safetensors; nothing is unpickled, no code is loaded.
"""

import shutil
from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def load_language_model(folder: str) -> Any:
    """A Hugging Face causal LM in fp32, in evaluation mode (dropout would blur the ratio), on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False, use_safetensors=True
    ).eval()


def write_random_checkpoint(model_folder: Path, out: Path, seed: int) -> None:
    """Draw start weights for a folder that has only a config. The same seed gives the same file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(str(model_folder), trust_remote_code=False)
    save_policy(AutoModelForCausalLM.from_config(config, dtype=torch.float32), out, model_folder)


def save_policy(model: Any, out: Path, tokenizer_folder: Path) -> None:
    """Write a model as safetensors with its config, beside a copy of the tokenizer."""
    model.save_pretrained(str(out), safe_serialization=True, max_shard_size="1000GB")
    for name in TOKENIZER_FILES:
        if (tokenizer_folder / name).is_file():
            shutil.copyfile(tokenizer_folder / name, out / name)


if __name__ == "__main__":
    import sys

    write_random_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
