"""Time that sandboxed rewards add to a step while generation lasts longer than they do: only that of the last ones.

In: examples/rewards/code-executor.yaml with forced lengths, on a core for generation and one for training; and the same
with a pattern as its reward. Out: reports/sandbox/overlap.md. `python -m benchmarks.runs.reward_overlap [STEPS]`; two
and a half minutes on two cores.
"""

import statistics
import sys

from benchmarks.runs.timed_runs import NUM_WARM_UP_STEPS, ROOT, TimedRun, run_job
from benchmarks.texts import format_table, read_texts
from rlplan.trace import Span, Trace

JOB = "examples/rewards/code-executor.yaml"
PATTERN = ("rewards=[{kind: answer_matcher}]", "data.prompts=../data/sort_digits/train.jsonl")
LENGTHS = (
    "placement={placement: disaggregated, transport: shared_memory}",
    "workload.num_prompts_per_step=8",
    "workload.mini_batch_size=64",
    "workload.micro_batch_size_per_gpu=32",
    "workload.max_response_len=240",
    "workload.mean_response_len=100",
    "workload.response_lengths={kind: lognormal, median: 80, sigma: 0.7}",
    "workload.num_heldout_prompts=16",
    "controls.forces_lengths=true",
)
REPORT = ROOT / "reports" / "sandbox" / "overlap.md"


def overlap(trace: Trace, step: int) -> tuple[float, float]:
    """(seconds from the first reward's begin to the last one's end, the share of them while there was generation)."""
    judged = _spans(trace, "verify", "verifiers", step)
    generated = _spans(trace, "generate", "rollout_engine", step)
    begin, end = min(span.start_s for span in judged), max(span.end_s for span in judged)
    until = max(span.end_s for span in generated)
    since = min(span.start_s for span in generated)
    return end - begin, max(0.0, min(end, until) - max(begin, since)) / (end - begin)


def _spans(trace: Trace, action: str, process: str, step: int) -> list[Span]:
    return [s for s in trace.spans if (s.action_id, s.step) == (action, step) and s.process.startswith(process)]


def main() -> int:
    """Run both, write the report."""
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 14
    steps = (f"workload.num_steps={num_steps}", f"workload.evaluate_every={num_steps}")
    pattern = run_job("rewards-by-pattern", JOB, *LENGTHS, *PATTERN, *steps)
    programs = run_job("rewards-by-programs", JOB, *LENGTHS, *steps)
    REPORT.write_text(_page(pattern, programs), encoding="utf-8")
    print(REPORT.read_text(encoding="utf-8"))
    return 0


def _page(pattern: TimedRun, programs: TimedRun) -> str:
    trace = Trace.read(programs.folder / "trace.jsonl")
    steps = range(NUM_WARM_UP_STEPS + 1, NUM_WARM_UP_STEPS + 1 + len(programs.step_s))
    spans, shares = zip(*(overlap(trace, step) for step in steps), strict=True)
    without, with_them = statistics.median(pattern.step_s), statistics.median(programs.step_s)
    rows = [
        (name, statistics.median(run.step_s), run.parts.get("generate", 0.0), run.parts.get("verify", 0.0))
        for name, run in (("a pattern", pattern), ("programs in a sandbox", programs))
    ]
    table = format_table(
        ("reward", "step (s)", "generate (s)", "waited for rewards (s)"),
        ((name, *(f"{value:.3f}" for value in values)) for name, *values in rows),
    )
    return read_texts(__file__)["page"].format(
        job=JOB,
        num_steps=len(programs.step_s),
        num_warm_up=NUM_WARM_UP_STEPS,
        table=table,
        added=with_them / without - 1,
        waited=programs.parts.get("verify", 0.0) / with_them,
        seconds=statistics.median(spans),
        share=statistics.median(shares),
    )


if __name__ == "__main__":
    sys.exit(main())
