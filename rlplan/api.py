"""The complete Python API: the functions of `import rlplan`, each named after its command.

In: a job file, a plan, a bundle or a job as a mapping; or a model, an algorithm and GPUs by name. Out: frozen results
(results.py) with values, `as_json()` (the output of `--json`), `to_frame()` (needs the extra `report`) and a view for
notebooks. Left out: starting a run (`rlplan run`), which takes over the process.

Paths in a job file are relative to it; those of a mapping or a model's name are relative to the working directory. A
job that does not fit is an answer: `verdict` states it, and only `simulate` and `emit` raise, since they need a plan
that fits. Bytes are integers per device, or per host if all devices share its memory; seconds are floats. Errors are
those of rlplan.errors.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplan.comparison import Clusters, CompareResult, PriceSources, plan_clusters
from rlplan.errors import SpecError
from rlplan.planner.answers.changes import Listener
from rlplan.planner.plan import Plan, is_run_folder
from rlplan.reading import explain_path_errors
from rlplan.results import (
    EmitResult,
    EstimateResult,
    ExplainResult,
    PlannedResult,
    PlanResult,
    RunResult,
    ServingResult,
    SimulateResult,
    SolveResult,
    StepResult,
)
from rlplan.sources import JobWords, Question, is_job_path, is_plan_path, read_question
from rlplan.spec.files.job_file import override_job
from rlplan.spec.hardware.typed import is_hardware
from rlplan.spec.job import JobSpec

__all__ = [
    "CompareResult", "EmitResult", "EstimateResult", "ExplainResult", "PlanResult", "RunResult", "ServingResult",
    "SimulateResult", "SolveResult", "StepResult",
    "compare", "emit", "estimate", "explain", "explain_step", "load_run", "plan", "simulate", "solve",
]  # fmt: skip

JobSource = str | Path | Mapping[str, Any] | Plan | PlannedResult | ServingResult
"""Job file (.yaml), plan file or bundle; words (`qwen3 8b`); a job as a mapping; a plan, or a result that holds one."""
Overrides = Sequence[str] | Mapping[str, Any]
"""Keys of the job: `["rollout.tp=2"]` or `{"rollout.tp": 2}`; GPUs in words: `estimate("Qwen/Qwen3-8B", "8xH100")`."""


@explain_path_errors()
def estimate(
    job: JobSource | None = None,
    overrides: Overrides = (),
    *,
    model: str | None = None,
    algorithm: str | None = None,
    gpus: str | None = None,
) -> EstimateResult | ServingResult:
    """Memory of the best layout by phase, process and kind; for a standalone engine, the engine's memory.

    Raises: SpecError, NoFeasiblePlanError, HostError.

    model: a hub id, a folder or a config.json; gpus: `8xH100`. They describe a job or change the given one.
    """
    question = _build_question("estimate", job, overrides, (model, algorithm, gpus))
    if question.serves:
        return ServingResult(question.job, question.predict_engine())
    return EstimateResult(question.answer(), assumed=question.assumed)


@explain_path_errors()
def plan(
    job: JobSource | None = None,
    overrides: Overrides = (),
    *,
    model: str | None = None,
    algorithm: str | None = None,
    gpus: str | None = None,
    objective: str | None = None,
) -> PlanResult:
    """Choose a layout. objective: step_time (default), tokens_per_s, cost or gpus. Raises: as `estimate`."""
    question = _build_question("plan", job, overrides, (model, algorithm, gpus), objective)
    return PlanResult(question.answer(), assumed=question.assumed)


@explain_path_errors()
def explain(
    job: JobSource | None = None,
    overrides: Overrides = (),
    *,
    model: str | None = None,
    algorithm: str | None = None,
    gpus: str | None = None,
    changes: Overrides = (),
    more_gpus: bool = False,
) -> ExplainResult:
    """Explain the bottleneck of a plan and the effect of changes, each found by its own search. Raises: as `estimate`.

    changes: overrides to try, one by one and all together. more_gpus: whether to try 2, 4, 8 and 16 times the devices.
    """
    from rlplan.planner.answers.changes import check_changes
    from rlplan.planner.answers.explain import explain as explained

    best = _build_question("explain", job, overrides, (model, algorithm, gpus)).answer()
    return ExplainResult(
        best, explained(best, check_changes(best.asked, _format_overrides(changes)), more_devices=more_gpus)
    )


@explain_path_errors()
def explain_step(
    measured: str | Path | RunResult,
    job: JobSource | None = None,
    overrides: Overrides = (),
    *,
    model: str | None = None,
    algorithm: str | None = None,
    gpus: str | None = None,
    fields: Sequence[str] = (),
) -> StepResult:
    """Compare a measured step with its prediction. measured: a run, its folder, or a log of verl, TRL, OpenRLHF, slime
    or NeMo-RL.

    job: the job that wrote the log; a run knows its own. fields: meanings of a log's own names, `rollout=gen_ms:ms`.
    Raises: as `estimate` and `load_run`; NoFeasiblePlanError if the job does not fit on its hardware.
    """
    from rlplan.foreign.logs.read import read_log
    from rlplan.planner.answers.measured_step import explain_step as explained

    if not isinstance(measured, RunResult) and Path(measured).is_dir():
        measured = load_run(measured)
    if isinstance(measured, RunResult):
        own = measured.plan.asked
        asked = override_job(own, _format_overrides(overrides)) if overrides else own
        report = explained(asked, measured.run.measured_step, measured.plan)
    else:
        step = read_log(Path(measured), fields)
        report = explained(_build_question("explain", job, overrides, (model, algorithm, gpus)).job, step)
    return StepResult(report.plan, report)


@explain_path_errors()
def solve(
    key: str,
    job: JobSource | None = None,
    overrides: Overrides = (),
    *,
    model: str | None = None,
    algorithm: str | None = None,
    gpus: str | None = None,
) -> SolveResult:
    """Find the largest value of a key that fits. key: max_response_len, num_samples_per_prompt or max_num_seqs.

    Raises: as `estimate`; NoFeasiblePlanError where no value fits.
    """
    from rlplan.planner.answers.solve import expand_key
    from rlplan.planner.answers.solve import solve as solved

    dotted = expand_key(key)
    solution = solved(_build_question("solve", job, overrides, (model, algorithm, gpus)).job, dotted)
    return SolveResult(solution.plan, solution)


@explain_path_errors()
def simulate(
    job: JobSource | None = None,
    overrides: Overrides = (),
    *,
    model: str | None = None,
    algorithm: str | None = None,
    gpus: str | None = None,
    steps: int = 20,
    seed: int = 0,
) -> SimulateResult | ServingResult:
    """Simulate steps with sampled response lengths; the same seed samples the same lengths.

    For a standalone engine (`framework: vllm`): latencies at `workload.num_concurrent_requests`.

    Raises: as `estimate`; NoFeasiblePlanError or EmitError where the plan does not fit or its framework cannot run it.
    """
    from rlplan.planner.answers.simulated_plan import simulate_plan
    from rlplan.planner.executable import check_fits

    question = _build_question("simulate", job, overrides, (model, algorithm, gpus))
    if question.serves:
        return ServingResult(question.job, question.predict_engine(), question.predict_load())
    best = question.answer()
    check_fits(best)
    return SimulateResult(best, simulate_plan(best, num_steps=steps, seed=seed))


@explain_path_errors()
def emit(job: JobSource, folder: str | Path, overrides: Overrides = (), *, target: str | None = None) -> EmitResult:
    """Write the bundle that runs; with a target, the files that start another framework or a cluster.

    target: verl, trl, openrlhf, slime, nemo-rl, vllm, deepspeed, slurm, skypilot, kuberay; by default the plan's
    framework. A job that leaves its framework open is planned for the target. Raises: EmitError where the target cannot
    express the plan, NoFeasiblePlanError, SpecError.
    """
    from rlplan.emit.bundle import write_bundle
    from rlplan.emit.launchers import LAUNCHERS, write_launcher
    from rlplan.foreign.export.folders import check_stack, set_framework, write_export
    from rlplan.planner.executable import check_fits, check_memory, require_executable
    from rlplan.planner.search import find_best_plan

    question, out = _build_question("emit", job, overrides), Path(folder)
    stack = ""
    if target is not None and target not in LAUNCHERS:
        stack = check_stack(target, LAUNCHERS)
    plan = question.plan or find_best_plan(
        set_framework(question.job, stack) if stack else question.job, with_others=False
    )
    if target is None and not plan.job.release.is_rlplan:
        stack = plan.job.release.name
    if stack:
        check_memory(plan) if plan.job.release.name != stack else check_fits(plan)
        write_export(plan, stack, out)
    elif target is None:
        write_bundle(require_executable(plan), out)
    else:
        write_launcher(require_executable(plan), target, out)
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    return EmitResult(out, tuple(files))


@explain_path_errors()
def load_run(folder: str | Path) -> RunResult:
    """Read a run's folder, whether or not the run has finished. Raises: SpecError where it is not one, or is
    damaged.
    """
    from rlplan.report.run_folder import read_run_folder

    run = read_run_folder(Path(folder))
    return RunResult(run.plan, run)


@explain_path_errors()
def compare(
    *sources: JobSource,
    overrides: Overrides = (),
    hardware: str | Sequence[str] = (),
    prices: PriceSources = (),
    budget_per_hour: float | None = None,
    listen: Listener | None = None,
) -> CompareResult:
    """Compare jobs, plans, simulations and runs (or their folders), with their costs.

    hardware: clusters (`8xH100,16xL40S`), on each of which every source is planned. budget_per_hour: dollars; clusters
    beyond it are left out. A GPU without a number (`H100`) means as many as the budget buys. prices: dollars per
    GPU-hour by GPU, or a file. listen: called for each cluster. Raises: as `plan` and `load_run`.
    """
    if not sources:
        raise _missing_subject("compare", "rlplan.compare('job.yaml', hardware='8xH100,16xL40S')")
    words = [
        source for source in sources if isinstance(source, str) and not is_job_path(source) and is_hardware(source)
    ]
    hardware = [*([hardware] if isinstance(hardware, str) and hardware else hardware), *words]
    sources = tuple(source for source in sources if source not in words)
    clusters = Clusters.parse(hardware, prices, budget_per_hour)
    if not clusters.is_asked:
        return CompareResult(tuple(_find_result(source, overrides) for source in sources), clusters)
    return plan_clusters(clusters, [_bind_job(source, overrides) for source in sources], listen)


def _bind_job(source: JobSource, overrides: Overrides) -> Callable[[str], JobSpec]:
    """A function from a cluster to a source's job on it."""
    if isinstance(source, str | Path) and (is_run_folder(Path(source)) or is_plan_path(Path(source))):
        source = _find_result(source, ())
    if isinstance(source, PlannedResult | Plan):
        asked = (source if isinstance(source, Plan) else source.plan).asked
        return lambda cluster: override_job(asked, [f"hardware={cluster}", *_format_overrides(overrides)])
    return lambda cluster: _build_question("compare", source, overrides, (None, None, cluster)).job


def _find_result(source: JobSource, overrides: Overrides) -> PlannedResult:
    if isinstance(source, PlannedResult) and not overrides:
        return source
    if isinstance(source, str | Path) and is_run_folder(Path(source)) and not overrides:
        return load_run(source)
    return plan(source, overrides)


def _build_question(
    verb: str,
    job: JobSource | None,
    overrides: Overrides,
    named: tuple[str | None, str | None, str | None] = (None, None, None),
    objective: str | None = None,
) -> Question:
    """The question for a function's arguments. named: model, algorithm, gpus. Raises: SpecError, HostError."""
    typed = _format_overrides(overrides)
    if isinstance(job, ServingResult):
        return Question(override_job(job.job, typed) if typed else job.job)
    if isinstance(job, PlannedResult | Plan):
        if typed or any((*named, objective)):
            change = next(iter(typed), None) or next(name for name in (*named, objective) if name)
            raise SpecError(
                f"'{change}' cannot change a plan",
                where=f"rlplan.{verb}",
                rule="overrides and names apply to jobs, not to plans",
                way_out="give the job file; rlplan.explain(plan, changes=[...]) shows the effect of a change",
            )
        plan = job if isinstance(job, Plan) else job.plan
        return Question(plan.asked, plan)
    if job is None and not any(named):
        raise _missing_subject(verb, f"rlplan.{verb}(model='Qwen/Qwen2.5-7B', algorithm='grpo', gpus='8xH100')")
    source = str(job) if isinstance(job, Path) else job
    return read_question(verb, JobWords(source, typed, *named), objective)


def _format_overrides(overrides: Overrides) -> list[str]:
    """Overrides as typed on a command line.

    >>> _format_overrides({"rollout.tp": 2, "training.zero_stage": "auto"}), _format_overrides("seed=1")
    (['rollout.tp=2', 'training.zero_stage="auto"'], ['seed=1'])
    """
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
    return [overrides] if isinstance(overrides, str) else list(overrides)


def _missing_subject(verb: str, example: str) -> SpecError:
    return SpecError(
        f"nothing to {verb}",
        where=f"rlplan.{verb}",
        rule="a job file, a mapping, a plan or a bundle, or a model and GPUs by name",
        way_out=f"for example: {example}",
    )
