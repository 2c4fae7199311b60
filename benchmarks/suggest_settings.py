"""The table of suggested settings: for a GPU, a model's size and a way of training, what the planner chooses.

In: the profiles, the bundled models, one workload for all. Out: reports/planner/suggested_settings.{md,csv}.
Left out: anything written by hand: every row is a plan. Run it with `python -m benchmarks.suggest_settings`; it takes
a minute. A row has the fewest GPUs of COUNTS on which the job fits at the high end of every interval.
"""

import csv
import io
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path

from benchmarks.texts import read_texts
from rlplan.errors import RlplanError
from rlplan.planner.checks.gpus import check_job
from rlplan.planner.gpu.search import GpuSearch
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.setting import read_setting
from rlplan.spec.files.job_file import job_from
from rlplan.spec.hardware.catalogue import get_gpu
from rlplan.spec.resolved import settle
from rlplan.units import format_bytes, format_seconds

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "reports" / "planner"
CSV, PAGE = FOLDER / "suggested_settings.csv", FOLDER / "suggested_settings.md"

GPUS = ("rtx-4090", "a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200")
MODELS = {
    "3B": "Qwen/Qwen2.5-3B",
    "7B": "Qwen/Qwen2.5-7B",
    "14B": "Qwen/Qwen2.5-14B",
    "32B": "Qwen/Qwen2.5-32B",
    "70B": "meta-llama/Llama-3.1-70B-Instruct",
}
RANK = 64
TRAINING_OVERRIDES = {
    "full": (),
    "LoRA": (f"training.lora={{rank: {RANK}}}",),
    "QLoRA": (f"training.lora={{rank: {RANK}, base_dtype: nf4}}", "rollout.quantization=fp8"),
}
"""QLoRA's rollouts are served in fp8: a base of four bits would be generated from in sixteen otherwise."""
COUNTS = (1, 2, 4, 8)
LARGER_RANKS = (512, 256, 128)
"""Ranks that vLLM serves, largest first, tried where rank 64 fits."""
WORKLOAD = (
    "workload.num_prompts_per_step=32",
    "workload.num_samples_per_prompt=8",
    "workload.max_prompt_len=1024",
    "workload.mean_prompt_len=256",
    "workload.max_response_len=2048",
    "workload.response_lengths={kind: lognormal, median: 500, sigma: 0.7}",
)


@dataclass(frozen=True)
class Suggestion:
    """A row. Bytes are of one GPU. A pass has so many rollouts, or so many tokens.

    gpu_memory_utilization: what an engine of its own would need for the same KV cache.

    max_lora_rank: the largest that fits on as many GPUs; 0 where all weights are trained.
    """

    gpu: str
    size: str
    training: str
    num_gpus: int
    verdict: str
    placement: str = ""
    zero_stage: int = 0
    recompute: str = ""
    offloads_optimizer: bool = False
    micro_batch_size_per_gpu: int = 0
    max_tokens_per_micro_batch: int = 0
    tp: int = 0
    sleep_level: int = 0
    kv_cache_memory_bytes: int = 0
    gpu_memory_utilization: float = 0.0
    max_num_seqs: int = 0
    max_lora_rank: int = 0
    step_s: float = 0.0
    peak_bytes: int = 0


def main() -> int:
    """Work out every row and write both files."""
    rows = [suggest(*key) for key in keys()]
    FOLDER.mkdir(parents=True, exist_ok=True)
    CSV.write_text(as_csv(rows), encoding="utf-8")
    PAGE.write_text(as_page(rows), encoding="utf-8")
    print(f"{len(rows)} rows in {PAGE.relative_to(ROOT)}")
    return 0


def keys() -> Iterator[tuple[str, str, str]]:
    """(gpu, size, training) of every row."""
    return product(GPUS, MODELS, TRAINING_OVERRIDES)


def suggest(gpu: str, size: str, training: str) -> Suggestion:
    """The row of one question: the plan on the fewest GPUs that fit."""
    for count in COUNTS:
        plan = _plan(gpu, size, count, TRAINING_OVERRIDES[training])
        if plan is not None and plan.verdict is Verdict.FITS:
            return _row(gpu, size, training, count, plan)
    return Suggestion(gpu, size, training, COUNTS[-1], f"not on {COUNTS[-1]}")


def _plan(gpu: str, size: str, count: int, overrides: tuple[str, ...]) -> Plan | None:
    """The best plan; None where nothing can be built."""
    try:
        spec = settle(job_from({"policy": MODELS[size], "hardware": f"{count}x{gpu}"}, (*WORKLOAD, *overrides)))
        setting = read_setting(spec)
        check_job(spec, setting)
        return GpuSearch(spec, setting).run(with_others=False)
    except RlplanError:
        return None


def _row(gpu: str, size: str, training: str, count: int, plan: Plan) -> Suggestion:
    step, trainer, engine = plan.choice.arrangement, plan.choice.trainer, plan.choice.engine
    kv = plan.kv
    assert kv is not None, "there are rollouts"
    return Suggestion(
        gpu=gpu,
        size=size,
        training=training,
        num_gpus=count,
        verdict=plan.verdict.value,
        placement=step.placement.value,
        zero_stage=trainer.zero_stage,
        recompute="full" if trainer.gradient_checkpointing else "none",
        offloads_optimizer=trainer.offloads_optimizer,
        micro_batch_size_per_gpu=0 if trainer.max_tokens else trainer.micro_batch,
        max_tokens_per_micro_batch=trainer.max_tokens,
        tp=engine.tp,
        sleep_level=engine.sleep_level,
        kv_cache_memory_bytes=kv.kv_cache_memory_bytes,
        gpu_memory_utilization=round(engine_share(plan), 3),
        max_num_seqs=kv.max_num_seqs,
        max_lora_rank=_largest_rank(gpu, size, count, training),
        step_s=round(plan.seconds, 3),
        peak_bytes=plan.binding.num_bytes,
    )


def engine_share(plan: Plan) -> float:
    """Bytes of the engine's process during generation, as a share of the total that the driver reports.

    Counts: weights, KV cache, activations, graphs, context: vLLM's gpu_memory_utilization is a part of the total too,
    and vLLM fills what is left of it with KV cache.
    """
    generating = [
        row
        for row in plan.ledger.rows
        if (row.run_phase, row.action_id, row.space) == ("steady", "generate", "device")
        and row.process.startswith("rollout_engine")
    ]
    return sum(row.peak_bytes for row in generating) / plan.job.load_gpu().memory.value


def _largest_rank(gpu: str, size: str, count: int, training: str) -> int:
    """The largest rank of adapters that fits on so many GPUs."""
    if not TRAINING_OVERRIDES[training]:
        return 0
    for rank in LARGER_RANKS:
        overrides = tuple(word.replace(f"rank: {RANK}", f"rank: {rank}") for word in TRAINING_OVERRIDES[training])
        plan = _plan(gpu, size, count, overrides)
        if plan is not None and plan.verdict is Verdict.FITS:
            return rank
    return RANK


def as_csv(rows: list[Suggestion]) -> str:
    """All columns of all rows."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Suggestion)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()


def as_page(rows: list[Suggestion]) -> str:
    """A table for each GPU."""
    counts, ranks = (", ".join(map(str, sorted(numbers))) for numbers in (COUNTS, (RANK, *LARGER_RANKS)))
    workload = "\n".join(f"- `{word}`" for word in WORKLOAD)
    head = read_texts(__file__)["head"].format(counts=counts, rank=RANK, ranks=ranks, workload=workload)
    lines = [head.rstrip("\n")]
    for gpu in dict.fromkeys(row.gpu for row in rows):
        capacity = format_bytes(get_gpu(gpu, where="gpu").memory.value)
        lines += ["", f"## {gpu} ({capacity})", "", _HEAD, _RULE]
        lines += [_line(row) for row in rows if row.gpu == gpu]
    return "\n".join(lines) + "\n"


_COLUMNS = (
    "model, training",
    "GPUs",
    "placement",
    "ZeRO",
    "micro-batch",
    "engine tp",
    "KV cache a GPU",
    "utilization",
    "max_num_seqs",
    "largest rank",
    "a step",
    "peak of a GPU",
)
_HEAD = f"| {' | '.join(_COLUMNS)} |"
_RULE = f"| --- |{' ---: |' * 1} --- |{' ---: |' * (len(_COLUMNS) - 3)}"


def _line(row: Suggestion) -> str:
    name = f"{row.size}, {row.training}"
    if not row.placement:
        return f"| {name} | {row.verdict} |{' |' * (len(_COLUMNS) - 2)}"
    tokens = row.max_tokens_per_micro_batch
    stage = f"{row.zero_stage}" + ", optimizer on the host" * row.offloads_optimizer
    cells = (
        name,
        str(row.num_gpus),
        row.placement,
        stage,
        f"{tokens:,} tokens" if tokens else str(row.micro_batch_size_per_gpu),
        str(row.tp),
        format_bytes(row.kv_cache_memory_bytes),
        f"{row.gpu_memory_utilization:.2f}",
        str(row.max_num_seqs),
        str(row.max_lora_rank or "-"),
        format_seconds(row.step_s),
        format_bytes(row.peak_bytes),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
