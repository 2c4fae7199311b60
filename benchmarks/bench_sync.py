"""Weight sync, all transports side by side: 40 M parameters in bf16 from a trainer's process to an engine's.

Measures, in one run: what this box copies within a process; for each transport and content, seconds until every tensor
is readable in another process, and with vLLM in that process the whole update and the engine's own part of it. For
deltas: the share of bytes that AdamW at a learning rate of 1e-6 changes, on fp32 master weights and bf16 copies.

`python benchmarks/bench_sync.py [--write]`: a table; with `--write` also reports/runtime/sync.{md,csv,svg};
`--draw` alone draws the committed table once more.
"""

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "reports" / "runtime"
NUM_UPDATES, NUM_DELTAS, LEARNING_RATE = 15, 4, 1e-6
CASES = [(transport, content) for transport in ("shared_memory", "gloo", "disk") for content in ("full", "delta")]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "2",
}


def make_policy(folder: Path) -> None:
    """8 layers, hidden 512, vocabulary 32,768, tied: 40 M parameters, bf16, drawn at random."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=32768,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    source = ROOT / "examples" / "models" / "sorter"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            (folder / name).write_bytes((source / name).read_bytes())


def make_job(folder: Path, content: str = "full") -> Any:
    """The job of an engine with that policy."""
    from rlplan.spec.files.job_file import load_job
    from rlplan.spec.resolved import resolve_on_cpu
    from rlplan.vocabulary import Dtype

    overrides = ("training.dtype=bfloat16", f"policy.path={folder}", f"placement.sync_content={content}")
    job = resolve_on_cpu(load_job(ROOT / "examples" / "quickstart.yaml", overrides))
    return job.model_copy(update={"rollout": job.rollout.model_copy(update={"dtype": Dtype.BFLOAT16})})


def read(pipe: Connection, folder: Path) -> None:
    """The other process, without an engine: it opens channels and reads."""
    import torch

    from rlplan.memory.weight_sync.packets import plan_policy_packets
    from rlplan.runtime.weight_sync.receiver import PolicyReceiver

    torch.set_num_threads(1)
    job = make_job(folder)
    packets = plan_policy_packets(job, job.load_model())
    receivers: list[PolicyReceiver] = []
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        what, *arguments = message
        if what == "open":
            endpoint, takes_deltas = arguments
            receivers = [PolicyReceiver(packets, torch.bfloat16, 0, takes_deltas=takes_deltas)]
            receivers[0].connect(endpoint)
            pipe.send(None)
        else:
            total, readable_at = 0, time.monotonic()
            for _, tensor in receivers[0].tensors(*arguments):
                total, readable_at = total + tensor.numel(), time.monotonic()
            pipe.send({"readable_at": readable_at, "numel": total})


def engine(pipe: Connection, folder: Path) -> None:
    """The other process, with vLLM in it."""
    from rlplan.emit.vllm import engine_arguments
    from rlplan.runtime.workers.engine.rollout_engine import RolloutEngine

    job = make_job(folder)
    worker = RolloutEngine("rollout_engine/0", job, engine_arguments(job), 2)
    worker.invoke("import_libraries")
    worker.invoke("start", str(folder))
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        what, *arguments = message
        if what == "open":
            endpoint, takes_deltas = arguments
            worker.job = make_job(folder, "delta" if takes_deltas else "full")
            worker._transfer.receiver = None
            worker.invoke("open_channel", endpoint, 0)
            pipe.send(None)
        else:
            start = time.monotonic()
            report = worker.invoke("receive_weights", *arguments)
            pipe.send({"readable_at": time.monotonic(), "update_s": time.monotonic() - start, **asdict(report)})


class Other:
    """The other process."""

    def __init__(self, target: Any, folder: Path) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, folder), daemon=True)
        self.process.start()
        theirs.close()
        self.wait(180)

    def wait(self, seconds: float = 60.0) -> Any:
        """Its answer."""
        if not self.pipe.poll(seconds):
            raise TimeoutError("the other process does not answer")
        return self.pipe.recv()

    def close(self) -> None:
        """End it."""
        self.pipe.send(None)
        self.process.join(20)
        self.process.kill()


class Copies:
    """A copy of as many bytes between two tensors of this process, one thread: what the box does at that moment."""

    def __init__(self, num_bytes: int) -> None:
        import torch

        self.source, self.target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))

    def seconds(self) -> float:
        """Seconds of one copy between warm buffers."""
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            self.target.copy_(self.source)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)


def train_copies(model: Any) -> Iterator[float]:
    """AdamW steps at the learning rate on fp32 masters; the model gets their bf16 copies. Yields the loss."""
    import torch

    masters = [parameter.detach().float().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(0, 32768, (2, 64), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        yield float(loss.detach())


def measure(other: Other, folder: Path, model: Any, transport: str, content: str) -> dict[str, Any]:
    """Medians of a transport and content."""
    import torch

    from rlplan.memory.weight_sync.packets import plan_policy_packets
    from rlplan.runtime.weight_sync.channel import Endpoint, Update
    from rlplan.runtime.weight_sync.sender import PolicySender
    from rlplan.runtime.weight_sync.source import WeightSource
    from rlplan.vocabulary import Transport

    job = make_job(folder)
    sender = PolicySender(plan_policy_packets(job, job.load_model()), torch.bfloat16, sends_deltas=content == "delta")
    path = tempfile.mkdtemp(prefix="rlplan-bench-sync-")
    endpoint = sender.offer(Endpoint(Transport(transport), 1, dtype="bfloat16", path=path, timeout_s=60.0))
    other.pipe.send(("open", endpoint, content == "delta"))
    sender.connect(endpoint)
    other.wait()
    steps, copies = train_copies(model), Copies(sum(packet.bucket.num_bytes for packet in sender.packets))
    rows = []
    for serial in range(1, (NUM_DELTAS + 1 if content == "delta" else NUM_UPDATES) + 1):
        if content == "delta" and serial > 1:
            next(steps)
        update = Update(serial, serial, serial == 1, 60.0)
        before = copies.seconds()
        start = time.monotonic()
        other.pipe.send(("receive", update))
        report = sender.send(WeightSource(model), update)
        answer = other.wait()
        seconds = answer["readable_at"] - start
        copied = (before + copies.seconds()) / 2
        rows.append(
            {
                "seconds": seconds,
                "copy_s": copied,
                "of_copy": copied / seconds,
                "share": report.num_bytes / report.full_bytes,
                **answer,
            }
        )
    sender.close()
    rows = rows[1:]
    full = sum(packet.bucket.num_bytes for packet in sender.packets)
    result = {key: statistics.median(row[key] for row in rows) for key in rows[0] if key != "readable_at"}
    return {"transport": transport, "content": content, "full_bytes": full, **result}


def run() -> dict[str, Any]:
    """Everything, in one run."""
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="rlplan-bench-") as name:
        folder = Path(name)
        make_policy(folder)
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        answer: dict[str, Any] = {}
        for key, target in (("readable", read), ("engine", engine)):
            other = Other(target, folder)
            answer[key] = [measure(other, folder, model, *case) for case in CASES]
            other.close()
        first = answer["readable"][0]
        return answer | {"copy_bytes_per_s": first["full_bytes"] / first["copy_s"]}


def table(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a transport and content."""
    rows = []
    for readable, whole in zip(answer["readable"], answer["engine"], strict=True):
        rate = readable["full_bytes"] / readable["seconds"]
        rows.append(
            {
                "transport": readable["transport"],
                "content": readable["content"],
                "share of bytes sent": round(readable["share"], 4),
                "readable, ms": round(1e3 * readable["seconds"], 1),
                "readable, GB/s": round(rate / 1e9, 2),
                "of the copy rate": round(readable["of_copy"], 2),
                "whole update with vLLM, ms": round(1e3 * whole["seconds"], 1),
                "vLLM's own part, ms": round(1e3 * whole["applied_s"], 1),
                "ours adds": round(whole["seconds"] / whole["applied_s"] - 1, 3),
            }
        )
    return rows


def draw() -> None:
    """reports/runtime/sync.svg, from the table beside it."""
    import matplotlib as mpl
    from figures import ACCENT, INK, RC, new_figure

    with (FOLDER / "sync.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [f"{row['transport'].replace('_', ' ')},\n{row['content']}" for row in rows]
    whole, applied, readable = (
        [float(row[name]) for row in rows]
        for name in ("whole update with vLLM, ms", "vLLM's own part, ms", "readable, ms")
    )
    with mpl.rc_context(RC):
        figure = new_figure(7.5, 3.6)
        figure.set_layout_engine("constrained")
        axes = figure.add_subplot()
        axes.bar(names, applied, width=0.6, color=ACCENT, label="vLLM's own part")
        rest = [total - own for total, own in zip(whole, applied, strict=True)]
        axes.bar(names, rest, width=0.6, bottom=applied, color="#d98b3a", label="transport")
        axes.plot(
            names,
            readable,
            "D",
            color="#ffffff",
            markeredgecolor=INK,
            markersize=6,
            label="transport alone, without an engine",
        )
        for place, total in enumerate(whole):
            axes.annotate(f"{total:.0f}", (place, total), (0, 3), textcoords="offset points", ha="center")
        axes.set_title("Milliseconds of one weight update of 40 M parameters")
        axes.grid(axis="y")
        figure.legend(loc="outside lower center", ncols=3)
        figure.savefig(FOLDER / "sync.svg", metadata={"Date": None})


def write(answer: dict[str, Any]) -> None:
    """reports/runtime/sync.md, .csv and .svg."""
    from benchmarks.texts import read_texts

    rows = table(answer)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "sync.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw()
    head = "| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]) + "\n"
    body = "".join("| " + " | ".join(str(value) for value in row.values()) + " |\n" for row in rows)
    page = read_texts(__file__)["page"].format(rate=answer["copy_bytes_per_s"] / 1e9, table=head + body)
    (FOLDER / "sync.md").write_text(page)


def main() -> None:
    """Print a table; write the report where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--draw", action="store_true", help="draw the committed table once more, and measure nothing")
    arguments = parser.parse_args()
    if arguments.draw:
        draw()
        return
    answer = run()
    print(f"copies within a process: {answer['copy_bytes_per_s'] / 1e9:.1f} GB/s")
    for row in table(answer):
        print(json.dumps(row))
    if arguments.write:
        write(answer)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
