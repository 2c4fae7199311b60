"""Readers: every kind of file that rlplan reads, with a good one to begin from and the function that reads it."""

import io
import json
import os
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from rlplan.accuracy.files.reading import read_points
from rlplan.emit.bundle import read_bundle, write_bundle
from rlplan.errors import SpecError
from rlplan.foreign.logs.read import read_log
from rlplan.foreign.source import read_source
from rlplan.foreign.tracebacks.read import read_out_of_memory
from rlplan.planner.plan import compute_digest, read_plan
from rlplan.report.run_folder import read_run_folder
from rlplan.runtime.checkpoints.tensor_file import TensorFile
from rlplan.runtime.data import tables
from rlplan.runtime.data.layouts import Columns
from rlplan.runtime.data.loading import RowNeeds, load_rows
from rlplan.runtime.data.role_tokenizers import read_token_ids
from rlplan.runtime.data.text_tokens import read_end_tokens
from rlplan.spec.base import read_json
from rlplan.spec.declaration import read_declaration
from rlplan.spec.files.job_file import load_job
from rlplan.spec.fingerprints import model_fingerprint
from rlplan.spec.hardware.catalogue import read_profile
from rlplan.spec.measured_lengths import read_run_lengths
from rlplan.spec.model import read_model
from rlplan.spec.models.headers import read_checkpoint
from tests.accuracy.files.test_reading import V0_LOG, V1_LOG
from tests.factories import EXAMPLES, ROOT, make_plan
from tests.report.factory import make_run

SORTER = EXAMPLES / "models" / "sorter"


@dataclass(frozen=True)
class Reader:
    """Reads a file of a folder, of which it takes others as they are."""

    file: str
    read: Callable[[Path], object]
    seeds: tuple[bytes, ...]
    beside: dict[str, bytes] = field(default_factory=dict)
    mend: Callable[[bytes], bytes] = bytes
    """Makes a changed file whole where it carries a digest: what is inside is to be looked at too."""


def readers(folder: Path) -> dict[str, Reader]:
    """All readers by name. folder: a place for files that must be made first."""
    return (
        _make_job_readers(folder)
        | _make_model_readers()
        | _make_data_readers()
        | _make_point_readers()
        | _make_run_readers(folder)
        | _make_foreign_readers()
        | _make_log_readers()
    )


def _make_job_readers(folder: Path) -> dict[str, Reader]:
    plan = make_plan()
    write_bundle(plan, folder / "bundle")
    bundle = {
        str(path.relative_to(folder / "bundle")): path.read_bytes()
        for path in (folder / "bundle").rglob("*")
        if path.is_file()
    }
    profile = (ROOT / "hardware_profiles" / "node" / "cpu-host.yaml").read_bytes()
    own = b'MINE = Algorithm(name="mine", source="", advantage="group_mean", loss="clipped_ratio")\n'
    jobs = [_mark_paths(EXAMPLES / name) for name in ("quickstart.yaml", "ppo-tiny.yaml", "multi-turn.yaml")]
    job_readers = {
        "job": Reader(
            "job.yaml", load_job, tuple(jobs), mend=lambda data: data.replace(b"IN_EXAMPLES", bytes(EXAMPLES))
        ),
        "profile": Reader("cpu-host.yaml", read_profile, (profile,)),
        "algorithm": Reader("own.py", lambda path: read_declaration(f"{path}:MINE", path.parent), (own,)),
        "plan": Reader("plan.json", read_plan, (bundle["plan.json"],), mend=_replace_digest),
    }
    for name in bundle:
        beside = {other: content for other, content in bundle.items() if other != name}
        job_readers[f"bundle: {name}"] = Reader(name, partial(_read_bundle, name), (bundle[name],), beside)
    return job_readers


def _read_bundle(name: str, path: Path) -> None:
    read_bundle(path.parents[name.count("/")])


def _mark_paths(path: Path) -> bytes:
    """The same bytes in every checkout, so that a seed makes the same files."""
    return re.sub(r"\b(models|data|environments|rewards)/", r"IN_EXAMPLES/\1/", path.read_text()).encode()


def _replace_digest(data: bytes) -> bytes:
    try:
        stored = json.loads(data)
        stored["digest"] = compute_digest(
            {key: stored[key] for key in stored if key not in ("schema_version", "digest")}
        )
        return json.dumps(stored).encode()
    except (ValueError, TypeError, LookupError, RecursionError):
        return data


def _make_model_readers() -> dict[str, Reader]:
    read = {path.name: path.read_bytes() for path in SORTER.iterdir()}
    small, index = _safetensors({"a": [2, 2], "b": [3]}), {"weight_map": {"a": "one.safetensors"}}

    return {
        "config": Reader("config.json", read_model, (read["config.json"],)),
        "safetensors": Reader("model.safetensors", read_checkpoint, (small,)),
        "checkpoint's tensors": Reader("x.safetensors", _open_tensors, (_safetensors({"a": [4], "b": [3]}),)),
        "index": Reader(
            "model.safetensors.index.json",
            lambda path: read_checkpoint(path.parent),
            (_json(index),),
            {"one.safetensors": _safetensors({"a": [4]})},
        ),
        "tokens": Reader("tokenizer.json", lambda path: read_token_ids(path.parent), (read["tokenizer.json"],)),
        "ends": Reader(
            "generation_config.json", lambda path: read_end_tokens(path.parent), (b'{"eos_token_id": [2, 7]}',)
        ),
        "fingerprint": Reader("tokenizer.json", lambda path: model_fingerprint(path.parent), (b"{}",)),
    }


def _safetensors(shapes: dict[str, list[int]]) -> bytes:
    """A file of 32-bit zeros."""
    header, at = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at := at + 4 * prod(shape)]}
    text = _json(header)
    return len(text).to_bytes(8, "little") + text + bytes(at)


def _open_tensors(path: Path) -> None:
    TensorFile(path).close()


def _make_data_readers() -> dict[str, Reader]:
    rows = [
        {"prompt": "1 + 1?", "answer": "2"},
        {"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": "x"}, "extra_info": {"a": 1}},
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
    ]

    def load(path: Path) -> None:
        rows = path.read_bytes()
        pairs = b"chosen" in rows
        load_rows(path, Columns(), path.parent, RowNeeds("pair" if pairs else "", answers=not pairs))

    lines = tuple(b"\n".join(json.dumps(row).encode() for row in [row, row]) for row in rows)
    lists = tuple(json.dumps([row, row]).encode() for row in rows)
    return {
        "data: lines": Reader("rows.jsonl", load, lines),
        "data: a list": Reader("rows.json", load, lists),
        "data: its own list of files": Reader(
            "state.json",
            lambda path: _ends_in_words(lambda: tables._find_files(path.parent)),
            (b'{"_data_files": ["a"]}',),
        ),
    }


def _ends_in_words(read: Callable[[], object]) -> None:
    """Run `read` in its own process, which ends with a message for the one that asked."""
    try:
        read()
    except SystemExit as error:
        raise SpecError(str(error), where="a process of its own", rule="as said", way_out="as said") from None


def table_readers() -> dict[str, Reader]:
    """Readers that use pyarrow. They run in the process for tables, which has more memory."""
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table({"prompt": ["1 + 1?", "2 + 2?"] * 20, "answer": ["2", "4"] * 20})
    parquet, arrow = io.BytesIO(), io.BytesIO()
    pa.parquet.write_table(table, parquet)
    with pa.ipc.new_stream(arrow, table.schema) as writer:
        writer.write_table(table)

    def print_rows(path: Path) -> None:
        with redirect_stdout(io.StringIO()):
            _ends_in_words(lambda: tables.print_rows(path))

    return {
        "data: parquet": Reader("rows.parquet", print_rows, (parquet.getvalue(),)),
        "data: arrow": Reader("rows.arrow", print_rows, (arrow.getvalue(),)),
    }


def _make_point_readers() -> dict[str, Reader]:
    data = ROOT / "rlplan" / "accuracy" / "data"
    points = json.loads((data / "measured_points.json").read_text())
    listed = points if isinstance(points, list) else points["points"]
    latencies = b"\n".join((data / "serving_latency.csv").read_bytes().splitlines()[:6])
    return {
        "points: JSON": Reader("p.json", read_points, (json.dumps(listed[:4]).encode(),)),
        "points: CSV": Reader("p.csv", read_points, (latencies,)),
        "points: a log": Reader("p.log", read_points, (V1_LOG.encode(), V0_LOG.encode())),
    }


def _make_run_readers(folder: Path) -> dict[str, Reader]:
    run = make_run(folder / "run")
    files = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    run_readers = {}
    for name in ("trace.jsonl", "metrics.jsonl", "timings.jsonl", "status.json"):
        seed = b"\n".join(files[name].splitlines()[:12]) if name != "status.json" else files[name]
        beside = {other: b"\n".join(content.splitlines()[:3]) for other, content in files.items() if "jsonl" in other}
        beside["plan.json"] = files["plan.json"]
        run_readers[f"run: {name}"] = Reader(name, lambda path: read_run_folder(path.parent), (seed,), beside)
    lengths = {"mean_response_len": 3, "response_lengths": {"kind": "histogram", "edges": [1, 5, 9], "counts": [1, 2]}}
    return run_readers | {
        "run: lengths.json": Reader("lengths.json", lambda path: read_run_lengths(path.parent), (_json(lengths),)),
        "run: data.json": Reader(
            "data.json", lambda path: read_run_lengths(path.parent), (_json({"prompt_len": {"mean": 3.5, "max": 9}}),)
        ),
        "run: any JSON": Reader("x.json", lambda path: read_json(path, "it"), (_json({"a": [1, {"b": None}]}),)),
    }


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


FOREIGN = {
    "verl": ("verl.yaml", "actor_rollout_ref: {model: {path: a/b}, rollout: {n: 8}}\ndata: {train_batch_size: 8}\n"),
    "nemo_rl": ("nemo.yaml", "policy: {model_name: a/b}\ngrpo:\n  num_prompts_per_step: 8\nloss_fn: {}\n"),
    "openrlhf": (
        "run.sh",
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path a/b --vllm.num_engines 2 --data.max_len 64\n",
    ),
    "slime": ("run.sh", "ARGS=(--rollout-batch-size 8)\npython3 train.py --hf-checkpoint a/b ${ARGS[@]}\n"),
    "trl": ("run.sh", "accelerate launch --num_processes 8 grpo.py --num_generations 8 --use_vllm true\n"),
    "a script": (
        "run.sh",
        """#!/bin/bash
MODEL=${MODEL:-Qwen/Qwen2.5-7B}; N=$((2 * 4)); ARGS=(--a b "$@")
for i in 1 2; do echo $i; done; if [ -n "$X" ]; then Y=1; fi
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
  actor_rollout_ref.model.path=$MODEL data.train_batch_size=$((N * 128)) "${ARGS[@]}"
""",
    ),
    "a program": (
        "train.py",
        "from trl import GRPOConfig\nLR = 1e-6\nargs = GRPOConfig(learning_rate=LR, num_generations=2 * 4)\n",
    ),
    "a notebook": (
        "train.ipynb",
        '{"cells": [{"cell_type": "code", "source": ["from trl import GRPOConfig\\n", "a = GRPOConfig()\\n"]}]}',
    ),
    "TOML": ("rl.toml", 'model = {name = "a/b"}\n[orchestrator]\nbatch_size = 8\n[trainer]\nmax_steps = 9\n'),
}


def _make_foreign_readers() -> dict[str, Reader]:
    return {
        f"foreign: {name}": Reader(file, lambda path: read_source(path, None), (text.encode(),))
        for name, (file, text) in FOREIGN.items()
    }


LOGS = {
    "rows": (
        "log.jsonl",
        '{"step": 1, "timing_s/gen": 5.0, "timing_s/step": 9.0}\n{"step": 2, "timing_s/step": 9}\n',
    ),
    "CSV": ("log.csv", "step,timing_s/gen,timing_s/step\n1,5.0,9.0\n2,5.1,9.1\n"),
    "a trainer's state": ("trainer_state.json", '{"log_history": [{"step": 1, "step_time": 5.0, "loss": 0.1}]}'),
    "a console": (
        "run.log",
        """step:1 - timing_s/gen:5.0 - timing_s/step:9.0
{'loss': 0.1, 'step_time': 5.0}
Step 3 | Time: 5.1s | Reward: 0.2
 10%|█  | 3/30 [00:15<02:15,  5.0s/it]
• gen_time: 3.5s
""",
    ),
}


def _make_log_readers() -> dict[str, Reader]:
    lost = (
        'File "verl/workers/fsdp_workers.py", line 9, in compute_log_prob\ntorch.OutOfMemoryError: CUDA out of memory. '
        "Tried to allocate 18.55 GiB. GPU 0 has a total capacity of 79.10 GiB of which 3.20 GiB is free. Process 7 has "
        "75.90 GiB memory in use. Of the allocated memory 70.1 GiB is allocated by PyTorch, and 1.2 GiB is reserved.\n"
    )
    logs = {f"log: {name}": Reader(file, read_log, (text.encode(),)) for name, (file, text) in LOGS.items()}
    return logs | {"traceback": Reader("run.err", read_out_of_memory, (lost.encode(),))}


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Files by their names in a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def is_inside(path: object, folder: Path) -> bool:
    """Whether a path, of text or bytes, leads into a folder."""
    name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    return Path(name).resolve().is_relative_to(folder)
