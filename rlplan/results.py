"""What the functions of api.py give back: frozen results with values, a table and a view for notebooks.

In: plans, explanations, simulations, runs, as the verbs of the command line have them. Out: facts in words, rows,
JSON, dataframes, HTML. Left out: computing anything. Bytes are integers, seconds floats.
"""

import html
import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rlplan.errors import EXTRAS, missing_extra
from rlplan.planner.answers.plan_results import choice_words, differences, estimate_as_json
from rlplan.planner.measured_errors import step_interval
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

MAX_SHOWN_ROWS = 12
"""Of a result in a notebook; `to_frame()` has them all."""


class Result(ABC):
    """What every result can do."""

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """What it says first, in words."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Its table, a mapping a row."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """What the command line prints with `--json`, where it has that verb."""

    def to_frame(self) -> "pd.DataFrame":
        """Its table as a dataframe. Raises: HostError without pandas."""
        return _dataframes().frame(self.rows())

    def __repr__(self) -> str:
        """What it says first: a plan's own repr has thousands of rows."""
        return f"{type(self).__name__}({'; '.join(f'{key}: {value}' for key, value in self.facts().items())})"

    def _repr_html_(self) -> str:
        facts = "".join(_html_row("th", key) + _html_row("td", one) + "</tr>" for key, one in self.facts().items())
        rows = self.rows()
        head = "".join(_html_row("th", key) for key in (rows[0] if rows else ()))
        body = "".join(
            f"<tr>{''.join(_html_row('td', one) for one in row.values())}</tr>" for row in rows[:MAX_SHOWN_ROWS]
        )
        more = f"<p>{MAX_SHOWN_ROWS} of {len(rows)} rows</p>" if len(rows) > MAX_SHOWN_ROWS else ""
        return f"<table>{facts.replace('<th>', '<tr><th>')}</table><table><tr>{head}</tr>{body}</table>{more}"


@dataclass(frozen=True, repr=False)
class OfPlan(Result):
    """A result that a plan leads to."""

    plan: Plan
    """The plan itself: choice, schedule, ledger, timing (rlplan.planner.plan)."""

    @property
    def verdict(self) -> str:
        """`fits`, `fits in expectation only`, `does not fit` or `refused`."""
        return self.plan.verdict.value

    @property
    def fits(self) -> bool:
        """Whether it fits and its framework runs it: at the high end, or as expected with `limits.accepts_oom_risk`."""
        return self.plan.fits

    @property
    def peak_bytes(self) -> int:
        """The fullest moment of the device with the least room, as expected."""
        return self.plan.binding.num_bytes

    @property
    def capacity_bytes(self) -> int:
        """Of that device."""
        return self.plan.binding_capacity

    @property
    def step_s(self) -> float | None:
        """Seconds of a usual step; None where the profile has no rates."""
        return self.plan.seconds or None

    @property
    def overrides(self) -> dict[str, str]:
        """The layout as overrides of the job."""
        return choice_words(self.plan.choice, self.plan.job, self.plan.asked)

    @property
    def remedies(self) -> tuple[str, ...]:
        """Overrides each of which would make it fit, the mildest first; empty where it surely fits."""
        return tuple(one.change for one in self.plan.remedies)

    def facts(self) -> dict[str, str]:
        """Model and devices, verdict, step, peak, layout."""
        return {
            "job": f"{self.plan.model_name}, {self.plan.job.algorithm.name}, {self.plan.devices}",
            "verdict": self.verdict,
            "step": "unknown" if self.step_s is None else format_seconds(self.step_s),
            "peak": f"{format_bytes(self.peak_bytes)} of {format_bytes(self.capacity_bytes)}",
            "layout": " ".join(f"{key}={value}" for key, value in self.overrides.items()),
        }

    def compared(self) -> dict[str, Any]:
        """Its row where it is compared."""
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
            "step_interval_s": step_interval(self.plan),
            "peak_interval_bytes": self.plan.interval(),
        }


@dataclass(frozen=True, repr=False)
class EstimateResult(OfPlan):
    """Bytes of every kind, of every process, in every action. A row: one row of the ledger."""

    def rows(self) -> list[dict[str, Any]]:
        """run_phase, action_id, phase, process, device, role, kind, space, resident_bytes, peak_bytes, provenance …"""
        return [dict(row) for row in self.as_json()["rows"]]

    def as_json(self) -> dict[str, Any]:
        """As `rlplan estimate --json`."""
        return estimate_as_json(self.plan)


@dataclass(frozen=True, repr=False)
class PlanResult(OfPlan):
    """The layout that was chosen, and the next best. A row: one layout."""

    def rows(self) -> list[dict[str, Any]]:
        """rank (0: chosen), seconds, peak_bytes, headroom_bytes, verdict, differs (the overrides that lead to it)."""
        plan = self.plan
        chosen = [(plan.seconds, plan.binding.num_bytes, plan.headroom_bytes, plan.fit, "")]
        chosen += [
            (
                one.seconds,
                one.peak_bytes,
                one.headroom_bytes,
                one.verdict,
                differences(one.choice, plan.choice, plan.job, plan.asked),
            )
            for one in plan.runners_up
        ]
        keys = ("seconds", "peak_bytes", "headroom_bytes", "verdict", "differs")
        return [
            {"rank": rank} | dict(zip(keys, (*row[:3], row[3].value, row[4]), strict=True))
            for rank, row in enumerate(chosen)
        ]

    def as_json(self) -> dict[str, Any]:
        """The plan file, its paths relative to the working directory."""
        return dict(json.loads(dump_plan(self.plan, Path.cwd())))

    def write(self, path: str | Path) -> Path:
        """Write the plan as `rlplan plan -o` does. Raises: SpecError where that cannot be."""
        write_plan(self.plan, Path(path))
        return Path(path)


@dataclass(frozen=True, repr=False)
class ExplainResult(OfPlan):
    """Why a plan is as it is, and what changes would bring. A row: one change."""

    explanation: "Explanation"
    """Everything that `rlplan explain` says."""

    def rows(self) -> list[dict[str, Any]]:
        """change, words, num_devices, verdict, seconds, headroom_bytes, why, way_out; asked (by the user) first."""
        parts = (self.explanation.asked, self.explanation.what_ifs, self.explanation.families)
        return [one.as_json() for part in parts for one in part]

    def as_json(self) -> dict[str, Any]:
        """As `rlplan explain --json`."""
        return self.explanation.as_json()


@dataclass(frozen=True, repr=False)
class SolveResult(OfPlan):
    """The largest value of a key that fits, and the plan with it. A row: one value that was tried."""

    solution: "Solution"
    """The value, what breaks at the next one, and everything that was tried."""

    @property
    def value(self) -> int:
        """The largest that fits."""
        return self.solution.value

    def rows(self) -> list[dict[str, Any]]:
        """change, words, num_devices, verdict, seconds, headroom_bytes, why, way_out; in the order of the search."""
        return [one.as_json() for one in self.solution.asked]

    def facts(self) -> dict[str, str]:
        """The override, then the plan's."""
        return {"largest that fits": self.solution.override} | super().facts()

    def as_json(self) -> dict[str, Any]:
        """As `rlplan solve --json`."""
        return self.solution.as_json()


@dataclass(frozen=True, repr=False)
class SimulateResult(OfPlan):
    """Steps in simulated time. A row: one step."""

    simulation: "SimulationResult"
    """Everything that `rlplan simulate` counts."""

    def rows(self) -> list[dict[str, Any]]:
        """step (from 1), seconds."""
        return [{"step": step, "seconds": one} for step, one in enumerate(self.simulation.step_s, 1)]

    @property
    def step_s(self) -> float | None:
        """Mean seconds of the simulated steps."""
        return self.simulation.mean_step_s

    def as_json(self) -> dict[str, Any]:
        """As `rlplan simulate --json`."""
        return self.simulation.as_json()

    def compared(self) -> dict[str, Any]:
        """Its row where it is compared."""
        trained = self.simulation.num_tokens / self.simulation.seconds if self.simulation.seconds else None
        return super().compared() | {"kind": "simulated", "tokens_per_s": trained}


@dataclass(frozen=True, repr=False)
class RunResult(OfPlan):
    """A run that was done, or is being done, and the plan that it follows. A row: one step, as its timings say."""

    run: "RunFolder"
    """Plan, trace, metrics, timings and how it ended (rlplan.report.run_folder)."""

    @property
    def state(self) -> str:
        """`finished`, `interrupted`, `failed`, `running` or `unknown`."""
        return self.run.status.state

    @property
    def step_s(self) -> float | None:
        """Measured: the median over steps, the first apart where there are others; None before the first."""
        return self.run.measured_step.step_s

    def rows(self) -> list[dict[str, Any]]:
        """The run's timings as they were written."""
        return [dict(row) for row in self.run.timings]

    def to_frame(self) -> "pd.DataFrame":
        """A row a step: what was learned, then seconds and memory. Raises: HostError without pandas."""
        return _dataframes().steps(self.run)

    def memory_frame(self) -> "pd.DataFrame":
        """Every measured sample beside its prediction, as a report has it. Raises: HostError without pandas."""
        return _dataframes().joined_memory(self.run)

    def facts(self) -> dict[str, str]:
        """The plan's, and how far the run went."""
        measured = "unknown" if self.step_s is None else f"{format_seconds(self.step_s)}, measured"
        return super().facts() | {"run": f"{self.run.name}, {self.state}", "step": measured}

    def as_json(self) -> dict[str, Any]:
        """How it ended, and its rows; `rlplan report --json` says more."""
        return {"run": self.run.name, "status": asdict(self.run.status), "rows": self.rows()}

    def compared(self) -> dict[str, Any]:
        """Its row where it is compared."""
        rates = [row["throughput/tokens_per_sec"] for row in self.run.timings if "throughput/tokens_per_sec" in row]
        speed = median(rates[1:] or rates) if rates else None
        return super().compared() | {"name": self.run.name, "kind": "measured", "tokens_per_s": speed}


@dataclass(frozen=True, repr=False)
class StepResult(OfPlan):
    """A measured step beside what the hardware allows. A row: one phase."""

    report: "StepReport"
    """Everything that `rlplan explain RUN|LOG` says; `plan` is what the hardware allows."""

    @property
    def is_normal(self) -> bool:
        """Whether no phase takes longer than such predictions err."""
        return self.report.is_normal

    def rows(self) -> list[dict[str, Any]]:
        """phase, measured_s, predicted_s, gap_s, ratio, is_normal."""
        return [one.as_json() for one in self.report.gaps]

    def facts(self) -> dict[str, str]:
        """The answer, the likeliest cause, then the plan's."""
        cause = next(iter(self.report.causes), None)
        return {"step": self.report.words} | ({"cause": cause.words} if cause else {}) | super().facts()

    def as_json(self) -> dict[str, Any]:
        """As `rlplan explain RUN|LOG --json`."""
        return self.report.as_json()


@dataclass(frozen=True, repr=False)
class ServingResult(Result):
    """An engine that serves alone (`framework: vllm`). A row: one kind of bytes of a GPU."""

    job: "JobSpec"
    served: "Served"
    """Its bytes by vLLM's own arithmetic, and whether it starts."""
    load: "ServedLoad | None" = None
    """Its latencies under the job's requests in flight, where these were asked for."""

    @property
    def verdict(self) -> str:
        """`fits` where it starts, or `does not fit`."""
        return self.served.verdict.value

    @property
    def fits(self) -> bool:
        """Whether it starts."""
        return self.served.fits

    @property
    def peak_bytes(self) -> int:
        """Of a GPU, at the engine's peak."""
        return self.served.num_bytes

    @property
    def capacity_bytes(self) -> int:
        """Of a GPU."""
        return self.served.capacity

    @property
    def remedies(self) -> tuple[str, ...]:
        """Overrides that would make it fit: none is searched for an engine alone."""
        return ()

    def facts(self) -> dict[str, str]:
        """Model and GPUs, verdict, what a GPU holds, latencies."""
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
        """kind, bytes."""
        memory = self.served.memory
        kinds = {"weights": memory.model_bytes, "activation_peak": memory.activation_peak}
        kinds |= {"non_torch": memory.non_torch, "cuda_graphs": memory.cuda_graphs, "kv_cache": memory.kv_cache}
        return [{"kind": kind, "bytes": size} for kind, size in kinds.items()]

    def as_json(self) -> dict[str, Any]:
        """As `rlplan estimate --json`, and with a load as `rlplan simulate --json`."""
        found: dict[str, Any] = {"schema_version": 1, "verdict": self.verdict, "serving": self.served.as_json()}
        return found | ({} if self.load is None else {"load": self.load.as_json()})


@dataclass(frozen=True, repr=False)
class EmitResult(Result):
    """A folder that was written. A row: one file."""

    folder: Path
    files: tuple[str, ...]
    """Relative to the folder."""

    def facts(self) -> dict[str, str]:
        """The folder."""
        return {"folder": str(self.folder)}

    def rows(self) -> list[dict[str, Any]]:
        """file, bytes."""
        return [{"file": name, "bytes": (self.folder / name).stat().st_size} for name in self.files]

    def as_json(self) -> dict[str, Any]:
        """As `rlplan emit --json`."""
        return {"schema_version": 1, "folder": str(self.folder), "files": list(self.files)}


def _dataframes() -> Any:
    """rlplan.report.dataframes. Raises: HostError without pandas."""
    try:
        from rlplan.report import dataframes
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise missing_extra(error.name) from None
    return dataframes


def _html_row(tag: str, value: Any) -> str:
    text = "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    return f"<{tag}>{html.escape(text)}</{tag}>"
