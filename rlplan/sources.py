"""The subject of a command: a job on the command line, as a mapping or in a file, a plan, or a bundle.

In: the words of a command line, or the arguments of a function (api.py). Out: a Question. Left out: answering it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplan.containment import measure_budget, read_contained
from rlplan.errors import HostError, SpecError
from rlplan.reading import exists, is_file, open_regular, read_text
from rlplan.spec.files.job_file import Fetch, job_from, load_job
from rlplan.spec.files.stages import find_chosen_stage, list_open_inputs, stages_of
from rlplan.spec.files.yaml import read_yaml
from rlplan.spec.hardware.typed import is_hardware
from rlplan.spec.job import JobSpec
from rlplan.spec.models.catalogue import MAX_ID, find_bundled_id, find_model, find_nearest_id, load_catalogue
from rlplan.spec.typed import (
    Reading,
    add_override,
    default_overrides,
    lacks_bfloat16,
    read_typed,
    set_named,
    suggest_bundled,
)

if TYPE_CHECKING:
    from rlplan.planner.memo import Memo
    from rlplan.planner.plan import Plan
    from rlplan.planner.serving import Served, ServedLoad


RUNNING_VERBS = ("emit", "run")
MOST_ENTRIES = 1_000
"""Entries of a folder that are looked at for a model."""


@dataclass(frozen=True)
class JobWords:
    """The arguments that name a job: a file or a mapping with overrides, or a model, an algorithm and GPUs."""

    source: str | Mapping[str, Any] | None = None
    """Job file, plan or bundle; or a job as a mapping, with paths relative to the working directory."""
    overrides: list[str] | None = None
    """Overrides, each `KEY=VALUE`."""
    model: str | None = None
    algorithm: str | None = None
    gpus: str | None = None
    framework: str | None = None
    """Framework that the job is planned for, such as `verl` or `verl@0.9`."""


@dataclass(frozen=True)
class Question:
    """A job to plan, or a plan read from a file or bundle."""

    job: JobSpec
    """Job; for a plan, the job that it was made for."""
    plan: "Plan | None" = None
    """Plan that was read; None: it must still be found."""
    assumed: tuple[str, ...] = ()
    """Assumptions where the words of the question were open."""
    asks_cost: bool = False
    """Whether the words also ask for dollars."""

    @property
    def serves(self) -> bool:
        """Whether the job is a standalone engine, which has no plan; see `predict_engine` and `predict_load`."""
        return self.plan is None and self.job.release.serves

    def predict_engine(self) -> "Served":
        """The engine of a serving job, whether or not it starts. Raises: SpecError."""
        from rlplan.planner.serving import serve

        return serve(self.job)

    def predict_load(self) -> "ServedLoad":
        """The engine's latencies at the job's request concurrency. Raises: SpecError, NoFeasiblePlanError."""
        from rlplan.planner.serving import serve_load

        return serve_load(self.job)

    def answer(self, *, with_pareto: bool = False, memo: "Memo | None" = None) -> "Plan":
        """The plan that was read, or the best one, whatever its verdict. memo: shared with searches for similar jobs.

        Raises: SpecError, NoFeasiblePlanError.
        """
        from rlplan.planner.machine import open_search
        from rlplan.planner.search import find_best_plan

        if self.serves:
            clients = self.job.workload.num_concurrent_requests
            raise SpecError(
                f"framework is {self.job.framework}: a standalone engine, which has no step",
                where="framework",
                rule="only rlplan estimate and rlplan simulate support a standalone engine",
                way_out="framework=rlplan" + (" workload.num_concurrent_requests=null" if clients else ""),
            )
        if self.plan is None:
            return find_best_plan(self.job, with_pareto=with_pareto, memo=memo)
        if not with_pareto or self.plan.pareto:
            return self.plan
        return self.plan.model_copy(
            update={"pareto": open_search(self.job).restrict_to_plan(self.plan).find_pareto_front()}
        )


def read_question(verb: str, asked: JobWords, objective: str | None = None, fetch: Fetch | None = None) -> Question:
    """The question that the arguments ask. fetch: downloads models; by default only their configs.

    Raises: SpecError, HostError.
    """
    fetch = fetch or fetch_model  # configs are enough to plan
    named = {"policy": asked.model, "algorithm": asked.algorithm, "hardware": asked.gpus, "framework": asked.framework}
    if isinstance(asked.source, Mapping):
        reading = read_options(named, asked.overrides or (), objective)
        data = {**deepcopy(dict(asked.source)), **reading.keys}
        return Question(job_from(data, reading.overrides, fetch=fetch, where="the job"), assumed=tuple(reading.assumed))
    words = _join_words([*([] if asked.source is None else [asked.source]), *(asked.overrides or ())])
    if not words and not any(named.values()):
        raise _nothing_asked(verb)
    text = words[0] if words else ""
    if not words or not is_job_path(text):
        try:
            reading = read_typed(words, verb=verb, named=named)
        except SpecError as error:
            raise _name_modelled(error) from None
        keys = reading.keys | ({"objective": objective} if objective else {})
        if lacks_bfloat16(keys):
            keys["training"], keys["rollout"] = {"dtype": "float16"}, {"dtype": "float16"}
            reading.assumed.append(f"float16, for {keys['hardware']} has no bfloat16")
        overrides = [*default_overrides(keys, reading.overrides), *reading.overrides]
        try:
            job = job_from(keys, overrides, fetch=fetch)
        except HostError as error:
            raise suggest_bundled(reading, error, verb) from None
        assumed = [*reading.assumed, *([] if "algorithm" in keys else [job.algorithm.name])]
        if not any(word.startswith("workload.") for word in reading.overrides):
            assumed.append("default batch and lengths")
        return Question(job, assumed=tuple(assumed), asks_cost=reading.asks_cost)
    path, reading = Path(text), read_options(named, words[1:], objective)
    asks = tuple(f"{key}={json.dumps(value)}" for key, value in reading.keys.items())
    if is_plan_path(path):
        _refuse_changes(path, (*words[1:], *asks))
        plan = _read_plan(path)
        return Question(plan.asked, plan)
    if is_foreign(path):
        return Question(_import_job(path, reading, fetch), assumed=tuple(reading.assumed))
    if verb in RUNNING_VERBS:
        check_inputs(path, words[1:])
    job = load_job(path, (*reading.overrides, *asks), fetch=fetch)
    return Question(job, assumed=tuple(reading.assumed))


def _name_modelled(error: SpecError) -> SpecError:
    """The refusal of a question, whose way out names a model that can be planned."""
    from rlplan.memory.model.block_families import explain_refusal, find_modelled

    match = re.search(r"--model (\S+)", error.way_out)
    if match is None or match[1] not in load_catalogue() or not explain_refusal(model := find_model(match[1])):
        return error
    others = [name for name in re.findall(r"[\w.-]+/[\w.-]+", error.what) if name in load_catalogue()]
    modelled = (name for name in others if not explain_refusal(find_model(name)))
    way_out = error.way_out.replace(match[1], next(modelled, "") or find_modelled(model))
    return SpecError(error.what, where=error.where, rule=error.rule, way_out=way_out)


def _import_job(path: Path, reading: Reading, fetch: Fetch) -> JobSpec:
    """The job of another framework's file. Raises: SpecError."""
    from rlplan.foreign.check import Asked, import_job
    from rlplan.foreign.source import read_source
    from rlplan.foreign.unread.stacks import Nearest

    hardware, model = reading.keys.get("hardware", ""), reading.keys.get("policy")
    settings = read_source(path, None, (), Nearest(hardware, model))
    return import_job(settings, Asked(hardware, model, tuple(reading.overrides), fetch))[1]


def read_options(named: Mapping[str, str | None], words: Sequence[str], objective: str | None = None) -> Reading:
    """Read the options and overrides beside a job. Raises: SpecError for a word that is neither."""
    reading = Reading()
    bare = [word for word in words if "=" not in word]
    if bare and is_hardware(" ".join(bare)):  # `rlplan estimate job.yaml 8xH100`
        named = {**named, "hardware": " ".join(bare)}
        words = [word for word in words if "=" in word]
    for word in words:
        if "=" in word:
            add_override(reading, word)
        else:
            reading.overrides.append(word)  # refused later, by a message that says what an override is
    for key, value in named.items():
        if value is not None:
            set_named(reading, key, value)
    if objective:
        reading.keys["objective"] = objective
    return reading


def is_job_path(text: str) -> bool:
    """Whether a word is a path rather than a part of a question: it exists, or looks like a file's name."""
    if "=" in text:
        return False  # `policy=config.json` is an override
    path = Path(text)
    if exists(path):
        return not (path.is_dir() and is_model_folder(path))
    return path.suffix in (".yaml", ".yml", ".json") or text.startswith((".", "/", "~")) or text.endswith("/")


def is_foreign(path: Path) -> bool:
    """Whether a file is a script or a configuration of another framework, rather than a job or a plan."""
    from rlplan.foreign.source import PYTHON

    if not is_file(path) or path.suffix in (*PYTHON, ".sh", ".bash", ".sbatch", ".slurm", ".toml"):
        return is_file(path)
    if path.suffix not in (".yaml", ".yml"):
        return False
    try:
        if re.search(
            r"^[\"']?(?:policy|hardware|stages|model|gpus)[\"']?\s*:", read_text(path, "the job file"), re.MULTILINE
        ):
            return False  # a job; parsing it would take longer
        data = read_contained(lambda: read_yaml(path, "the job file", may_repeat=True), path)
    except SpecError:
        return False
    return isinstance(data, dict) and bool(data) and not {"policy", "hardware"} & data.keys()


def is_model_folder(path: Path) -> bool:
    """Whether a folder is a model's, rather than a bundle's or a run's."""
    return is_file(path / "config.json") and not is_file(path / "plan.json")


def is_plan_path(path: Path) -> bool:
    """Whether a path is a plan or a bundle, which overrides cannot change."""
    return path.is_dir() or path.suffix == ".json" or _is_json_by_content(path)


def _is_json_by_content(path: Path) -> bool:
    """Whether a file is a plan, whatever its name. A job written as JSON has the ending .yaml."""
    if path.suffix in (".yaml", ".yml") or not path.is_file():  # a pipe cannot be read twice
        return False
    with open_regular(path, "the file") as file:
        return file.read(1) == b"{"


def _read_plan(path: Path) -> "Plan":
    """The plan in a file or a bundle, which is read in a limited process. Raises: SpecError, EmitError."""
    from rlplan.planner.plan import Plan, read_plan

    def read() -> Plan:
        if not path.is_dir():
            return read_plan(path)
        from rlplan.emit.bundle import read_bundle

        read_bundle(path)
        return read_plan(path / "plan.json")

    return read_contained(read, path, Plan, measure_budget(path / "plan.json" if path.is_dir() else path))


def find_executable(verb: str, asked: JobWords, fetch: Fetch | None = None) -> "Plan":
    """The executable plan of a job, a plan or a bundle. Raises: SpecError, NoFeasiblePlanError, EmitError."""
    from rlplan.planner.executable import require_executable

    return require_executable(read_question(verb, asked, fetch=fetch).answer())


def check_inputs(path: Path, overrides: Sequence[str]) -> None:
    """Raises: SpecError for a stage of a job file that needs a model of an earlier stage that has not run."""
    stages = stages_of(read_yaml(path, "the job file"), str(path))
    for stage in (stage for stage in stages if stage.name == find_chosen_stage(overrides)):
        for key, name in list_open_inputs(stage, overrides, stages).items():
            raise SpecError(
                f"{key} is the model of stage {name}, which has not run yet",
                where=str(path),
                rule="a run needs every model; an estimate or a plan needs only its shape",
                way_out=f"rlplan run {path} runs all stages in order; {key}=RUN/{name}/policy uses that of a run",
            )


def _refuse_changes(path: Path, changes: tuple[str, ...]) -> None:
    if changes and path.is_dir():
        raise SpecError(
            f"override '{changes[0]}' cannot change the bundle {path}",
            where="command line",
            rule="overrides apply to job files; a bundle runs unchanged",
            way_out="run the job with the override, or emit a new bundle",
        )
    if changes:
        raise SpecError(
            f"override '{changes[0]}' cannot change the plan {path}",
            where="command line",
            rule="overrides apply to job files, not to plans",
            way_out=f"plan the job again with it; rlplan explain {path} --set {changes[0]} shows its effect",
        )


def _join_words(words: list[str]) -> list[str]:
    """Words of a command line, with `KEY = VALUE` joined into one.

    >>> _join_words(["job.yaml", "rollout.tp", "=", "2", "seed=", "1"])
    ['job.yaml', 'rollout.tp=2', 'seed=1']
    """
    joined: list[str] = []
    for word in words:
        if joined and (word.startswith("=") or (joined[-1].endswith("=") and "=" not in word)):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(sources, overrides) of a command line with several sources.

    >>> split_words(["one.yaml", "seed", "=", "1", "plan.json"])
    (['one.yaml', 'plan.json'], ['seed=1'])
    """
    joined = _join_words(list(words))
    overrides = [word for word in joined if "=" in word and not exists(Path(word))]
    return [word for word in joined if word not in overrides], overrides


def _nothing_asked(verb: str) -> SpecError:
    return SpecError(
        f"nothing to {verb}",
        where="command line",
        rule="a job file, a plan or a bundle, or a model and GPUs",
        way_out=f"for example: rlplan {verb} --model Qwen/Qwen2.5-7B --algorithm grpo --gpus 8xH100",
    )


def fetch_model(name: str, folder: Path, key: str) -> str:
    """The path of a hub id's config, after downloading it; a path or bundled id is unchanged. key: the key that names
    it.

    Raises: SpecError, HostError.
    """
    if find_bundled_id(name) or not is_hub_id(name, folder):
        return name
    from rlplan.runtime.models.hub import fetch_config

    return str(fetch_config(name, key))


def _holds_models(folder: Path) -> bool:
    """Whether a folder is one of models, rather than one that has the name of a hub's owner, as a checkout may."""
    entries = islice(folder.iterdir(), MOST_ENTRIES) if folder.is_dir() else ()
    contents = list(entries)
    return folder.is_file() or (folder.is_dir() and (not contents or any(map(is_model_folder, contents))))


def is_hub_id(name: str, folder: Path) -> bool:
    """Whether a model's name is a hub id, rather than a path relative to `folder`."""
    if name in load_catalogue():
        return not (folder / name).exists()
    parts = Path(name).parts if len(name) <= MAX_ID and "\0" not in name else ()
    if find_bundled_id(name) or len(parts) != 2 or (folder / name).exists() or _holds_models(folder / parts[0]):
        return False
    from rlplan.runtime.models.hub import looks_like_id

    return looks_like_id(name) and not find_nearest_id(name)  # a bundled id in another case is a typo
