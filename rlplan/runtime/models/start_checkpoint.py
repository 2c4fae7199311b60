"""Models on disk: the start checkpoint that every process loads, and the policy that a run leaves behind.

In: a Hugging Face folder. Out: a module, or a folder. Weights are safetensors; nothing is unpickled, no code is loaded.
Of a vision-language model every process loads the language part, a decoder like any other; what a run leaves behind is
the whole model again.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlplan.errors import RunError
from rlplan.runtime.run_folder.disk_errors import disk_number, writing_file
from rlplan.spec.models.config import read_config
from rlplan.spec.models.headers import has_weights, read_index
from rlplan.spec.models.language_part import decoder_name, is_vision_language, language_config

INDEX = "model.safetensors.index.json"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""What turns images into a vision-language model's inputs."""
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
    model.config.architectures = [type(model).__name__]  # what it is now, for when it is saved
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

    from rlplan.runtime.weight_sync.source import WeightSource

    torch.manual_seed(seed)
    data = read_config(model_folder / "config.json")
    config = (
        AutoConfig.for_model(**language_config(data))
        if is_vision_language(data)
        else AutoConfig.from_pretrained(str(model_folder), trust_remote_code=False)
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_policy(model.config, WeightSource(model), out, model_folder)


def write_language_part(model_folder: Path, out: Path) -> None:
    """A vision-language model's decoder as a folder of its own: every file of weights without the tower's."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    places = dict[str, str]()
    for path in weight_files(model_folder):
        with safe_open(path, framework="pt") as file:
            named = [(decoder_name(stored), stored) for stored in file.keys()]  # noqa: SIM118 - no dictionary
            tensors = {name: file.get_tensor(stored) for name, stored in named if name is not None}
        if tensors:
            with writing_file(out / path.name, sum(tensor.nbytes for tensor in tensors.values())):
                save_file(tensors, out / path.name, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, path.name)
    if set(places.values()) != {"model.safetensors"}:
        (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (out / "config.json").write_text(json.dumps(language_config(read_config(model_folder / "config.json"))))
    _copy(TOKENIZER_FILES, model_folder, out)


def merge_into_whole_model(policy: Path, model_folder: Path) -> None:
    """Make a saved policy the whole model again, where it is the language part of one with weights.

    The files are the model's own, with the trained weights in place of those that they held. The language part's go.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = read_config(model_folder / "config.json")
    if not is_vision_language(config) or not has_weights(model_folder):
        return
    if read_config(policy / "config.json").get("architectures") != language_config(config)["architectures"]:
        return  # such as a reward model, whose head the whole model has no place for
    trained_file, whole = policy / "model.safetensors", policy / "whole"
    with writing_file(trained_file), safe_open(trained_file, framework="pt") as trained:
        shutil.rmtree(whole, ignore_errors=True)  # of an export that was ended
        whole.mkdir()
        held = {name: name for name in trained.keys()}  # noqa: SIM118 - no dictionary
        held.setdefault("lm_head.weight", "model.embed_tokens.weight")  # of a tied head that is stored twice
        for path in weight_files(model_folder):
            with safe_open(path, framework="pt") as file:
                names = {stored: held.get(decoder_name(stored) or "") for stored in file.keys()}  # noqa: SIM118
                tensors = {
                    stored: trained.get_tensor(name) if name else file.get_tensor(stored)
                    for stored, name in names.items()
                }
                save_file(tensors, whole / path.name, metadata={"format": "pt"})
    trained_file.unlink()
    for path in list(whole.iterdir()):
        path.replace(policy / path.name)
    whole.rmdir()
    _copy((INDEX, "config.json", *PROCESSOR_FILES), model_folder, policy)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a folder: one, or those that its index names."""
    index = folder / INDEX
    names = sorted(set(read_index(index).values())) if index.is_file() else ["model.safetensors"]
    return [folder / name for name in names]


def _copy(names: Iterable[str], folder: Path, out: Path) -> None:
    for name in names:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


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
        _copy(TOKENIZER_FILES, tokenizer_folder, out)
    return checksums


if __name__ == "__main__":
    import sys

    try:
        source, out = Path(sys.argv[1]), Path(sys.argv[2])
        if sys.argv[3:]:
            write_random_checkpoint(source, out, int(sys.argv[3]))
        else:
            write_language_part(source, out)
    except RunError as error:
        print(error, file=sys.stderr)
        sys.exit(disk_number(error.__cause__ or error))  # the driver says it once more
