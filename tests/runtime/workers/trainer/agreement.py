"""Comparison of live trainer ranks with one rank alone, and with the plan."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlplan.vocabulary import PERSISTENT_KINDS
from tests.factories import make_plan
from tests.runtime.live.live_ranks import exercise

Overrides = Mapping[str, Any]

RATE = {"algorithm.learning_rate": 1e-4}
"""Small, so that rounding is not made into steps."""


def select_cases(cases: Mapping[str, Overrides], request: pytest.FixtureRequest) -> dict[str, Overrides]:
    """The cases that a test of this file names which is to run: those of the night cost nothing by day."""
    items = [item for item in request.session.items if item.path == request.path]
    named = {value for item in items if isinstance(item, pytest.Function) for value in parameters(item)}
    return {name: case for name, case in cases.items() if name in named}


def parameters(item: pytest.Function) -> list[str]:
    callspec = getattr(item, "callspec", None)
    return [value for value in callspec.params.values() if isinstance(value, str)] if callspec else []


def alone_and_together(
    cases: Mapping[str, Overrides], shared: Overrides, folder: Path, *, is_fresh: bool = False
) -> dict[str, tuple[Any, list[Any]]]:
    """Answers of one rank alone for each case, and of two ranks (fresh ones?) with `shared` in addition."""
    answers = []
    for num_ranks, more in ((1, RATE), (2, {**RATE, **shared})):
        asked = {name: {"exercise": "agree", "overrides": {**case, **more}} for name, case in cases.items()}
        ranks = folder / f"{num_ranks}"
        ranks.mkdir()
        answers.append(exercise(num_ranks, asked, ranks, is_fresh=is_fresh and num_ranks > 1))
    first, two = answers
    return {name: (first[name][0], two[name]) for name in cases}


def answer_with_one_rank(cases: Mapping[str, tuple[str, Overrides]], folder: Path) -> dict[str, Any]:
    """Answers of one rank for each case, an exercise with overrides."""
    asked = {name: {"exercise": what, "overrides": overrides} for name, (what, overrides) in cases.items()}
    return {name: answers[0] for name, answers in exercise(1, asked, folder).items()}


def check_states(overrides: Overrides, answers: list[Any]) -> None:
    """Every rank's states after its second step are what the plan says, to the byte."""
    plan = make_plan(**{"hardware.num_devices": len(answers), "algorithm.kl_coef": 0.0, **overrides})
    for rank, measured in enumerate(answers):
        rows = {
            row.kind: row.resident_bytes
            for row in plan.ledger.rows
            if (row.run_phase, row.action_id, row.process) == ("steady", "optimizer_step", f"policy_trainer/{rank}")
        }
        for kind in PERSISTENT_KINDS:
            assert measured["components"].get(kind.value, 0) == rows.get(kind, 0), kind
