"""Algorithm: the torch-free declaration of an algorithm, and how one is read from a user's own file.

In: keywords, or a Python file with `NAME = Algorithm(...)`. Out: a frozen value that the memory model, the planner, the
simulator and the runtime all read. Left out: the loss and the advantage themselves, found by name in
`rlplan.runtime.losses` or in the user's file.

A user's file is parsed and never executed, since planning must not run foreign code.
"""

import ast
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rlplan.errors import SpecError
from rlplan.reading import read_text
from rlplan.spec.base import Spec, validate
from rlplan.vocabulary import Role

POLICY_ALONE = (Role.POLICY,)
Given = Literal["", "answer", "unpaired", "pair"]
NUM_GIVEN: dict[Given, int] = {"answer": 1, "unpaired": 2, "pair": 2}
"""Rollouts per prompt that are made from the data's answers. A labelled answer is accompanied by an answer to another
prompt."""


class Algorithm(Spec):
    """The declaration of an algorithm."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_+]{0,63}$")
    source: str
    """The paper, or the upstream file, that defines it."""
    advantage: str
    """Name of the advantage in `rlplan.runtime.losses`."""
    loss: str
    """Name of the loss in `rlplan.runtime.losses`."""
    trained_roles: tuple[Role, ...] = POLICY_ALONE
    """Roles that are trained, the policy first."""
    min_samples_per_prompt: int = Field(default=1, ge=1)
    """Minimum group size: rollouts per prompt that the advantage compares."""
    num_baseline_samples: int = Field(default=0, ge=0, le=1)
    """Greedy rollouts per prompt in addition to the sampled ones. They are rewarded but not trained on (ReMax)."""
    given: Given = ""
    """Answers that the data set holds in place of rollouts: one to imitate, one labelled good or bad (unpaired
    preference), or a pair of a chosen and a rejected one. Empty if the policy generates."""
    joins_rollouts: bool = False
    """Whether rollouts of a prompt meet in one loss: a pair, or an answer and one to another prompt."""
    trains_scalar: bool = False
    """Whether the trained model scores whole answers by a scalar head, so that it never generates."""
    defaults: dict[str, float | int | bool | str] = Field(default={})
    """Defaults of keys of `algorithm:` that differ from AlgorithmSpec's."""

    @field_validator("trained_roles")
    @classmethod
    def _has_known_roles(cls, roles: tuple[Role, ...]) -> tuple[Role, ...]:
        if roles not in (POLICY_ALONE, (Role.POLICY, Role.VALUE)):
            raise ValueError("trained_roles is the policy, optionally followed by the value model")
        return roles

    @model_validator(mode="after")
    def _labelled_answers_are_joined(self) -> "Algorithm":
        if self.given == "unpaired" and not self.joins_rollouts:
            raise ValueError("given='unpaired' compares each answer with those to other prompts: joins_rollouts=True")
        return self

    @property
    def trains_pairs(self) -> bool:
        """Whether two answers to a prompt are trained on in one micro-batch."""
        return self.joins_rollouts and not self.has_baseline_answers

    @property
    def has_baseline_answers(self) -> bool:
        """Whether training rollouts are accompanied by answers to other prompts. These are scored before the passes of
        a mini-batch, for a baseline over the whole mini-batch, and get no gradient.
        """
        return self.given == "unpaired"

    def num_trained(self, num_rollouts: int, num_samples: int) -> int:
        """Rollouts that are trained on, out of `num_rollouts` with `num_samples` per prompt. Pairs are the best and the
        worst rollout of a prompt; baseline answers do not count.

        >>> Algorithm(name="a", source="", advantage="", loss="", joins_rollouts=True).num_trained(256, num_samples=8)
        64
        >>> kto = Algorithm(name="a", source="", advantage="", loss="", joins_rollouts=True, given="unpaired")
        >>> kto.num_trained(256, num_samples=2)
        128
        """
        if self.has_baseline_answers:
            return num_rollouts // num_samples
        return 2 * num_rollouts // num_samples if self.trains_pairs and num_samples > 2 else num_rollouts

    @property
    def has_rollouts(self) -> bool:
        """Whether the policy generates; otherwise the data set holds the answers."""
        return not self.given

    @property
    def has_value(self) -> bool:
        """Whether the algorithm trains a value model."""
        return Role.VALUE in self.trained_roles


def read_declaration(place: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """(absolute place, declaration as JSON) of `file.py:NAME`, relative to `folder`. Raises: SpecError."""
    file, _, name = place.rpartition(":")
    path = Path(file) if Path(file).is_absolute() else folder / file
    if not file or not name.isidentifier():
        raise _wrong(place, "a file and a name in it, such as my_algorithm.py:MINE", "write algorithm.path like that")
    tree = _parse(path)
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            declared = validate(Algorithm, _keywords(node.value, f"{path}: {name}"), file=f"{path}: {name}")
            return f"{path.resolve()}:{name}", declared.model_dump(mode="json")
    raise _wrong(f"{path} has no {name}", f"`{name} = Algorithm(...)` at the top level of the file", "correct the name")


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(read_text(path, "the algorithm's file"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _wrong(
            f"{path} is not Python: {str(error) or type(error).__name__}", "a Python file", "correct the file"
        ) from None


def _keywords(call: ast.expr, where: str) -> dict[str, Any]:
    """The keywords of `Algorithm(...)`: literals, or members of Role."""
    if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] != "Algorithm" or call.args:
        raise _wrong(where, "a call of Algorithm with only keyword arguments", "write NAME = Algorithm(name=..., ...)")
    try:
        return {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise _wrong(
            f"{where}: {error}", "literals, and members of Role: the file is parsed, not run", "write the value out"
        ) from None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Tuple | ast.List):
        return [_literal(element) for element in node.elts]
    # literal_eval accepts no attributes, so that members of Role are resolved here
    if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] == "Role":
        return Role[node.attr].value
    return ast.literal_eval(node)


def _wrong(what: str, rule: str, way_out: str) -> SpecError:
    return SpecError(what, where="algorithm.path", rule=rule, way_out=way_out)
