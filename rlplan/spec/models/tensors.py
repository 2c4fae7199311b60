"""Tables of tensors: the notation in which a model family lists its parameters, and its expansion to names and shapes.

In: a table (text) and the sizes of one model. Out: `Parameter`s. Left out: values, dtypes, gradients.

A table has one tensor per line, in the order of the Hugging Face module, under a section that names its component:

    [attention]
    self_attn.q_proj.weight   q h
    self_attn.q_proj.bias     q       ? qkv_bias
    [router]
    mlp.gate.weight           =E h

Each word after the name is a dimension: a symbol, or a sum of products of symbols and numbers (`q+2*kv`). Symbols also
express sharding: `q`, `kv`, `I`, `E`, `V` and others shrink on a tensor- or expert-parallel rank, `h` and `d` do not,
and `=q` is whole on every rank. A rank's shapes follow from the same table with the rank's sizes. Conditions come after
`?` (all must hold; `!` negates); those of a whole section follow its name.

A matrix `….weight` of attention, an MLP, a shared expert or a tower belongs to a linear layer. A section's mark changes
that: `[vision plain]` has no linear layers, `[router linear]` has some, `[router buffer]` has tensors without gradient.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from math import prod


class Component(StrEnum):
    """Purpose of a tensor."""

    EMBEDDINGS = "embeddings"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"
    SHARED_EXPERTS = "shared_experts"
    ROUTER = "router"
    NORMS = "norms"
    HEAD = "head"
    VISION = "vision"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a checkpoint."""

    name: str
    """Name of the tensor in Hugging Face's module."""
    shape: tuple[int, ...]
    component: Component = Component.MLP
    """Purpose of the tensor."""
    is_buffer: bool = False
    """Whether the tensor is stored and loaded but gets no gradient, such as DeepSeek-V3's routing bias."""
    is_linear: bool = False
    """Whether the tensor is a linear layer's weight, which can have an adapter."""
    numel: int = field(init=False, repr=False, compare=False)
    """Number of elements, precomputed because a search reads it millions of times."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", prod(self.shape))


@dataclass(frozen=True, slots=True)
class Tensor:
    """One line of a table."""

    name: str
    """Name below the layer's prefix."""
    dimensions: tuple[str, ...]
    """Expressions over symbols."""
    component: Component
    is_buffer: bool
    is_linear: bool
    needs: frozenset[str]
    """Conditions that must hold."""
    refuses: frozenset[str]
    """Conditions that must not hold."""

    def applies(self, conditions: frozenset[str]) -> bool:
        """Whether a model, or a layer of it, has this tensor."""
        return self.needs <= conditions and not self.refuses & conditions


@dataclass(frozen=True)
class Sizes:
    """Values of the tables' symbols."""

    whole: Mapping[str, int]
    """Sizes of the whole model."""
    share: Mapping[str, int]
    """Sizes of one rank's share."""

    def dimension(self, expression: str) -> int:
        """Elements along one dimension.

        >>> sizes = Sizes(whole={"q": 8, "kv": 4}, share={"q": 4, "kv": 2})
        >>> sizes.dimension("q+2*kv"), sizes.dimension("=q")
        (8, 8)
        """
        numbers = self.whole if expression.startswith("=") else self.share
        terms = expression.removeprefix("=").split("+")
        return sum(prod(_factor(factor, numbers) for factor in term.split("*")) for term in terms)


def _factor(text: str, numbers: Mapping[str, int]) -> int:
    return int(text) if text.isdecimal() else numbers[text]


_WITH_LINEAR_LAYERS = (Component.ATTENTION, Component.MLP, Component.SHARED_EXPERTS, Component.VISION)


@lru_cache(maxsize=256)
def read_table(text: str) -> tuple[Tensor, ...]:
    """The lines of a table. An invalid table is a bug of rlplan: KeyError or ValueError."""
    tensors = []
    component, mark, section_words = Component.MLP, "", ""
    for line in text.splitlines():
        if line.startswith("["):
            title, _, section_words = line.strip()[1:-1].partition("?")
            name, _, mark = title.strip().partition(" ")
            component = Component(name)
        elif line.strip():
            left, _, words = line.partition("?")
            name, *dimensions = left.split()
            conditions = section_words.split() + words.split()
            needs = frozenset(word for word in conditions if not word.startswith("!"))
            refuses = frozenset(word[1:] for word in conditions if word.startswith("!"))
            is_matrix = len(dimensions) == 2 and name.endswith(".weight")
            is_linear = is_matrix and (mark == "linear" or (not mark and component in _WITH_LINEAR_LAYERS))
            tensors.append(Tensor(name, tuple(dimensions), component, mark == "buffer", is_linear, needs, refuses))
    return tuple(tensors)


def list_tensors(text: str, sizes: Sizes, conditions: frozenset[str]) -> list[Parameter]:
    """The tensors of a table that a model has, in order, with shapes.

    >>> table = "[attention]\\nq_proj.weight q h\\nq_proj.bias q ? qkv_bias"
    >>> numbers = {"q": 8, "h": 4}
    >>> [(t.name, t.shape) for t in list_tensors(table, Sizes(numbers, numbers), frozenset())]
    [('q_proj.weight', (8, 4))]
    """
    return [
        Parameter(
            tensor.name,
            tuple(map(sizes.dimension, tensor.dimensions)),
            tensor.component,
            tensor.is_buffer,
            tensor.is_linear,
        )
        for tensor in read_table(text)
        if tensor.applies(conditions)
    ]


def add_prefix(prefix: str, tensors: Iterable[Parameter]) -> Iterator[Parameter]:
    """The tensors with a prefix before their names."""
    return (rename_tensor(tensor, prefix + tensor.name) for tensor in tensors)


def rename_tensor(tensor: Parameter, name: str) -> Parameter:
    """The tensor with another name."""
    return Parameter(name, tensor.shape, tensor.component, tensor.is_buffer, tensor.is_linear)
