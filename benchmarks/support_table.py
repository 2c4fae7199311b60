"""Regenerates docs/models.md: bundled models, GPU profiles, and what is modelled for each pair.

In: the catalogue, the families, the GPU profiles. Out: the page. Left out: how accurate a quantity is
(reports/accuracy).
Run as `python -m benchmarks.support_table`; a test holds the page fresh.
"""

from pathlib import Path

from benchmarks.texts import format_table, read_texts
from rlplan.errors import SpecError
from rlplan.memory.model.block_families import list_blocks
from rlplan.memory.serving.kv import kv_elements_per_token, list_layer_caches
from rlplan.spec.hardware.catalogue import get_gpu, list_gpu_names
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.catalogue import find_model, load_catalogue
from rlplan.units import format_bytes
from rlplan.vocabulary import Provenance

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
ELEMENT_BYTES = 2
GPUS = ("a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200", "gb200", "l40s", "rtx-4090", "mi300x")
"""GPUs that have a column in the table of models."""


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")


def render() -> str:
    """The page's text."""
    texts = read_texts(__file__)
    models = format_table(("model", "parameters", "KV cache", "state", *GPUS), map(list_model_cells, sorted(own_ids())))
    gpus = format_table(("GPU", "memory", "engine seconds"), map(list_gpu_cells, sorted(list_gpu_names())))
    return texts["page"].format(models=models, gpus=gpus, count=len(load_catalogue()))


def own_ids() -> list[str]:
    """Bundled models with a config of their own; the others have the shape of one of these."""
    return [name for name, entry in load_catalogue().items() if entry.like is None]


def list_model_cells(name: str) -> tuple[str, ...]:
    """A model's row: its size, its caches at 16 bits, and what is modelled on each GPU."""
    model = find_model(name)
    token = ELEMENT_BYTES * sum(kv_elements_per_token(model).values())
    state = ELEMENT_BYTES * sum(cache.recurrent_elements + cache.conv_elements for cache in list_layer_caches(model))
    letters = "WK" + find_activations(model)
    sizes = f"{model.num_parameters:,}", format_bytes(token), format_bytes(state) if state else ""
    return name, *sizes, *(letters + find_engine_rates(gpu) for gpu in GPUS)


def find_activations(model: ModelSpec) -> str:
    """`A` if activations are modelled under transformers, `a` under Megatron's modules only, empty if not."""
    for letter, has_own_modules in (("A", False), ("a", True)):
        try:
            list_blocks(model, has_own_modules=has_own_modules)
        except SpecError:
            continue
        return letter
    return ""


def find_engine_rates(gpu: str) -> str:
    """`E` if an engine's rates on the GPU were measured, `e` if they are derived or assumed."""
    rates = get_gpu(gpu, where="gpu").serving
    return "E" if rates and rates.memory.provenance == Provenance.MEASURED else "e"


def list_gpu_cells(name: str) -> tuple[str, ...]:
    """A GPU's row."""
    gpu = get_gpu(name, where="gpu")
    return name, format_bytes(gpu.memory.value), find_engine_rates(name)


if __name__ == "__main__":
    main()
