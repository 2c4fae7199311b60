"""Lengths that a run has measured, as overrides of the next job's workload.

In: a run folder (`data.json` has the prompts' lengths, `lengths.json` the responses'). Out: dotted overrides.
Left out: whether the next run's data are alike; whoever names the run says so.
"""

import json
import math
from pathlib import Path
from typing import Any

from pydantic import Field

from rlplan.errors import SpecError
from rlplan.spec.base import Spec, read_json, validate
from rlplan.spec.parts.lengths import HistogramLengths


class PromptLengths(Spec):
    """What data.json says of the prompts, in tokens."""

    mean: float = Field(gt=0)
    max: int = Field(ge=1)


class RunLengths(Spec):
    """What lengths.json says of the responses."""

    mean_response_len: int = Field(ge=1)
    response_lengths: HistogramLengths


def lengths_of_run(folder: Path) -> tuple[str, ...]:
    """Overrides that make a plan count with a run's lengths: on GPUs with their distribution, else with their mean.

    Raises: SpecError when the folder holds none.
    """
    files = {"data.json": folder / "data.json", "lengths.json": folder / "lengths.json"}
    missing = [name for name, file in files.items() if not file.is_file()]
    if len(missing) == len(files):
        raise SpecError(
            f"{folder} holds no lengths",
            where="--lengths",
            rule="a run folder with data.json (lengths of prompts) or lengths.json (of responses)",
            way_out="name the folder of a run that has ended; `rlplan run` says where it is",
        )
    said: dict[str, Any] = {}
    if "data.json" not in missing:
        found = _part(files["data.json"], "prompt_len")
        said["mean_prompt_len"] = math.ceil(
            validate(PromptLengths, found, file=f"{files['data.json']}: prompt_len").mean
        )
    if "lengths.json" not in missing:
        responses = validate(
            RunLengths, read_json(files["lengths.json"], "the lengths"), file=str(files["lengths.json"])
        )
        said["response_lengths"] = responses.response_lengths.model_dump(mode="json")
        said["mean_response_len"] = responses.mean_response_len
    return tuple(f"workload.{key}={json.dumps(value)}" for key, value in said.items())


def _part(file: Path, key: str) -> Any:
    data = read_json(file, "the facts about the data")
    return data.get(key) if isinstance(data, dict) else data
