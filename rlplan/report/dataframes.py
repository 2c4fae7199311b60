"""Dataframes of a run: predicted memory, measured memory, and both joined on the action.

In: a RunFolder. Out: pandas dataframes, one row per fact, bytes in nullable integers; each function lists its columns.
Left out: drawing, and any number outside the ledger and the trace; unknown values stay empty.

An error is always predicted minus measured: above zero the prediction was too large, below zero it was too small.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import pandas as pd

from rlplan.dataflow.schedule import DRIVER_PROCESS
from rlplan.memory.ledger import MemoryLedger, RunPhase
from rlplan.report.run_folder import RunFolder
from rlplan.trace import MemorySample
from rlplan.vocabulary import PERSISTENT_KINDS, MemoryKind

TOTAL = "total"
PEAK_TOLERANCE, PACKED_TOLERANCE = 0.15, 0.05
"""Tolerances: a predicted peak may be too large by the first fraction and never too small; packed weights may be off by
the second in either direction."""

PERSISTENT = tuple(str(kind) for kind in PERSISTENT_KINDS)

_AT = ["run_phase", "action_id", "process"]
_BYTES = ["resident_bytes", "peak_bytes", "loaded_bytes"]
_MEASURED_COLUMNS = [
    *("step", "attempt", "run_phase", "action_id", "process", "device", "role", "kind", "statistic"),
    *("measured_bytes", "at_s"),
]
_JOINED_COLUMNS = [
    *("step", "attempt", "run_phase", "action_id", "process", "device", "role", "kind", "statistic"),
    *("predicted_bytes", "measured_bytes", "error_bytes", "error_fraction", "exact", "at_s"),
]


def order_processes(processes: Iterable[str]) -> list[str]:
    """Deduplicate processes; those with a model come first, the driver and Ray's own last."""
    return sorted(dict.fromkeys(processes), key=lambda process: process == DRIVER_PROCESS or "/" not in process)


def run_phase_of_step(step: int) -> RunPhase:
    """The ledger's run phase for a step of the trace.

    >>> [run_phase_of_step(step) for step in (0, 1, 2, 40, -1)]
    ['start', 'first', 'steady', 'steady', 'finish']
    """
    special_steps: dict[int, RunPhase] = {0: "start", 1: "first", -1: "finish"}
    return special_steps.get(step, "steady")


def predicted_memory(ledger: MemoryLedger) -> pd.DataFrame:
    """The ledger with the memory of every process at every moment, also during actions of other processes.

    Columns: run_phase, action_id, process, device, role, kind, takes_part and the three byte columns. During another
    process's action, a process keeps its resident memory after its own last action.
    """
    by_place: dict[tuple[str, str], dict[str, list[Any]]] = {}
    for row in ledger.rows:
        by_place.setdefault((row.run_phase, row.action_id), {}).setdefault(row.process, []).append(row)
    latest: dict[str, list[Any]] = {}
    facts = []
    for run_phase in ledger.order:
        active = by_place.get(run_phase, {})
        for process, rows in {**latest, **active}.items():
            for row in rows:
                inside = (row.peak_bytes, row.loaded_bytes) if process in active else (row.resident_bytes, 0)
                name = (*run_phase, process, row.device, str(row.role), str(row.kind), process in active)
                facts.append((*name, row.resident_bytes, *inside))
        latest.update(active)
    keys = [*_AT, "device", "role", "kind", "takes_part"]
    frame = pd.DataFrame(facts, columns=[*keys, *_BYTES]).astype(dict.fromkeys(_BYTES, "Int64"))
    return frame.groupby(keys, sort=False, as_index=False)[_BYTES].sum()


def measured_memory(run: RunFolder) -> pd.DataFrame:
    """Every memory sample of the trace, with the ledger's run phase."""
    frame = pd.DataFrame([_measured_row(sample) for sample in run.trace.samples], columns=_MEASURED_COLUMNS)
    return frame.astype({"measured_bytes": "Int64"})


def joined_memory(run: RunFolder) -> pd.DataFrame:
    """Every measured sample with its prediction, in order of measurement.

    exact: for persistent kinds, whether both are equal to the byte; empty for the others.
    predicted_bytes: empty where the ledger does not know the process at that moment; 0 where it knows the process but
    has no row of that kind. A sample between two actions (its action is not in the ledger) is compared with the
    resident memory after the last action of that run phase.
    """
    measured, predicted = measured_memory(run), predicted_memory(run.plan.ledger)
    last = dict(run.plan.ledger.order)
    known = set(run.plan.ledger.order)
    pairs = list(zip(measured["run_phase"], measured["action_id"], strict=True))
    measured["at_action"] = [pair[1] if pair in known else last.get(pair[0], pair[1]) for pair in pairs]
    measured["is_between"] = [pair not in known for pair in pairs]
    predicted = predicted.rename(columns={"action_id": "at_action"})
    at, keys = ["run_phase", "at_action", "process"], ["run_phase", "at_action", "process", "role", "kind"]
    totals = predicted.groupby(at, as_index=False)[_BYTES].sum()
    parts = predicted.groupby(keys, as_index=False)[_BYTES].sum()
    is_total = measured["kind"] == TOTAL
    total_rows = measured[is_total].merge(totals, on=at, how="left")
    components = measured[~is_total].merge(parts, on=keys, how="left")
    is_known = components.merge(totals[at].assign(is_known=True), on=at, how="left")["is_known"].notna().to_numpy()
    for column in _BYTES:
        components.loc[is_known & components[column].isna().to_numpy(), column] = 0
    frame = pd.concat([part for part in (total_rows, components) if len(part)] or [total_rows])
    return _add_errors(frame.astype(dict.fromkeys(_BYTES, "Int64")))


def process_peaks(run: RunFolder, joined: pd.DataFrame | None = None) -> pd.DataFrame:
    """One row per process with the largest predicted and measured total, over the actions that the run reached.

    Columns: process, device, run_phase and action_id of the predicted peak, predicted_bytes, predicted_baseline_bytes
    (its PROCESS rows), measured_bytes, measured_action_id, measured_step, baseline_bytes (measured before any model was
    loaded), error_fraction, and the same without baselines: net_predicted_bytes, net_measured_bytes,
    net_error_fraction, and modelled_share, the share of the measured peak that is not baseline.
    """
    joined = joined_memory(run) if joined is None else joined
    predicted = _select_reached(run, predicted_memory(run.plan.ledger))
    processes = order_processes([*predicted["process"], *joined.loc[joined["kind"] == TOTAL, "process"]])
    rows = [{**_predicted_peak(predicted, process), **_measured_peak(joined, process)} for process in processes]
    frame = pd.DataFrame(rows, columns=_PEAK_COLUMNS)
    for column in [name for name in _PEAK_COLUMNS if name.endswith("_bytes")]:
        frame[column] = frame[column].astype("Int64")
    frame["error_fraction"] = _fraction(frame["predicted_bytes"], frame["measured_bytes"])
    frame["net_predicted_bytes"] = frame["predicted_bytes"] - frame["predicted_baseline_bytes"]
    frame["net_measured_bytes"] = frame["measured_bytes"] - frame["baseline_bytes"]
    frame["net_error_fraction"] = _fraction(frame["net_predicted_bytes"], frame["net_measured_bytes"])
    frame["modelled_share"] = (frame["net_measured_bytes"] / frame["measured_bytes"]).astype("Float64")
    return frame


def is_fine_peak(error_fraction: float | None, share: float | None) -> bool | None:
    """Whether a predicted peak is within its tolerance; None where this cannot be decided.

    share: modelled share of the peak. Below one half, noise in the baseline dominates and nothing can be decided.

    >>> is_fine_peak(0.1, 1.0), is_fine_peak(-0.01, 1.0), is_fine_peak(0.3, 0.1)
    (True, False, None)
    """
    if error_fraction is None or share is None or pd.isna(error_fraction) or pd.isna(share) or share < 0.5:
        return None
    return bool(0 <= error_fraction <= PEAK_TOLERANCE)


def exactness(run: RunFolder, joined: pd.DataFrame | None = None) -> pd.DataFrame:
    """One row for each persistent kind of each process and role, with the number of exactly predicted samples.

    A sample counts where either side has bytes, because two zeros prove nothing. The engine's weights count twice: when
    loaded, and the part that remains beside the packed copies.

    Columns: kind, process, role, num_compared, num_exact, predicted_bytes and measured_bytes (of the sample with the
    largest error, or the largest sample when all are exact). A kind that was never measured has num_compared 0.
    """
    joined = joined_memory(run) if joined is None else joined
    has_bytes = (joined["predicted_bytes"].fillna(0) > 0) | (joined["measured_bytes"] > 0)
    persistent = joined[joined["kind"].isin(PERSISTENT) & has_bytes]
    predicted = _select_reached(run, predicted_memory(run.plan.ledger))
    promised = predicted[predicted["kind"].isin(PERSISTENT) & (predicted["resident_bytes"] > 0)]
    keys = dict.fromkeys(
        (str(kind), process, str(role))
        for frame in (promised, persistent)
        for kind, process, role in zip(frame["kind"], frame["process"], frame["role"], strict=True)
    )
    rows = []
    for kind, process, role in sorted(keys, key=lambda key: (PERSISTENT.index(key[0]), key[1:])):
        samples = _select_rows(persistent, process=process, kind=kind, role=role)
        peak = _select_rows(promised, process=process, kind=kind, role=role)["resident_bytes"].max()
        rows.append({"kind": kind, "process": process, "role": role, **_exact_counts(samples, peak)})
    columns = ["kind", "process", "role", "num_compared", "num_exact", "predicted_bytes", "measured_bytes"]
    return pd.DataFrame(rows, columns=columns).astype({"predicted_bytes": "Int64", "measured_bytes": "Int64"})


def metrics(run: RunFolder) -> pd.DataFrame:
    """Learning metrics, one row per step in order; the last evaluation (step -1) belongs to the last step."""
    return _group_by_step(run.metrics)


def timings(run: RunFolder) -> pd.DataFrame:
    """Seconds and throughput of RL steps, one row per step in order; start and finish are in the trace's spans."""
    return _group_by_step(tuple(row for row in run.timings if row["step"] >= 1))


def steps(run: RunFolder) -> pd.DataFrame:
    """One row per step: first the learning metrics, which a seed reproduces bit for bit, then machine-dependent
    ones."""
    return metrics(run).merge(timings(run), on="step", how="outer").sort_values("step")


def frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """A dataframe of the rows of any result; unknown values stay empty."""
    return pd.DataFrame(rows)


_PEAK_COLUMNS = [
    *("process", "device", "run_phase", "action_id", "predicted_bytes", "predicted_baseline_bytes"),
    *("measured_bytes", "measured_action_id", "measured_step", "baseline_bytes"),
]


def _measured_row(sample: MemorySample) -> dict[str, Any]:
    row = asdict(sample)
    return {**row, "measured_bytes": row.pop("num_bytes"), "run_phase": run_phase_of_step(sample.step)}


def _add_errors(frame: pd.DataFrame) -> pd.DataFrame:
    frame = frame.copy()
    is_peak = (frame["statistic"] == "peak") & ~frame["is_between"].astype(bool)
    frame["predicted_bytes"] = frame["peak_bytes"].where(is_peak, frame["resident_bytes"])
    frame["predicted_bytes"] = frame["loaded_bytes"].where(frame["statistic"] == "loaded", frame["predicted_bytes"])
    frame["error_bytes"] = frame["predicted_bytes"] - frame["measured_bytes"]
    frame["error_fraction"] = _fraction(frame["predicted_bytes"], frame["measured_bytes"])
    is_exact = (frame["error_bytes"] == 0).astype("boolean").fillna(False)
    frame["exact"] = is_exact.where(frame["kind"].isin(PERSISTENT), pd.NA)
    order = ["at_s", "process", "kind", "statistic"]
    return frame.sort_values(order, kind="stable", ignore_index=True)[_JOINED_COLUMNS]


def _fraction(predicted: pd.Series, measured: pd.Series) -> pd.Series:
    """(predicted - measured) / measured; empty where nothing was measured."""
    return ((predicted - measured) / measured.where(measured > 0)).astype("Float64")


def _select_reached(run: RunFolder, predicted: pd.DataFrame) -> pd.DataFrame:
    """Rows of moments that the run reached, so that an aborted run is not compared with a peak it never had."""
    seen = {(run_phase_of_step(sample.step), sample.action_id) for sample in run.trace.samples}
    seen |= {(run_phase_of_step(span.step), span.action_id) for span in run.trace.spans}
    if not seen:
        return predicted
    return predicted[[pair in seen for pair in zip(predicted["run_phase"], predicted["action_id"], strict=True)]]


def _predicted_peak(predicted: pd.DataFrame, process: str) -> dict[str, Any]:
    rows_of_process = _select_rows(predicted, process=process)
    if rows_of_process.empty:
        return {"process": process, "device": ""}
    sums = rows_of_process.groupby(["run_phase", "action_id"], sort=False)["peak_bytes"].sum()
    run_phase, action_id = sums.idxmax()
    rows = _select_rows(rows_of_process, run_phase=run_phase, action_id=action_id)
    baseline = rows[rows["kind"] == MemoryKind.PROCESS]["peak_bytes"].sum()
    return {
        "process": process,
        "device": rows_of_process["device"].iloc[0],
        "run_phase": run_phase,
        "action_id": action_id,
        "predicted_bytes": sums.max(),
        "predicted_baseline_bytes": baseline,
    }


def _measured_peak(joined: pd.DataFrame, process: str) -> dict[str, Any]:
    samples = joined[joined["process"] == process]
    totals = samples[samples["kind"] == TOTAL]
    peak: dict[str, Any] = {}
    if len(totals):
        top = totals.loc[totals["measured_bytes"].idxmax()]
        peak = {
            "device": top["device"],
            "measured_bytes": top["measured_bytes"],
            "measured_action_id": top["action_id"],
            "measured_step": int(top["step"]),
        }
    is_baseline = (samples["kind"] == MemoryKind.PROCESS) & (samples["step"] == 0)
    baselines = samples[is_baseline & (samples["statistic"] == "resident")]
    if len(baselines):
        peak["baseline_bytes"] = baselines["measured_bytes"].iloc[0]
    return peak


def _exact_counts(samples: pd.DataFrame, promised: Any) -> dict[str, Any]:
    if samples.empty:
        return {"num_compared": 0, "num_exact": 0, "predicted_bytes": promised, "measured_bytes": pd.NA}
    off = samples["error_bytes"].abs().fillna(samples["measured_bytes"])
    worst = samples.loc[off.idxmax() if off.max() > 0 else samples["measured_bytes"].idxmax()]
    return {
        "num_compared": len(samples),
        "num_exact": int(samples["exact"].sum()),
        "predicted_bytes": worst["predicted_bytes"],
        "measured_bytes": worst["measured_bytes"],
    }


def _select_rows(frame: pd.DataFrame, **wanted: str) -> pd.DataFrame:
    """Rows whose columns have these values."""
    for column, value in wanted.items():
        frame = frame[frame[column] == value]
    return frame


def _group_by_step(rows: tuple[dict[str, Any], ...]) -> pd.DataFrame:
    frame = pd.DataFrame(list(rows)) if rows else pd.DataFrame({"step": pd.Series(dtype="int64")})
    # the final evaluation has step -1 in the files
    last = int(frame["step"].max()) if len(frame) else 0
    frame["step"] = frame["step"].where(frame["step"] >= 0, max(last, 0))
    return frame.groupby("step", as_index=False, sort=True).last()
