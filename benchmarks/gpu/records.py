"""Records: predictions and results as they come, points for `rlplan accuracy`, and the table at the end.

In: cases, predictions, results. Out: `results.jsonl` (a line is on disk before the next thing happens), `points.json`,
`table.md`, `profile.yaml`. Left out: measuring.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.cases import LORA_RANK, Case
from benchmarks.gpu.children import Result
from rlplan.units import GIB, format_bytes

FINAL = ("measured", "out_of_memory", "skipped")
"""Statuses that a later run into the same folder does not try again."""
TRAINING_POINTS = {
    "allocated_bytes": ("train_peak", "bytes, max allocated"),
    "active_bytes": ("train_peak", "bytes, peak active"),
    "reserved_bytes": ("train_peak", "bytes, max reserved"),
    "process_bytes": ("train_peak", "bytes nvidia-smi"),
    "resident_bytes": ("train_steady", "bytes allocated"),
}
"""Figures of a training step that become points: the kind, and the unit with the statistic as in points.py."""
SCORING_POINTS = {name: (kind.replace("train_", "logprob_"), unit) for name, (kind, unit) in TRAINING_POINTS.items()}
SERVING_POINTS = {
    "weight_bytes": ("vllm_weights", "bytes/GPU"),
    "kv_tokens": ("kv_per_token", "tokens"),
    "available_kv_bytes": ("vllm_kv", "bytes/GPU"),
    "activation_bytes": ("vllm_activation_peak", "bytes"),
    "graph_bytes": ("vllm_cuda_graph", "bytes"),
}


class Records:
    """The files of one folder. A second run into the same folder goes on where the first was cut off."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "results.jsonl"
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, **values: Any) -> None:
        """Append a line, and wait until it is on the disk."""
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"record": kind} | values) + "\n")
            out.flush()
            os.fsync(out.fileno())

    def _read(self) -> Iterator[dict[str, Any]]:
        """Every line; half a line at the end, of a run that was cut off, is left out."""
        text = self.file.read_text(encoding="utf-8") if self.file.exists() else ""
        for line in text.splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def results(self) -> dict[str, dict[str, Any]]:
        """The last result of each case, with the prediction that preceded it and the machine it was measured on."""
        predicted: dict[str, dict[str, float]] = {}
        machine: dict[str, Any] = {}
        records_by_id = {}
        for record in self._read():
            if record["record"] == "machine":
                machine = record
            elif record["record"] == "prediction":
                predicted[record["id"]] = record["predicted"]
            else:
                records_by_id[record["id"]] = record | {
                    "predicted": predicted.get(record["id"], {}),
                    "machine": machine,
                }
        return records_by_id

    def done(self, gpu: str) -> set[str]:
        """Ids of the cases that need not be tried again on this GPU."""
        results = self.results().items()
        return {name for name, record in results if record["status"] in FINAL and record["machine"].get("gpu") == gpu}

    def write_result(self, case: Case, result: Result) -> None:
        """Append what came of a case."""
        self.write("result", id=case.id, part=case.part, case=case.as_json(), **asdict(result))

    def finish(self) -> str:
        """Write points and table of everything in the folder. Gives the table."""
        results = self.results()
        points = [point for record in results.values() for point in make_points(record)]
        text = json.dumps({"points": points}, indent=1) + "\n"
        (self.folder / "points.json").write_text(text, encoding="utf-8")
        table = write_table(results)
        (self.folder / "table.md").write_text(table, encoding="utf-8")
        return table


def make_points(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The points of a result in the format of `rlplan accuracy`. Those of a dry run say so."""
    case, machine = Case(**record["case"]), record["machine"]
    kinds = {"train": TRAINING_POINTS, "engine": SERVING_POINTS, "sleep": SERVING_POINTS}.get(case.action, {})
    kinds = SCORING_POINTS if case.action.startswith("score-") else kinds
    for name, (kind, unit) in kinds.items():
        if name in record["measured"]:
            yield {
                "id": f"gpu-bench-{case.id}:{name}",
                "kind": kind,
                "model": case.model + (" (tiny)" if case.is_tiny else ""),
                "gpu": machine["gpu"],
                "settings": _settings(case, record["measured"], machine),
                "measured": {"value": record["measured"][name], "unit": unit},
                "source": "benchmarks/gpu/run.py" + (", a dry run with a tiny model" if case.is_tiny else ""),
                "reliability": "A",
                "provenance": "measured",
                "date": machine["date"],
                "versions": machine["versions"],
                "notes": "dry run: the model's sizes are not the catalogue's" if case.is_tiny else None,
            }


def _settings(case: Case, measured: Mapping[str, float], machine: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the measurement, in the words of the published points."""
    common = {"dtype": "bf16", "gpus": 1, "is_tiny": case.is_tiny}
    if machine.get("total_bytes"):
        common["total_gpu_memory_gib"] = machine["total_bytes"] / GIB
    if case.action in ("engine", "sleep"):
        available = measured.get("available_kv_bytes", case.kv_bytes if case.gives_kv_bytes else None)
        return common | {
            "tp": 1,
            "vllm": machine["versions"].get("vllm"),
            "max_model_len": case.num_tokens,
            "block": case.block_size,
            "gpu_memory_utilization": None if case.gives_kv_bytes else 0.9,
            "available_kv_gib": available / GIB if available else None,
        }
    tokens = {"micro_batch": 1, "seq": case.num_tokens, "attn": "sdpa", "compile": False, "loss": case.loss}
    if case.action.startswith("score-"):
        return common | tokens | {"role": case.action.removeprefix("score-")}
    method = f"lora r{LORA_RANK} all-linear" if case.method == "lora" else "full"
    settings = common | tokens | {"method": method, "act_ckpt": case.recomputes}
    if case.stage is None:
        return settings | {"framework": "torch", "optimizer": "AdamW bf16 states"}
    offloads = {"offload_optimizer": "cpu"} if case.offload != "none" else {}
    offloads |= {"offload_param": "cpu"} if case.offload == "all" else {}
    zero = {"framework": "deepspeed", "optimizer": "AdamW", "bf16": True, "zero_stage": case.stage}
    return settings | zero | {"reduce_bucket_size": case.bucket_size} | offloads


def write_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Predicted, measured and error, a row for each number that was predicted; then what was not measured, and why."""
    lines = ["| case | what | predicted | measured | error |", "| --- | --- | ---: | ---: | ---: |"]
    errors: dict[str, list[float]] = {}
    for name, record in results.items():
        for what, measured in record["measured"].items():
            predicted = record["predicted"].get(what)
            if predicted is None or not measured:
                continue
            error = predicted / measured - 1
            errors.setdefault(f"{record['part']} {what}", []).append(error)
            lines.append(f"| {name} | {what} | {_show(what, predicted)} | {_show(what, measured)} | {error:+.1%} |")
    lines += ["", "| part and what | n | median error | largest error |", "| --- | ---: | ---: | ---: |"]
    for what, relative_errors in errors.items():
        sizes = [abs(error) for error in relative_errors]
        lines.append(f"| {what} | {len(relative_errors)} | {median(sizes):.1%} | {max(sizes):.1%} |")
    others = [record for record in results.values() if record["status"] != "measured"]
    lines += ["", *(f"- {record['id']}: {record['status']}: {record['reason']}" for record in others)]
    return "\n".join(lines).rstrip() + "\n"


def _show(what: str, value: float) -> str:
    if what.endswith("flops_per_s"):
        return f"{value / 1e12:.4g} TFLOP/s"
    if what.endswith("bytes_per_s"):
        return f"{value / 1e9:.4g} GB/s"
    return format_bytes(value) if what.endswith("_bytes") else f"{value:.6g}"
