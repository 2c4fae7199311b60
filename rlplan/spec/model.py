"""ModelSpec: the shape of a language model, read from a Hugging Face `config.json`.

In: a folder or file with a config, or a parsed config. Out: every tensor by name and shape, in the order of the Hugging
Face module, counts by component, and what each layer caches. Left out: values and dtypes; multi-token-prediction heads;
architectures that no table describes (refused by name, never guessed).

Symbols: h hidden_size, L num_layers, a num_heads, k num_kv_heads, d head_dim, I intermediate_size, V vocab_size.
"""

from collections import Counter
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from rlplan.errors import SpecError
from rlplan.spec.base import Spec, shorten_value
from rlplan.spec.models.config import MAX_DIMENSION, MAX_LAYERS, QuantizationSpec, read_config
from rlplan.spec.models.dimensions import WHOLE, Layout, compute_sizes
from rlplan.spec.models.families.family import FAMILIES
from rlplan.spec.models.families.image_sizes import takes_images
from rlplan.spec.models.families.towers import list_tower_tensors
from rlplan.spec.models.language_part import is_vision_language, language_config
from rlplan.spec.models.names import load_catalogue
from rlplan.spec.models.parts import (
    FULL,
    LINEAR,
    NONE,
    PARALLEL,
    ExpertsSpec,
    GlobalAttentionSpec,
    IndexerSpec,
    LatentAttentionSpec,
    LinearAttentionSpec,
    PerLayerInputSpec,
    SharedKeysSpec,
    VisionSpec,
)
from rlplan.spec.models.reading import MAX_POSITIONS, known_architecture, model_fields
from rlplan.spec.models.tensors import Component, Parameter, add_prefix, list_tensors, rename_tensor

__all__ = [
    "FAMILIES",
    "Component",
    "Layout",
    "ModelSpec",
    "Parameter",
    "has_vision_tower",
    "load_model",
    "load_scalar_base",
    "model_from_config",
    "read_model",
]

NO_CLASSIFIER = frozenset(
    f"{name}ForCausalLM"
    for name in (
        *("Cohere", "Cohere2", "Granite", "GraniteMoe", "Ernie4_5", "Ernie4_5_Moe", "Olmoe", "MiniMaxM2", "PhiMoE"),
        *("Qwen3_5Moe", "Glm4Moe", "Glm4MoeLite", "DeepseekV32", "GlmMoeDsa", "Llama4", "NemotronH"),
        *("GraniteMoeHybrid", "FalconH1", "Lfm2", "KimiLinear", "MiMo"),
    )
)
"""Families without a sequence classifier in transformers 5.19, so that no value or reward model can be one of them."""


class ModelSpec(Spec):
    """The shape of a decoder. All sizes are counts of elements or tokens."""

    architecture: str
    hidden_size: int = Field(ge=1, le=MAX_DIMENSION)
    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    num_heads: int = Field(ge=1, le=MAX_DIMENSION)
    num_kv_heads: int = Field(ge=1, le=MAX_DIMENSION)
    head_dim: int = Field(ge=1, le=MAX_DIMENSION)
    intermediate_size: int = Field(ge=0, le=1 << 32)
    vocab_size: int = Field(ge=1, le=MAX_DIMENSION)
    max_position_embeddings: int = Field(ge=1, le=MAX_POSITIONS)
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    has_output_bias: bool = False
    options: tuple[str, ...] = ()
    """Conditions of the family's tensor tables that hold for this model."""
    attention_kinds: tuple[str, ...] = ()
    """Attention of each layer (`full`, `sliding`, `chunked`, `linear`, `parallel`); empty if all are full."""
    window: int | None = None
    """Window of a sliding or chunked layer in tokens."""
    experts: ExpertsSpec | None = None
    latent_attention: LatentAttentionSpec | None = None
    indexer: IndexerSpec | None = None
    linear_attention: LinearAttentionSpec | None = None
    global_attention: GlobalAttentionSpec | None = None
    shared_keys: SharedKeysSpec | None = None
    per_layer_input: PerLayerInputSpec | None = None
    vision: VisionSpec | None = None
    audio: VisionSpec | None = None
    quantization: QuantizationSpec | None = None
    """Quantization of the checkpoint; None for plain weights. Shapes are those of the unquantized model."""

    def __hash__(self) -> int:
        """A hash of a few sizes, which tells models apart and is cheap as part of a cache key."""
        return hash((self.architecture, self.hidden_size, self.num_layers, self.num_heads, self.vocab_size))

    @cached_property
    def tensors(self) -> tuple[Parameter, ...]:
        """Every tensor that a checkpoint stores, including buffers."""
        return self.list_rank_tensors(WHOLE)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter tensor, in the order of the Hugging Face module's `named_parameters()`."""
        return tuple(tensor for tensor in self.tensors if not tensor.is_buffer)

    @property
    def num_parameters(self) -> int:
        """Number of stored elements. Tied tensors count once; routing biases count, since they are in the
        checkpoint.
        """
        return sum(self.numel_by_component.values())

    @cached_property
    def numel_by_component(self) -> dict[Component, int]:
        """Number of stored elements by component; a component that the model lacks is absent."""
        counts: Counter[Component] = Counter()
        for tensor in self.tensors:
            counts[tensor.component] += tensor.numel
        return dict(counts)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: all but the experts that are not chosen.

        Counts: embeddings too, as model cards do. Qwen3-30B-A3B: 3,353,032,704 of 30,532,122,624.
        """
        if self.experts is None:
            return self.num_parameters
        routed = self.numel_by_component[Component.EXPERTS]
        return self.num_parameters - routed + routed * self.experts.num_active // self.experts.num_experts

    @property
    def q_size(self) -> int:
        """Width of the query projection, a*d."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of one of the key and value projections, k*d."""
        return self.num_kv_heads * self.head_dim

    @property
    def head_width(self) -> int:
        """Outputs of the head per token, V."""
        return self.vocab_size

    @cached_property
    def num_dense_mlps(self) -> int:
        """Layers with a dense MLP: those without experts. If some layers have no attention, only those have an MLP."""
        with_experts = len(self.experts.layers) if self.experts else 0
        # Nemotron-H alternates attention and MLP layers; in all other families each layer has both.
        return (self.attention_kinds.count(NONE) or self.num_layers) - with_experts

    def reuses_keys(self, layer: int) -> bool:
        """Whether a layer uses keys and values of an earlier layer."""
        return self.shared_keys is not None and layer >= self.num_layers - self.shared_keys.num_layers

    def attention_kind(self, layer: int) -> str:
        """Kind of a layer's attention."""
        return self.attention_kinds[layer] if self.attention_kinds else FULL

    def list_rank_tensors(
        self, layout: Layout, layers: range | None = None, *, has_first: bool = True, has_last: bool = True
    ) -> tuple[Parameter, ...]:
        """Tensors of the given layers on one rank of a layout. Raises: SpecError for sizes that do not divide.

        has_first, has_last: whether the rank holds the modules before the layers (embeddings, vision tower) and after
        them. A tied table that is only held at the end is listed there, as `lm_head`.
        """
        family, sizes, conditions = FAMILIES[self.architecture], compute_sizes(self, layout), self._conditions
        tensors = list(list_tensors(family.before, sizes, conditions)) if has_first else []
        by_kind: dict[frozenset[str], list[Parameter]] = {}
        for layer in layers if layers is not None else range(self.num_layers):
            kind = conditions | self._layer_conditions(layer)
            if kind not in by_kind:  # layers of one kind share their tensors: a model may have 10,000 layers
                by_kind[kind] = list_tensors(family.layer, sizes, kind)
            tensors += add_prefix(f"{family.prefix}{layer}.", by_kind[kind])
        if has_last:
            tensors += list_tensors(family.after, sizes, conditions if has_first else conditions - {"tied"})
        for old, new in family.wrapper:
            tensors = [
                rename_tensor(tensor, new + tensor.name.removeprefix(old)) if tensor.name.startswith(old) else tensor
                for tensor in tensors
            ]
        towers = [tower for tower in (self.vision, self.audio) if tower and has_first]
        return (*(tensor for tower in towers for tensor in list_tower_tensors(tower)), *tensors)

    @cached_property
    def _conditions(self) -> frozenset[str]:
        condition_holds = {
            "tied": self.has_tied_embeddings,
            "qkv_bias": self.has_qkv_bias,
            "output_bias": self.has_output_bias,
            "qk_norm": self.has_qk_norm,
            "compressed_q": self.latent_attention is not None and self.latent_attention.q_rank > 0,
            "per_layer": self.per_layer_input is not None,
            "shared": self.experts is not None and self.experts.shared_intermediate_size > 0,
        }
        fixed = FAMILIES[self.architecture].conditions - frozenset(condition_holds)
        return fixed | frozenset(self.options) | {name for name, holds in condition_holds.items() if holds}

    @cached_property
    def _layer_sets(self) -> tuple[frozenset[int], frozenset[int]]:
        experts = frozenset(self.experts.layers) if self.experts else frozenset()
        return experts, frozenset(self.indexer.layers) if self.indexer else frozenset()

    def _layer_conditions(self, layer: int) -> set[str]:
        experts, indexers = self._layer_sets
        kind = self.attention_kind(layer)
        names = {FULL, LINEAR} if kind == PARALLEL else {kind}
        if self.reuses_keys(layer) and self.shared_keys:
            names |= {"shared_keys", "wide"} if self.shared_keys.widens_mlp else {"shared_keys"}
        return names | ({"experts"} if layer in experts else set()) | ({"indexer"} if layer in indexers else set())


def model_from_config(config: dict[str, Any], *, where: str) -> ModelSpec:
    """ModelSpec of a parsed `config.json`, of any known architecture. Raises: SpecError."""
    return share_equal_model(ModelSpec(**model_fields(config, where=where)))


@lru_cache(maxsize=64)
def share_equal_model(model: ModelSpec) -> ModelSpec:
    """An equal model that was read before and already has its tensors listed, or else this one.

    A plan looks models up in caches thousands of times: identical objects compare fast.
    """
    return model


def read_model(path: Path, *, may_classify: bool = False) -> ModelSpec:
    """ModelSpec of a Hugging Face folder or its `config.json`. Raises: SpecError. No code in it is executed.

    may_classify: whether a sequence classifier is allowed, which is read as the language model of its family.
    """
    file = path / "config.json" if path.is_dir() else path
    config = read_config(file)
    return model_from_config(_as_language_model(config) if may_classify else config, where=str(file))


def _as_language_model(config: dict[str, Any]) -> dict[str, Any]:
    """A sequence classifier's config as that of the language model of its family: they differ only in the head."""
    names = config.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        return config
    return {**config, "architectures": [names[0].replace("ForSequenceClassification", "ForCausalLM")]}


def load_model(folder: Path) -> ModelSpec:
    """ModelSpec of a folder that the runtime may train and serve. Raises: SpecError naming the key.

    A vision-language model is read as its language part, since prompts are texts. Whether it runs is checked before a
    run (`rlplan.runtime.admission`).
    """
    return _runnable(_read_folder(folder), str(folder / "config.json"))


def has_vision_tower(folder: Path) -> bool:
    """Whether a folder holds a vision-language model, of which a run trains the language part. Raises: SpecError."""
    return is_vision_language(_read_folder(folder))


def is_for_images(folder: Path) -> bool:
    """Whether runs accept images in prompts for a folder's model. Raises: SpecError."""
    return takes_images(_read_folder(folder))


def load_with_tower(folder: Path) -> ModelSpec:
    """ModelSpec of a vision-language model including its tower. Raises: SpecError."""
    return model_from_config(_read_folder(folder), where=str(folder))


def load_scalar_base(folder: Path) -> ModelSpec:
    """ModelSpec of a sequence classifier, or of a language model that becomes one. Raises: SpecError.

    The result is the language model of the same family, which differs only in the head.
    """
    config = _as_language_model(language_config(_read_folder(folder)))
    where = str(folder / "config.json")
    model = _runnable(config, where)
    if model.architecture in NO_CLASSIFIER:
        raise SpecError(
            f"{model.architecture} has no scalar head",
            where=f"{where}: architectures",
            rule="transformers has a sequence classifier of the family",
            way_out="take a value or reward model of another family",
        )
    return model


@lru_cache(maxsize=64)
def replace_positions(model: ModelSpec, max_position_embeddings: int) -> ModelSpec:
    """The same decoder with another maximum length. A table of learned positions has that many rows."""
    return type(model)(**{**model.model_dump(), "max_position_embeddings": max_position_embeddings})


def _read_folder(folder: Path) -> dict[str, Any]:
    """The config in a folder or file. A missing folder `models/ORG/NAME` stands for the bundled model of that id.

    So a job can be planned on a machine without its models. Raises: SpecError.
    """
    if not folder.exists():
        entry = load_catalogue().get("/".join(folder.parts[-2:]))
        if entry is not None:
            return entry.config
    return read_config(folder if folder.is_file() else folder / "config.json")


def _runnable(config: dict[str, Any], where: str) -> ModelSpec:
    """The model, unless something in its config rules out running it. A probe checks later whether it really runs."""
    config = language_config(config)
    architecture = known_architecture(config, where)
    model = model_from_config(config, where=where)
    for key, is_refused, rule in (
        (
            "architectures",
            model.vision is not None,
            "a decoder, or a vision-language model whose language part is one that runs",
        ),
        ("architectures", model.per_layer_input is not None, "one embedding, read before the first layer"),
        ("architectures", not _names_as_llama(model), "modules named as Llama's: model.layers, lm_head"),
        (
            "architectures",
            model.linear_attention is not None,
            "attention: recurrent states would leak between packed sequences",
        ),
        ("architectures", model.indexer is not None, "attention to every token, or to a window"),
        ("layer_types", "chunked" in model.attention_kinds, "attention to every token, or to a window"),
        ("lm_head_bias", "head_bias" in model.options, "a head without a bias"),
        ("quantization_config", model.quantization is not None, "weights that are not quantised"),
    ):
        if is_refused:
            value = config.get(key)
            what = (
                f"architecture {architecture!r}"
                if key == "architectures"
                else f"{key} is {shorten_value(value)}, which"
            )
            raise SpecError(
                f"{what} can be planned but not run",
                where=f"{where}: {key}",
                rule=rule,
                way_out="run another model",
            )
    return model


def _names_as_llama(model: ModelSpec) -> bool:
    return all(
        tensor.name.startswith(("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."))
        for tensor in model.tensors
    )
