"""Runs a small job through `rlplan run` on the GPU that is here, once in each placement, and says what came of it.

    python benchmarks/gpu/jobs.py [--device cuda|cpu] [--placement colocated ...] [--out FOLDER] [--limit-s 280]

In: a CUDA device (or, with --device cpu, the same placements on a CPU host: a dry run). Out: a run folder a placement,
table.md and results.json. Weights are random, data are in the checkout, nothing is downloaded. See README.md.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.cases import Case
from benchmarks.gpu.children import Result
from rlplan.emit.bundle import write_bundle
from rlplan.errors import HostError, RlplanError
from rlplan.planner.executable import require_executable
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_best_plan, find_plan
from rlplan.runtime.host.detect import detect
from rlplan.runtime.host.doctor import missing_packages
from rlplan.spec.base import validate
from rlplan.spec.job import JobSpec
from rlplan.trace import Trace
from rlplan.units import format_bytes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODELS = {"cuda": "decoder-160m", "cpu": "sorter"}
PLACEMENTS: Mapping[str, dict[str, Any]] = {
    "colocated": {"placement": "colocated", "offload": "host", "offload_roles": "all"},
    "colocated-frozen-offloaded": {"placement": "colocated", "offload": "host", "offload_roles": "frozen"},
    "hybrid": {"placement": "hybrid", "offload": "none"},
}
STOPPING_S = 20.0
"""Seconds in which a run whose time is up ends its processes."""
WORKLOAD = {
    "num_steps": 3,
    "num_prompts_per_step": 8,
    "num_samples_per_prompt": 4,
    "max_prompt_len": 32,
    "max_response_len": 96,
}
JOB: dict[str, Any] = {
    "data": {"prompts": "data/sort_digits/train.jsonl", "heldout": "data/sort_digits/heldout.jsonl"},
    "workload": {"num_heldout_prompts": 16, "evaluate_every": 3},
    "rewards": [{"kind": "answer_matcher"}],
    "algorithm": {"learning_rate": 1e-5},
    "policy": {"init": "random"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every placement. Gives 0 where all ended well."""
    options = _parse(arguments)
    try:
        gpu = found_gpu() if options.device == "cuda" else ""
    except RlplanError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    results = []
    for name in options.placement or PLACEMENTS:
        plan = plan_on_gpu(name, gpu) if gpu else plan_on_cpu(name)
        results.append(run(name, plan, options.out / name, options.limit_s))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    table = write_table(results)
    (options.out / "table.md").write_text(table, encoding="utf-8")
    print(table)
    return int(any(result["exit_code"] for result in results))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/jobs.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--placement", action="append", choices=list(PLACEMENTS), help="only this one; may be repeated")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs") / "gpu-jobs", metavar="FOLDER")
    parser.add_argument("--limit-s", type=float, default=280.0, help="seconds for one run")
    return parser.parse_args(arguments)


def found_gpu() -> str:
    """The profile of the first GPU here. Raises: HostError."""
    gpus = detect().gpus
    if not gpus or gpus[0].profile is None:
        raise HostError(
            f"no GPU with a profile answered ({', '.join(gpu.name for gpu in gpus) or 'none'})",
            where="--device cuda",
            rule="NVML or nvidia-smi shows one that `rlplan profiles list` knows",
            way_out="run it where there is one, or dry-run it with --device cpu",
        )
    return gpus[0].profile


def run_step(case: Case, device: str, folder: Path, limit_s: float) -> Result:
    """One step of the placement that a case is named after. A job that ends badly is a result; its log says why."""
    if missing := missing_packages(on_gpus=device == "cuda"):
        return Result("not_reached", f"needs {', '.join(missing)}")
    name = case.action.removeprefix("step-")
    ends = time.monotonic() + limit_s - STOPPING_S
    try:
        plan = plan_on_gpu(name, found_gpu(), num_steps=1) if device == "cuda" else plan_on_cpu(name, num_steps=1)
    except RlplanError as error:
        return Result("failed", error.what)
    outcome = run(name, plan, folder, max(1.0, ends - time.monotonic()))
    if outcome["exit_code"]:
        return Result("failed", f"rlplan run ended with {outcome['exit_code']}; see {folder.name}/output.log")
    numbers: dict[str, float] = {"num_steps": outcome["num_steps"]}
    if outcome["logprob_difference_max"] is not None:
        numbers["logprob_difference_max"] = outcome["logprob_difference_max"]
    for process, peak in outcome["peaks"].items():
        numbers |= {f"{process}_{kind}_bytes": peak[kind] for kind in ("measured", "predicted")}
    return Result("measured", measured=numbers)


def plan_on_gpu(placement: str, gpu: str, num_steps: int = WORKLOAD["num_steps"]) -> Plan:
    """The layout that the GPU search chooses for the placement, as an executable plan."""
    data = {
        **JOB,
        "policy": {"path": f"models/{MODELS['cuda']}", "init": "random"},
        "hardware": f"1x{gpu}",
        "workload": WORKLOAD | JOB["workload"] | {"num_steps": num_steps},
        "rollout": {"has_cuda_graphs": False},
        "placement": PLACEMENTS[placement],
    }
    return require_executable(find_best_plan(validate(JobSpec, data, file="jobs.py").resolve_paths(EXAMPLES)))


def plan_on_cpu(placement: str, num_steps: int = WORKLOAD["num_steps"]) -> Plan:
    """The same placement on a CPU host."""
    chosen = PLACEMENTS[placement]
    place = {**chosen, "offload": "none" if chosen["offload"] == "none" else "disk"}
    data: dict[str, Any] = {
        **JOB,
        "name": placement,
        "policy": {"path": "models/sorter"},
        "hardware": {"profile": "cpu-host", "num_devices": 1},
        "algorithm": {"name": "grpo", "learning_rate": 1e-5},
        "workload": WORKLOAD
        | JOB["workload"]
        | {"mini_batch_size": 32, "micro_batch_size_per_gpu": 8, "num_steps": num_steps},
        "placement": place,
    }
    return find_plan(validate(JobSpec, data, file="jobs.py").resolve_paths(EXAMPLES))


def run(name: str, plan: Plan, folder: Path, limit_s: float) -> dict[str, Any]:
    """One run by the command line, with a deadline; what it says of itself."""
    folder.mkdir(parents=True, exist_ok=True)
    write_bundle(plan, folder / "bundle")
    command = [sys.executable, "-c", "from rlplan_cli.app import main; main()", "run", str(folder / "bundle")]
    with (folder / "output.log").open("wb") as log:
        child = subprocess.Popen([*command, "--out", str(folder / "run")], stdout=log, stderr=log)
        try:
            exit_code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            child.terminate()  # the run ends its processes itself
            exit_code = child.wait(STOPPING_S) or 124
    result: dict[str, Any] = {"placement": name, "exit_code": exit_code, "zero_stage": plan.zero_stage}
    if (folder / "run" / "trace.jsonl").exists():
        result |= read_measured(folder / "run", plan)
    return result


def read_measured(folder: Path, plan: Plan) -> dict[str, Any]:
    """Steps, the largest difference of log-probs, and each process's peak beside its prediction."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    differences = [row["sync/logprob_difference_max"] for row in rows if "sync/logprob_difference_max" in row]
    peaks: dict[str, int] = {}
    for sample in Trace.read(folder / "trace.jsonl").samples:
        if (sample.kind, sample.statistic) in (("device_allocated", "peak"), ("total", "peak")):
            is_device = sample.kind == "device_allocated"
            if is_device == (plan.job.device_kind == "cuda"):
                peaks[sample.process] = max(peaks.get(sample.process, 0), sample.num_bytes)
    predicted = {process: plan.ledger.process_peak(process).num_bytes for process in peaks}
    return {
        "num_steps": len([row for row in rows if row.get("step", 0) > 0]),
        "logprob_difference_max": max(differences, default=None),
        "peaks": {name: {"measured": peaks[name], "predicted": predicted[name]} for name in sorted(peaks)},
    }


def write_table(results: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table, a line a process."""
    lines = ["| placement | exit | steps | log-probs differ by | process | peak | predicted |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for result in results:
        head = f"| {result['placement']} | {result['exit_code']} | {result.get('num_steps', 0)} |"
        difference = result.get("logprob_difference_max")
        head += f" {'' if difference is None else format(difference, '.2g')} |"
        for process, peak in result.get("peaks", {"": {"measured": 0, "predicted": 0}}).items():
            lines.append(f"{head} {process} | {format_bytes(peak['measured'])} | {format_bytes(peak['predicted'])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
