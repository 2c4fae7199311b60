"""The configs of the bundled models by hub id.

In: `rlplan/spec/architectures/*.json`, which have the relevant keys of each `config.json`, the published number of
parameters against which tests check them, and their source. Out: catalogue entries. Left out: shapes (catalogue.py).
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from rlplan.spec.base import Spec

FOLDER = Path(__file__).resolve().parent.parent / "architectures"


class CatalogueEntry(Spec):
    """A bundled model."""

    id: str
    """Hub id of the model."""
    num_parameters: int
    """Published number of parameters, which the config must give."""
    source: str
    """Origin of the config."""
    like: str | None = None
    """Model whose config this one extends."""
    config: dict[str, Any]
    """Contents of config.json, including those of `like`."""


@cache
def load_catalogue() -> dict[str, CatalogueEntry]:
    """Every bundled model by id.

    >>> len(load_catalogue()) >= 60
    True
    """
    raw: dict[str, dict[str, Any]] = {}
    for path in sorted(FOLDER.glob("*.json")):
        data = json.loads(path.read_text("utf-8"))
        for model in data["models"]:
            assert model["id"] not in raw, f"{model['id']} occurs twice in the catalogue"
            raw[model["id"]] = model | {"source": data["sources"][model["source"]]}
    return {name: CatalogueEntry(**model | {"config": _merge_base(raw, name)}) for name, model in raw.items()}


def _merge_base(raw: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    model = raw[name]
    base = _merge_base(raw, model["like"]) if "like" in model else {}
    return {**base, **model["config"]}
