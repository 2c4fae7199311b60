"""The Python API, all of it: what `import rlplan` gives. A function does what the verb of that name does.

In: a job file, a plan, a bundle or a job as a mapping; or a model, an algorithm and GPUs by name. Out: frozen results,
(results.py), each with its values, `as_json()` (what `--json` prints), `to_frame()` (needs the extra `report`) and a
view for notebooks. Left out: starting a run (`rlplan run`), which takes over the process.

A job is relative to its file; a mapping and a model's name to the working directory. A job that does not fit is an
answer: `verdict` says so, and only what needs a plan that fits (`simulate`, `emit`) raises. Bytes are integers of one
device, or of the host whose memory all devices share; seconds are floats. Errors are those of rlplan.errors.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplan.comparison import Clusters, CompareResult, PriceSources, plan_on
from rlplan.errors import SpecError
from rlplan.planner.answers.changes import Listener
from rlplan.planner.plan import Plan, is_run_folder
from rlplan.reading import explaining_paths
from rlplan.results import (
    EmitResult,
    EstimateResult,
    ExplainResult,
    OfPlan,
    PlanResult,
    RunResult,
    ServingResult,
    SimulateResult,
    SolveResult,
    StepResult,
)
from rlplan.sources import JobWords, Question, is_made, read_question
from rlplan.spec.files.job_file import changed
from rlplan.spec.job import JobSpec

__all__ = [
    "CompareResult", "EmitResult", "EstimateResult", "ExplainResult", "PlanResult", "RunResult", "ServingResult",
    "SimulateResult", "SolveResult", "StepResult",
    "compare", "emit", "estimate", "explain", "explain_step", "load_run", "plan", "simulate", "solve",
]  # fmt: skip

JobSource = str | Path | Mapping[str, Any] | Plan | OfPlan | ServingResult
"""A job file (.yaml), a plan file, a bundle; a job as a mapping; a plan, or a result that holds one."""
Overrides = Sequence[str] | Mapping[str, Any]
"""`["rollout.tp=2"]` or `{"rollout.tp": 2}`: dotted keys of the job."""


@explaining_paths()
def estimate(
    job: JobSource | None = None,
    overrides: Overrides = (),
    *,
    model: str | None = None,
    algorithm: str | None = None,
    gpus: str | None = None,
) -> EstimateResult | ServingResult:
    """Bytes per phase, process and kind of the best layout; of a job that serves, of its engine.

    Raises: SpecError, NoFeasiblePlanError, HostError.

    model: a hub id, a folder or a config.json; gpus: `8xH100`. Either these or a job; with a job they change it.
    """
    question = _asked("estimate", job, overrides, (model, algorithm, gpus))
    if question.serves:
        return ServingResult(question.job, question.served())
    return EstimateResult(question.answer())


@explaining_paths()
def plan(
    job: JobSource | None = None,
    overrides: Overrides = (),
    *,
    model: str | None = None,
    algorithm: str | None = None,
    gpus: str | None = None,
    objective: str | None = None,
) -> PlanResult:
    """Choose a layout. objective: step_time (usual), tokens_per_s, cost or gpus. Raises: as `estimate`."""
    return PlanResult(_asked("plan", job, overrides, (model, algorithm, gpus), objective).answer())


@explaining_paths()
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
    """What binds, and what each change would bring: each is a search of its own. Raises: as `estimate`.

    changes: what if, each alone and all together. more_gpus: with 2, 4, 8 and 16 times the devices too.
    """
    from rlplan.planner.answers.changes import check_changes
    from rlplan.planner.answers.explain import explain as explained

    found = _asked("explain", job, overrides, (model, algorithm, gpus)).answer()
    return ExplainResult(found, explained(found, check_changes(found.asked, _typed(changes)), more_devices=more_gpus))


@explaining_paths()
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
    """Is a measured step normal? measured: a run, its folder, or a log of verl, TRL, OpenRLHF, slime or NeMo-RL.

    job: that wrote the log; a run knows its own. fields: what a log's own names mean, `rollout=gen_ms:ms`.
    Raises: as `estimate` and `load_run`; NoFeasiblePlanError where the job does not fit where it ran.
    """
    from rlplan.foreign.logs.read import read_log
    from rlplan.planner.answers.measured_step import explain_step as explained

    if not isinstance(measured, RunResult) and Path(measured).is_dir():
        measured = load_run(measured)
    if isinstance(measured, RunResult):
        own = measured.plan.asked
        asked = changed(own, _typed(overrides)) if overrides else own
        report = explained(asked, measured.run.measured_step, measured.plan)
    else:
        step = read_log(Path(measured), fields)
        report = explained(_asked("explain", job, overrides, (model, algorithm, gpus)).job, step)
    return StepResult(report.plan, report)


@explaining_paths()
def solve(
    key: str,
    job: JobSource | None = None,
    overrides: Overrides = (),
    *,
    model: str | None = None,
    algorithm: str | None = None,
    gpus: str | None = None,
) -> SolveResult:
    """The largest value of a key that still fits. key: max_response_len, num_samples_per_prompt or max_num_seqs.

    Raises: as `estimate`; NoFeasiblePlanError where no value fits.
    """
    from rlplan.planner.answers.solve import dotted_key
    from rlplan.planner.answers.solve import solve as solved

    dotted = dotted_key(key)
    found = solved(_asked("solve", job, overrides, (model, algorithm, gpus)).job, dotted)
    return SolveResult(found.plan, found)


@explaining_paths()
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
    """Play the steps with sampled response lengths; the same seed samples the same.

    Of a job that serves (`framework: vllm`): latencies of `workload.num_concurrent_requests` in flight.

    Raises: as `estimate`; NoFeasiblePlanError or EmitError where the plan does not fit or is refused.
    """
    from rlplan.planner.answers.simulated_plan import simulate_plan
    from rlplan.planner.executable import check_fits

    question = _asked("simulate", job, overrides, (model, algorithm, gpus))
    if question.serves:
        return ServingResult(question.job, question.served(), question.served_load())
    found = question.answer()
    check_fits(found)
    return SimulateResult(found, simulate_plan(found, num_steps=steps, seed=seed))


@explaining_paths()
def emit(job: JobSource, folder: str | Path, overrides: Overrides = (), *, target: str | None = None) -> EmitResult:
    """Write the bundle that will run; with a target, what another stack or a cluster is started with.

    target: verl, trl, openrlhf, slime, nemo-rl, vllm, deepspeed, slurm, skypilot, kuberay; by default the framework of
    the plan. A job that leaves its framework open is planned for the target. Raises: EmitError for what the target
    cannot say, NoFeasiblePlanError, SpecError.
    """
    from rlplan.emit.bundle import write_bundle
    from rlplan.emit.launchers import LAUNCHERS, write_launcher
    from rlplan.foreign.export.folders import check_stack, for_stack, render_export, write_texts
    from rlplan.planner.executable import check_fits, check_memory, executable_plan
    from rlplan.planner.search import best_plan

    question, out = _asked("emit", job, overrides), Path(folder)
    stack = ""
    if target is not None and target not in LAUNCHERS:
        stack = check_stack(target, LAUNCHERS)
    plan = question.plan or best_plan(for_stack(question.job, stack) if stack else question.job, with_others=False)
    if target is None and not plan.job.release.is_rlplan:
        stack = plan.job.release.name
    if stack:
        check_memory(plan) if plan.job.release.name != stack else check_fits(plan)
        write_texts(render_export(plan, stack).texts, out)
    elif target is None:
        write_bundle(executable_plan(plan), out)
    else:
        write_launcher(executable_plan(plan), target, out)
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    return EmitResult(out, tuple(files))


@explaining_paths()
def load_run(folder: str | Path) -> RunResult:
    """What a run left in its folder, finished or not. Raises: SpecError where it is none or a file is damaged."""
    from rlplan.report.run_folder import read_run_folder

    run = read_run_folder(Path(folder))
    return RunResult(run.plan, run)


@explaining_paths()
def compare(
    *sources: JobSource,
    overrides: Overrides = (),
    hardware: str | Sequence[str] = (),
    prices: PriceSources = (),
    budget_per_hour: float | None = None,
    listen: Listener | None = None,
) -> CompareResult:
    """Lay jobs, plans, simulations and runs (their folders too) side by side, with what each costs.

    hardware: clusters (`8xH100,16xL40S`); then each source is planned anew on each. budget_per_hour: dollars; clusters
    beyond it are left out, a kind alone (`H100`, or every kind with a price) is as many as it buys. prices: dollars of
    a GPU-hour by GPU, or a file of them. listen: told of each cluster. Raises: as `plan` and `load_run`.
    """
    if not sources:
        raise _nothing_to("compare", "rlplan.compare('job.yaml', hardware='8xH100,16xL40S')")
    clusters = Clusters.of(hardware, prices, budget_per_hour)
    if not clusters.is_asked:
        return CompareResult(tuple(_result_of(source, overrides) for source in sources), clusters)
    return plan_on(clusters, [_job_on(source, overrides) for source in sources], listen)


def _job_on(source: JobSource, overrides: Overrides) -> Callable[[str], JobSpec]:
    """From a cluster to the job of a source on it."""
    if isinstance(source, str | Path) and (is_run_folder(Path(source)) or is_made(Path(source))):
        source = _result_of(source, ())
    if isinstance(source, OfPlan | Plan):
        asked = (source if isinstance(source, Plan) else source.plan).asked
        return lambda cluster: changed(asked, [f"hardware={cluster}", *_typed(overrides)])
    return lambda cluster: _asked("compare", source, overrides, (None, None, cluster)).job


def _result_of(source: JobSource, overrides: Overrides) -> OfPlan:
    if isinstance(source, OfPlan) and not overrides:
        return source
    if isinstance(source, str | Path) and is_run_folder(Path(source)) and not overrides:
        return load_run(source)
    return plan(source, overrides)


def _asked(
    verb: str,
    job: JobSource | None,
    overrides: Overrides,
    named: tuple[str | None, str | None, str | None] = (None, None, None),
    objective: str | None = None,
) -> Question:
    """The question that a function's arguments ask. named: model, algorithm, gpus. Raises: SpecError, HostError."""
    typed = _typed(overrides)
    if isinstance(job, ServingResult):
        return Question(changed(job.job, typed) if typed else job.job)
    if isinstance(job, OfPlan | Plan):
        if typed or any((*named, objective)):
            raise SpecError(
                f"'{next(iter(typed), None) or next(one for one in (*named, objective) if one)}' cannot change a plan",
                where=f"rlplan.{verb}",
                rule="overrides and names are for jobs; a plan is not changed",
                way_out="give the job file, or rlplan.explain(plan, changes=[...]) asks what it would bring",
            )
        found = job if isinstance(job, Plan) else job.plan
        return Question(found.asked, found)
    if job is None and not any(named):
        raise _nothing_to(verb, f"rlplan.{verb}(model='Qwen/Qwen2.5-7B', algorithm='grpo', gpus='8xH100')")
    source = str(job) if isinstance(job, Path) else job
    return read_question(verb, JobWords(source, typed, *named), objective)


def _typed(overrides: Overrides) -> list[str]:
    """Overrides as they stand on a command line.

    >>> _typed({"rollout.tp": 2, "training.zero_stage": "auto"}), _typed("seed=1")
    (['rollout.tp=2', 'training.zero_stage="auto"'], ['seed=1'])
    """
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
    return [overrides] if isinstance(overrides, str) else list(overrides)


def _nothing_to(verb: str, example: str) -> SpecError:
    return SpecError(
        f"nothing to {verb}",
        where=f"rlplan.{verb}",
        rule="a job file, a mapping, a plan or a bundle, or a model and GPUs by name",
        way_out=f"for example: {example}",
    )
