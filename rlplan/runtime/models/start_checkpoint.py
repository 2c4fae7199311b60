"""Models on disk: the start checkpoint that every process loads, and the policy that a run saves.

Weights are safetensors; nothing is unpickled, and no model code is loaded. Processes load only the decoder of a
vision-language model; the saved policy is the whole model again.

In: a Hugging Face folder. Out: a module, or a folder.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlplan.errors import RunError
from rlplan.runtime.run_folder.disk_errors import disk_number, writing_file
from rlplan.spec.model_files import processor_files, tokenizer_files
from rlplan.spec.models.config import read_config
from rlplan.spec.models.headers import has_weights, read_index
from rlplan.spec.models.language_part import decoder_name, is_vision_language, language_config

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
"""Most bytes of one safetensors file, as in Hugging Face's `save_pretrained` (huggingface_hub 1)."""


def load_language_model(folder: str, dtype: Any = None) -> Any:
    """Load a Hugging Face causal LM on the CPU, in evaluation mode, because dropout would add noise to the ratio.

    dtype: the type of the weights; fp32 by default.
    """
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **_make_loading_options(dtype)).eval()


def load_scalar_model(folder: str, dtype: Any = None) -> Any:
    """Load a Hugging Face sequence classifier with one label. A head that the folder lacks starts at zero."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model, information = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, output_loading_info=True, **_make_loading_options(dtype)
    )
    if "score.weight" in information["missing_keys"]:
        torch.nn.init.zeros_(model.score.weight)
    model.config.architectures = [type(model).__name__]  # saved with the model; the folder may name a causal LM
    return model.eval()


def _make_loading_options(dtype: Any) -> dict[str, Any]:
    import torch

    from rlplan.runtime.models.packed_attention import PACKED, register_packed_attention

    register_packed_attention()
    safe = {"trust_remote_code": False, "use_safetensors": True}
    return {"dtype": dtype or torch.float32, "attn_implementation": PACKED} | safe


def warm_up(architecture: str, *, backward: bool) -> None:
    """Load what torch and transformers load lazily: model code, math kernels, thread pools.

    Its memory then counts as part of the process, not of a model's first operation.
    """
    import torch
    import transformers

    getattr(transformers, architecture)
    x = torch.ones(1, 2, 64, 64, requires_grad=backward)
    y = torch.nn.functional.scaled_dot_product_attention(x @ x, x, x, is_causal=True).logsumexp(-1).sum()
    if backward:
        y.backward()


def write_random_checkpoint(model_folder: Path, out: Path, seed: int) -> None:
    """Write random start weights for a folder that has only a config. The same seed gives the same file."""
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
    """Write a vision-language model's decoder as a model folder: the weight files without the vision tower."""
    from safetensors import safe_open

    out.mkdir(parents=True, exist_ok=True)
    places = dict[str, str]()
    for path in list_weight_files(model_folder):
        with safe_open(path, framework="pt") as file:
            named = [(decoder_name(stored), stored) for stored in file.keys()]  # noqa: SIM118 - no dictionary
            tensors = {name: file.get_tensor(stored) for name, stored in named if name is not None}
        if tensors:
            save_tensors(tensors, out / path.name)
            places |= dict.fromkeys(tensors, path.name)
    if set(places.values()) != {WEIGHTS}:
        _write_index(out, places, {})
    (out / "config.json").write_text(json.dumps(language_config(read_config(model_folder / "config.json"))))
    _copy(tokenizer_files(model_folder), model_folder, out)


def merge_into_whole_model(policy: Path, model_folder: Path) -> None:
    """Turn a saved decoder back into the whole vision-language model, if the model folder is one with weights.

    The result has the model's own files, with trained weights in them. The decoder's files are removed.
    """
    from safetensors import safe_open

    config = read_config(model_folder / "config.json")
    if not is_vision_language(config) or not has_weights(model_folder):
        return
    if read_config(policy / "config.json").get("architectures") != language_config(config)["architectures"]:
        return  # e.g. a reward model, whose head has no place in the whole model
    trained_files, folder = list_weight_files(policy), policy / "whole"
    with writing_file(trained_files[0]), ExitStack() as stack:
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted export
        folder.mkdir()
        trained = dict[str, Any]()
        for path in trained_files:
            file = stack.enter_context(safe_open(path, framework="pt"))
            trained |= dict.fromkeys(file.keys(), file)
        names = {name: name for name in trained}
        names.setdefault("lm_head.weight", "model.embed_tokens.weight")  # some files store a tied head twice
        for path in list_weight_files(model_folder):
            with safe_open(path, framework="pt") as file:
                places = {stored: names.get(decoder_name(stored) or "") for stored in file.keys()}  # noqa: SIM118
                tensors = {
                    stored: trained[name].get_tensor(name) if name else file.get_tensor(stored)
                    for stored, name in places.items()
                }
                save_tensors(tensors, folder / path.name)
    for path in (*trained_files, policy / INDEX):
        path.unlink(missing_ok=True)
    for path in list(folder.iterdir()):
        path.replace(policy / path.name)
    folder.rmdir()
    _copy((Path(INDEX), Path("config.json"), *processor_files(model_folder)), model_folder, policy)


def list_weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: one file, or the files in its index."""
    index = folder / INDEX
    names = sorted(set(read_index(index).values())) if index.is_file() else [WEIGHTS]
    return [folder / name for name in names]


def _copy(names: Iterable[Path], folder: Path, out: Path) -> None:
    for name in names:
        if (folder / name).is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / name, out / name)


def save_policy(config: Any, weights: Iterable[tuple[str, Any]], out: Path, tokenizer_folder: Path) -> dict[str, int]:
    """Write a model's safetensors and config, and copy the tokenizer. Returns: checksums of the weights.

    Each tensor is copied to the host, because under ZeRO all are views of one buffer, which safetensors refuses.
    """
    from rlplan.runtime.weight_sync.checksums import checksum_tensors
    from rlplan.runtime.weight_sync.contents.checkpoint_names import rename_for_checkpoint

    checksums = dict[str, int]()

    def copy_to_host() -> Iterator[tuple[str, Any]]:
        for name, parameter in rename_for_checkpoint(config.architectures[0], weights):
            checksums.update(checksum_tensors([(name, parameter)]))
            yield name, parameter.detach().to("cpu", copy=True)

    _write_shards(copy_to_host(), out)
    with writing_file(out / "config.json"):
        config.save_pretrained(str(out))
        _copy(tokenizer_files(tokenizer_folder), tokenizer_folder, out)
    return checksums


def _write_shards(tensors: Iterable[tuple[str, Any]], out: Path) -> None:
    """Write tensors as they arrive, to `model.safetensors` or to numbered files with an index.

    Only the tensors of one file are in memory. A numbered file's name includes the number of files, so files are
    renamed at the end. An interrupted write leaves no file that looks complete.
    """
    parts: list[dict[str, int]] = []
    shard = dict[str, Any]()
    with writing_file(out / WEIGHTS):
        out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob("part-*"):  # left by an interrupted save
        stale.unlink()
    for name, tensor in tensors:
        if shard and _sum_bytes(shard) + tensor.nbytes > MAX_SHARD_BYTES:
            save_tensors(shard, out / f"part-{len(parts)}")
            parts.append({name: tensor.nbytes for name, tensor in shard.items()})
            shard = {}
        shard[name] = tensor
    save_tensors(shard, out / (f"part-{len(parts)}" if parts else WEIGHTS))
    for earlier in (out / INDEX, *out.glob("model-*.safetensors")):  # an earlier save stays complete until here
        earlier.unlink(missing_ok=True)
    if not parts:
        return
    (out / WEIGHTS).unlink(missing_ok=True)
    parts.append({name: tensor.nbytes for name, tensor in shard.items()})
    places = dict[str, str]()
    for number, sizes in enumerate(parts):
        file = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        (out / f"part-{number}").replace(out / file)
        places |= dict.fromkeys(sizes, file)
    _write_index(out, places, {"total_size": sum(size for sizes in parts for size in sizes.values())})


def _write_index(out: Path, places: Mapping[str, str], metadata: Mapping[str, int]) -> None:
    """Write the index of numbered files. places: file of each tensor."""
    with writing_file(out / INDEX):
        (out / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": places}, indent=2) + "\n")


def save_tensors(tensors: Mapping[str, Any], path: Path) -> None:
    """Write one safetensors file with this process's default file mode. Raises: RunError.

    safetensors itself creates a file of mode 600, so its mode is set afterwards. A failed write leaves the old file.
    """
    from safetensors.torch import save_file

    partial = path.with_name(f"{path.name}.part")
    with writing_file(path, _sum_bytes(tensors)):
        try:
            partial.unlink(missing_ok=True)
            partial.touch()
            mode = partial.stat().st_mode & 0o777
            save_file(dict(tensors), str(partial), metadata={"format": "pt"})
            partial.chmod(mode)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def _sum_bytes(tensors: Mapping[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


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
        sys.exit(disk_number(error.__cause__ or error))  # the driver raises the same error again from this code
