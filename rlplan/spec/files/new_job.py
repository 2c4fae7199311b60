"""A starter job as text with comments, for a CPU host or GPUs, with the user's data and rewards or generated ones.

In: a few answers. Out: files by name: the job, its schema for editors, and sample rows and a reward function if the
user has none. Left out: writing the files, asking the questions (`rlplan init`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Literal

from rlplan.errors import SpecError, did_you_mean
from rlplan.spec.algorithms import ALGORITHMS, DEFAULT
from rlplan.spec.declaration import NUM_GIVEN
from rlplan.spec.files.job_forms import expand_hardware
from rlplan.spec.files.job_schema import HEADER, NAME, job_schema
from rlplan.spec.files.yaml import read_yaml
from rlplan.spec.hardware.catalogue import is_cpu_host
from rlplan.spec.parts.workload import WorkloadSpec
from rlplan.spec.typed import default_overrides
from rlplan.units import GIB

CPU_MODEL, GPU_MODEL = "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-7B-Instruct"
CPU = "cpu-host"
RewardKind = Literal["answer", "math", "code", "function"]
ROWS, FUNCTION = "train.jsonl", "reward.py"
NUM_ROWS = 200
SIZES = ("num_steps", "num_prompts_per_step", "num_samples_per_prompt", "max_prompt_len", "max_response_len")
"""Keys of the workload that a starter job writes out."""


@dataclass(frozen=True)
class Answers:
    """Answers from which a starter job is built."""

    hardware: str = CPU
    """Hardware as in a job: `8xH100`, or `cpu-host`."""
    model: str | None = None
    """Hub id or path of the model; None: a small model on a CPU host, a 7B model on GPUs."""
    algorithm: str = DEFAULT
    data: str | None = None
    """Prompts, relative to the job; None: sample rows with sums."""
    heldout: str | None = None
    """Held-out prompts, relative to the job."""
    prompt_column: str | None = None
    """Column of the prompts, if the data has none of the known layouts."""
    reward: RewardKind = "answer"
    name: str = "first"
    memory_bytes: int = 8 * GIB
    """Memory of the CPU host that the job may use."""
    num_cores: int = 2
    """Cores of the CPU host."""


def new_job(answers: Answers, job_name: str = "job.yaml") -> dict[str, str]:
    """Texts of the starter job's files by name, all in one folder. Raises: SpecError where an answer is unknown.

    >>> sorted(new_job(Answers(hardware="8xH100")))
    ['job.schema.json', 'job.yaml', 'train.jsonl']
    """
    if answers.algorithm not in ALGORITHMS:
        raise SpecError(
            f"algorithm '{answers.algorithm}' is unknown",
            where="--algorithm",
            rule=f"one of {', '.join(ALGORITHMS)}." + did_you_mean(answers.algorithm, ALGORITHMS),
            way_out="`rlplan docs algorithms` describes them",
        )
    profile = expand_hardware(answers.hardware, "--gpus")["profile"]  # raises SpecError for unknown hardware
    on_cpu = is_cpu_host(profile, where="--gpus")
    texts = read_yaml(Path(__file__).with_name("new_job.yaml"), "the texts of a new job")
    job_text = _job_text(answers, texts, job_name, on_cpu=on_cpu)
    files = {job_name: job_text, NAME: json.dumps(job_schema(), indent=1) + "\n"}
    if answers.reward == "function":
        files[FUNCTION] = texts["function"]
    if answers.data is None:
        files[ROWS] = _rows(answers, range(NUM_ROWS))
        if _needs_heldout(answers):
            files["heldout.jsonl"] = _rows(answers, range(NUM_ROWS, NUM_ROWS + 40), pairs=False)
    return files


def _needs_heldout(answers: Answers) -> bool:
    """Whether held-out prompts need a file of their own: data with judged answers has none, unless a reward model is
    trained.
    """
    return _has_pairs(answers) and not ALGORITHMS[answers.algorithm].trains_scalar


def _has_pairs(answers: Answers) -> bool:
    """Whether the algorithm learns from judged answers."""
    return ALGORITHMS[answers.algorithm].given in ("pair", "unpaired")


def _job_text(answers: Answers, texts: Mapping[str, Any], job_name: str, *, on_cpu: bool) -> str:
    declared, gib = ALGORITHMS[answers.algorithm], max(1, answers.memory_bytes // GIB)
    own = answers.heldout or ("heldout.jsonl" if _needs_heldout(answers) and answers.data is None else None)
    model = answers.model or (CPU_MODEL if on_cpu else GPU_MODEL)
    keys = {"hardware": answers.hardware, "policy": model, "algorithm": answers.algorithm}
    sizes = dict(word.split("=") for word in default_overrides(keys, ()))
    steps, prompts, samples, prompt_len, response_len = (
        int(sizes.get(f"workload.{key}", getattr(WorkloadSpec.create_default(), key))) for key in SIZES
    )
    words = {
        "header": HEADER.format(NAME),
        "job": job_name,
        "name": answers.name,
        "model": model,
        "algorithm": answers.algorithm,
        "other_algorithms": ", ".join(name for name in ALGORITHMS if name != answers.algorithm),
        "prompts": answers.data or ROWS,
        "steps": steps,
        "num_prompts": prompts,
        "num_samples": NUM_GIVEN[declared.given] if declared.given else samples,
        "prompt_len": prompt_len,
        "response_len": response_len,
    }
    hardware = {
        "hardware": answers.hardware,
        "num_devices": max(1, min(2, answers.num_cores)),  # of a CPU host
        "memory": f"{gib}GiB",
    }
    parts = {
        "hardware": Template(texts["cpu_host" if on_cpu else "gpus"]).substitute(hardware),
        "heldout": Template(texts["heldout"]).substitute(heldout=own) if own else texts["no_heldout"],
        "columns": Template(texts["prompt_column"]).substitute(prompt_column=answers.prompt_column)
        if answers.prompt_column
        else "",
        "rewards": texts["no_rewards"] if declared.trains_scalar else texts["rewards"][answers.reward],
    }
    return Template(texts["job"]).substitute(words | parts)


def _rows(answers: Answers, numbers: range, *, pairs: bool | None = None) -> str:
    """Sample rows with sums, whose right answers are known."""
    form = "\\boxed{...}" if answers.reward == "math" else "<answer>...</answer>"
    lines = []
    for number in numbers:
        a, b = 10 + number * 7 % 89, 10 + number * 31 % 83
        row: dict[str, str] = {"prompt": f"What is {a} + {b}? Write the number as {form}.", "answer": str(a + b)}
        if answers.reward == "code":
            row = {
                "prompt": f"Write a Python function add() that returns {a} + {b}, in a block of code.",
                "answer": f"assert add() == {a + b}",
            }
        if _has_pairs(answers) if pairs is None else pairs:
            right, wrong = (form.replace("...", str(value)) for value in (a + b, a + b + 10))
            row |= {"chosen": right, "rejected": wrong}
        elif ALGORITHMS[answers.algorithm].given:
            row["completion"] = form.replace("...", str(a + b))
        lines.append(json.dumps(row))
    return "\n".join(lines) + "\n"
