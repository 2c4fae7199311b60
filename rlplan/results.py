"""Results of the functions in api.py: frozen values with a table, JSON and a view for notebooks.

In: plans, explanations, simulations, runs, as the commands produce them. Out: facts in words, rows, JSON, dataframes,
HTML. Left out: computing anything. Bytes are integers, seconds floats.
"""

import html
import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rlplan.errors import EXTRAS, build_missing_extra
from rlplan.planner.answers.plan_results import diff_choices, estimate_as_json, list_overrides
from rlplan.planner.measured_errors import predict_step_interval
from rlplan.planner.plan import Plan, dump_plan, write_plan
from rlplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas as pd

    from rlplan.planner.answers.explain import Explanation
    from rlplan.planner.answers.measured_step import StepReport
    from rlplan.planner.answers.solve import Solution
    from rlplan.planner.serving import Served, ServedLoad
    from rlplan.report.run_folder import RunFolder
    from rlplan.simulate.result import SimulationResult
    from rlplan.spec.job import JobSpec

MAX_SHOWN_ROWS, MAX_SHOWN_COLUMNS = 6, 8
"""Rows and columns of a result shown in a notebook; `to_frame()` has all."""


class Result(ABC):
    """Methods of every result."""

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Key facts in words."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """The result's table, one mapping per row."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """The output of the command with `--json`, if there is such a command."""

    def to_frame(self) -> "pd.DataFrame":
        """The result's table as a dataframe. Raises: HostError without pandas."""
        return _dataframes().frame(self.rows())

    def __repr__(self) -> str:
        """The key facts: the default repr of a plan has thousands of rows."""
        return f"{type(self).__name__}({'; '.join(f'{key}: {value}' for key, value in self.facts().items())})"

    def _repr_html_(self) -> str:
        from rlplan.report.inline import format_value

        facts = "".join(f"<tr>{_cell('th', key)}{_cell('td', value)}</tr>" for key, value in self.facts().items())
        rows = self.rows()
        shown = [row[:MAX_SHOWN_COLUMNS] for row in (list(row.items()) for row in rows[:MAX_SHOWN_ROWS])]
        head = "".join(_cell("th", key) for key, _ in (shown[0] if shown else ()))
        body = "".join(f"<tr>{''.join(_cell('td', format_value(*cell)) for cell in row)}</tr>" for row in shown)
        rest = f"<p>{len(shown)} of {len(rows)} rows; to_frame() has all.</p>" if len(rows) > len(shown) else ""
        table = f"<details><summary>Rows</summary><table><tr>{head}</tr>{body}</table>{rest}</details>"
        return f"<table>{facts}</table>{self._draw()}{table if rows else ''}"

    def _draw(self) -> str:
        """Draw a chart for a notebook; empty if the result has none."""
        return ""


@dataclass(frozen=True, repr=False)
class PlannedResult(Result):
    """A result that belongs to a plan."""

    plan: Plan
    """Plan with choice, schedule, ledger and timing (rlplan.planner.plan)."""
    assumed: tuple[str, ...] = field(default=(), kw_only=True)
    """Assumptions where the question was open."""

    @property
    def verdict(self) -> str:
        """`fits`, `fits in expectation only`, `does not fit` or `refused`."""
        return self.plan.verdict.value

    @property
    def fits(self) -> bool:
        """Whether the plan fits and its framework can run it; with `limits.accepts_oom_risk`, if it fits on average."""
        return self.plan.fits

    @property
    def peak_bytes(self) -> int:
        """Expected peak of the device with the least free memory."""
        return self.plan.binding.num_bytes

    @property
    def capacity_bytes(self) -> int:
        """Memory of that device."""
        return self.plan.binding_capacity

    @property
    def step_s(self) -> float | None:
        """Seconds of a typical step; None if the profile has no rates."""
        return self.plan.seconds or None

    @property
    def overrides(self) -> dict[str, str]:
        """The layout as overrides of the job."""
        return list_overrides(self.plan.choice, self.plan.job, self.plan.asked)

    @property
    def remedies(self) -> tuple[str, ...]:
        """Overrides, each of which would make the plan fit, mildest first; empty if it fits at the high end."""
        return tuple(remedy.change for remedy in self.plan.remedies)

    def facts(self) -> dict[str, str]:
        """Model and devices, verdict, step, peak, layout."""
        return {
            "job": f"{self.plan.model_name}, {self.plan.job.algorithm.name}, {self.plan.devices}",
            "verdict": self.verdict,
            "step": self._describe_step(),
            "peak": f"{format_bytes(self.peak_bytes)} of {format_bytes(self.capacity_bytes)}",
            "layout": " ".join(f"{key}={value}" for key, value in self.overrides.items()),
            **({"assumed": "; ".join(self.assumed)} if self.assumed else {}),
            **({"would fit with": "; or ".join(self.remedies[:3])} if self.remedies else {}),
        }

    def _draw(self) -> str:
        from rlplan.report.inline import draw_timeline

        return draw_timeline(self.plan.timing.step) if self.plan.timing is not None else ""

    def _describe_step(self) -> str:
        interval = predict_step_interval(self.plan)
        if self.step_s is None or interval is None or self.step_s != self.plan.seconds:
            return "unknown" if self.step_s is None else format_seconds(self.step_s)
        return f"{format_seconds(self.step_s)}, range {format_seconds(interval[0])} to {format_seconds(interval[1])}"

    def build_comparison_row(self) -> dict[str, Any]:
        """The result's row in a comparison."""
        asked = self.plan.asked
        return {
            "name": self.plan.model_name if asked.name == type(asked).model_fields["name"].default else asked.name,
            "kind": "planned",
            "devices": self.plan.devices,
            "verdict": self.verdict,
            "step_s": self.step_s,
            "tokens_per_s": self.plan.tokens_per_s or None,
            "peak_bytes": self.peak_bytes,
            "capacity_bytes": self.capacity_bytes,
            "step_interval_s": predict_step_interval(self.plan),
            "peak_interval_bytes": self.plan.interval(),
        }


@dataclass(frozen=True, repr=False)
class EstimateResult(PlannedResult):
    """Bytes by kind, process and action. A row: one row of the ledger."""

    def rows(self) -> list[dict[str, Any]]:
        """Rows with run_phase, action_id, phase, process, device, role, kind, space, resident_bytes, peak_bytes,
        provenance and so on.
        """
        return [dict(row) for row in self.as_json()["rows"]]

    def as_json(self) -> dict[str, Any]:
        """The output of `rlplan estimate --json`."""
        return estimate_as_json(self.plan)


@dataclass(frozen=True, repr=False)
class PlanResult(PlannedResult):
    """The chosen layout and the runners-up. A row: one layout."""

    def rows(self) -> list[dict[str, Any]]:
        """Rows with rank (0: chosen), seconds, peak_bytes, headroom_bytes, verdict, differs (overrides that lead to the
        layout).
        """
        plan = self.plan
        chosen = [(plan.seconds, plan.binding.num_bytes, plan.headroom_bytes, plan.fit, "")]
        chosen += [
            (
                layout.seconds,
                layout.peak_bytes,
                layout.headroom_bytes,
                layout.verdict,
                diff_choices(layout.choice, plan.choice, plan.job, plan.asked),
            )
            for layout in plan.runners_up
        ]
        keys = ("seconds", "peak_bytes", "headroom_bytes", "verdict", "differs")
        return [
            {"rank": rank} | dict(zip(keys, (*row[:3], row[3].value, row[4]), strict=True))
            for rank, row in enumerate(chosen)
        ]

    def as_json(self) -> dict[str, Any]:
        """The contents of the plan file, with paths relative to the working directory."""
        return dict(json.loads(dump_plan(self.plan, Path.cwd())))

    def write(self, path: str | Path) -> Path:
        """Write the plan as `rlplan plan -o` does. Raises: SpecError where that fails."""
        write_plan(self.plan, Path(path))
        return Path(path)


@dataclass(frozen=True, repr=False)
class ExplainResult(PlannedResult):
    """The bottleneck of a plan, and the effect of changes. A row: one change."""

    explanation: "Explanation"
    """The complete output of `rlplan explain`."""

    def rows(self) -> list[dict[str, Any]]:
        """Rows with change, words, num_devices, verdict, seconds, headroom_bytes, why, way_out; the user's changes
        first.
        """
        parts = (self.explanation.asked, self.explanation.what_ifs, self.explanation.families)
        return [change.as_json() for part in parts for change in part]

    def as_json(self) -> dict[str, Any]:
        """The output of `rlplan explain --json`."""
        return self.explanation.as_json()


@dataclass(frozen=True, repr=False)
class SolveResult(PlannedResult):
    """The largest value of a key that fits, with its plan. A row: one value that was tried."""

    solution: "Solution"
    """Value, the limit that the next value breaks, and all values that were tried."""

    @property
    def value(self) -> int | str:
        """The largest value that fits; a model's id for `policy`."""
        return self.solution.value

    def rows(self) -> list[dict[str, Any]]:
        """Rows with change, words, num_devices, verdict, seconds, headroom_bytes, why, way_out; in the order of the
        search.
        """
        return [attempt.as_json() for attempt in self.solution.asked]

    def facts(self) -> dict[str, str]:
        """The override, then the plan's facts."""
        return {"largest that fits": self.solution.override} | super().facts()

    def as_json(self) -> dict[str, Any]:
        """The output of `rlplan solve --json`."""
        return self.solution.as_json()


@dataclass(frozen=True, repr=False)
class SimulateResult(PlannedResult):
    """Steps in simulated time. A row: one step."""

    simulation: "SimulationResult"
    """The complete output of `rlplan simulate`."""

    def rows(self) -> list[dict[str, Any]]:
        """Rows with step (from 1) and seconds."""
        return [{"step": step, "seconds": seconds} for step, seconds in enumerate(self.simulation.step_s, 1)]

    @property
    def step_s(self) -> float | None:
        """Mean seconds of the simulated steps."""
        return self.simulation.mean_step_s

    def as_json(self) -> dict[str, Any]:
        """The output of `rlplan simulate --json`."""
        return self.simulation.as_json()

    def build_comparison_row(self) -> dict[str, Any]:
        """The result's row in a comparison."""
        trained = self.simulation.num_tokens / self.simulation.seconds if self.simulation.seconds else None
        return super().build_comparison_row() | {"kind": "simulated", "tokens_per_s": trained}


@dataclass(frozen=True, repr=False)
class RunResult(PlannedResult):
    """A finished or running run and its plan. A row: one step with its timings."""

    run: "RunFolder"
    """Plan, trace, metrics, timings and final status (rlplan.report.run_folder)."""

    @property
    def state(self) -> str:
        """`finished`, `interrupted`, `failed`, `running` or `unknown`."""
        return self.run.status.state

    @property
    def step_s(self) -> float | None:
        """Measured seconds of a step: the median, without the first step if there are others; None before the first."""
        return self.run.measured_step.step_s

    def rows(self) -> list[dict[str, Any]]:
        """The run's timings as recorded."""
        return [dict(row) for row in self.run.timings]

    def to_frame(self) -> "pd.DataFrame":
        """A dataframe with a row per step: metrics, seconds, memory. Raises: HostError without pandas."""
        return _dataframes().steps(self.run)

    def memory_frame(self) -> "pd.DataFrame":
        """Every measured memory sample with its prediction, as in a report. Raises: HostError without pandas."""
        return _dataframes().joined_memory(self.run)

    def facts(self) -> dict[str, str]:
        """The plan's facts, and the progress of the run."""
        measured = "unknown" if self.step_s is None else f"{format_seconds(self.step_s)}, measured"
        return super().facts() | {"run": f"{self.run.name}, {self.state}", "step": measured}

    def as_json(self) -> dict[str, Any]:
        """The final status and the rows; `rlplan report --json` has more."""
        return {"run": self.run.name, "status": asdict(self.run.status), "rows": self.rows()}

    def build_comparison_row(self) -> dict[str, Any]:
        """The result's row in a comparison."""
        rates = [row["throughput/tokens_per_sec"] for row in self.run.timings if "throughput/tokens_per_sec" in row]
        speed = median(rates[1:] or rates) if rates else None
        return super().build_comparison_row() | {"name": self.run.name, "kind": "measured", "tokens_per_s": speed}


@dataclass(frozen=True, repr=False)
class StepResult(PlannedResult):
    """A measured step compared with its prediction. A row: one phase."""

    report: "StepReport"
    """The complete output of `rlplan explain RUN|LOG`; `plan` is the prediction."""

    @property
    def is_normal(self) -> bool:
        """Whether no phase exceeds its prediction by more than the usual error."""
        return self.report.is_normal

    def rows(self) -> list[dict[str, Any]]:
        """Rows with phase, measured_s, predicted_s, gap_s, ratio, is_normal."""
        return [gap.as_json() for gap in self.report.gaps]

    def facts(self) -> dict[str, str]:
        """The verdict, the most likely cause, then the plan's facts."""
        cause = next(iter(self.report.causes), None)
        return {"step": self.report.words} | ({"cause": cause.words} if cause else {}) | super().facts()

    def as_json(self) -> dict[str, Any]:
        """The output of `rlplan explain RUN|LOG --json`."""
        return self.report.as_json()


@dataclass(frozen=True, repr=False)
class ServingResult(Result):
    """A standalone engine (`framework: vllm`). A row: one kind of memory on a GPU."""

    job: "JobSpec"
    served: "Served"
    """Memory by vLLM's own arithmetic, and whether the engine starts."""
    load: "ServedLoad | None" = None
    """Latencies at the job's request concurrency, if asked for."""

    @property
    def verdict(self) -> str:
        """`fits` if the engine starts, else `does not fit`."""
        return self.served.verdict.value

    @property
    def fits(self) -> bool:
        """Whether the engine starts."""
        return self.served.fits

    @property
    def peak_bytes(self) -> int:
        """Bytes per GPU at the engine's peak."""
        return self.served.num_bytes

    @property
    def capacity_bytes(self) -> int:
        """Memory of a GPU."""
        return self.served.capacity

    @property
    def remedies(self) -> tuple[str, ...]:
        """Overrides that would make it fit: none, since no search is made for a standalone engine."""
        return ()

    def facts(self) -> dict[str, str]:
        """Model and GPUs, verdict, memory per GPU, latencies."""
        served, load = self.served, self.load
        facts = {
            "engine": f"{served.model} on {served.num_gpus} of {served.num_given}x {served.gpu}",
            "verdict": self.verdict,
            "GPU": f"{format_bytes(served.num_bytes)} of {format_bytes(served.capacity)}",
            "KV cache": f"{served.memory.num_tokens:,} tokens",
        }
        if load is not None:
            facts["load"] = f"{load.num_requests:,} requests in flight, {load.tokens_per_s:,.0f} tokens/s"
            facts["each token"] = format_seconds(load.latency.token_s)
        return facts

    def rows(self) -> list[dict[str, Any]]:
        """Rows with kind and bytes."""
        memory = self.served.memory
        kinds = {"weights": memory.model_bytes, "activation_peak": memory.activation_peak}
        kinds |= {"non_torch": memory.non_torch, "cuda_graphs": memory.cuda_graphs, "kv_cache": memory.kv_cache}
        return [{"kind": kind, "bytes": size} for kind, size in kinds.items()]

    def as_json(self) -> dict[str, Any]:
        """The output of `rlplan estimate --json`; with a load, that of `rlplan simulate --json`."""
        output: dict[str, Any] = {"schema_version": 1, "verdict": self.verdict, "serving": self.served.as_json()}
        return output | ({} if self.load is None else {"load": self.load.as_json()})


@dataclass(frozen=True, repr=False)
class EmitResult(Result):
    """A folder that was written. A row: one file."""

    folder: Path
    files: tuple[str, ...]
    """Files relative to the folder."""

    def facts(self) -> dict[str, str]:
        """The folder."""
        return {"folder": str(self.folder)}

    def rows(self) -> list[dict[str, Any]]:
        """Rows with file and bytes."""
        return [{"file": name, "bytes": (self.folder / name).stat().st_size} for name in self.files]

    def as_json(self) -> dict[str, Any]:
        """The output of `rlplan emit --json`."""
        return {"schema_version": 1, "folder": str(self.folder), "files": list(self.files)}


def _dataframes() -> Any:
    """The module rlplan.report.dataframes. Raises: HostError without pandas."""
    try:
        from rlplan.report import dataframes
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise build_missing_extra(error.name) from None
    return dataframes


def _cell(tag: str, value: object) -> str:
    return f"<{tag} style='text-align:left'>{html.escape(str(value))}</{tag}>"
