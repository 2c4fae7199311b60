"""A job to begin with, as text with comments: for a CPU host or for GPUs, with the user's data and rewards or ours.

In: a few answers. Out: files by name: the job, its schema for editors, and rows and a reward function to begin with
where the user has none. Left out: writing them, asking (`rlplan init`).
"""

import json
from typing import Literal

from rlplan.errors import SpecError, did_you_mean
from rlplan.records import dataclass
from rlplan.spec.algorithms import ALGORITHMS, DEFAULT
from rlplan.spec.declaration import NUM_GIVEN
from rlplan.spec.files.job_forms import hardware_of
from rlplan.spec.files.job_schema import HEADER, NAME, job_schema
from rlplan.spec.hardware.catalogue import is_cpu_host
from rlplan.units import GIB

CPU_MODEL, GPU_MODEL = "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-7B-Instruct"
CPU = "cpu-host"
RewardKind = Literal["answer", "math", "code", "function"]
ROWS, FUNCTION = "train.jsonl", "reward.py"
NUM_ROWS = 200

REWARDS: dict[RewardKind, str] = {
    "answer": """\
  - kind: answer_matcher       # 1 where the group of the pattern is the row's answer
    pattern: '<answer>(.*?)</answer>'
  - kind: format_checker       # and a little for the form alone: it is learned first
    pattern: '.*<answer>.*</answer>\\s*'
    weight: 0.1
""",
    "math": """\
  - kind: answer_matcher       # 1 where both are equal by the rules of mathematics: 1/2 is 0.5
    pattern: '\\\\boxed\\{(.*)\\}'
    compares: math
""",
    "code": """\
  - kind: code_executor        # runs the program in a response against the row's tests, in a sandbox
    case_timeout_s: 4
""",
    "function": f"""\
  - kind: function             # your own, in a process of its own
    path: {FUNCTION}:reward
""",
}

FUNCTION_TEXT = '''"""A reward function of your own. `rlplan docs rewards` says what it is given."""


def reward(prompts, completions, answer, **columns):
    """One number for each completion, the higher the better. prompts, completions, answer: lists of texts.

    Every other column of the data is there too, under its name.
    """
    return [1.0 if right in completion else 0.0 for completion, right in zip(completions, answer)]
'''


@dataclass(frozen=True)
class Answers:
    """What a job to begin with is made of."""

    hardware: str = CPU
    """As in a job: `8xH100`, or `cpu-host`."""
    model: str | None = None
    """A hub id or a path; None takes a small one on a CPU host, one of 7B on GPUs."""
    algorithm: str = DEFAULT
    data: str | None = None
    """The prompts, relative to the job; None writes some sums."""
    heldout: str | None = None
    prompt_column: str | None = None
    """Where none of the known layouts has it."""
    reward: RewardKind = "answer"
    name: str = "first"
    memory_bytes: int = 8 * GIB
    """Of the host that a job on a CPU may take."""
    num_cores: int = 2


def new_job(answers: Answers, job_name: str = "job.yaml") -> dict[str, str]:
    """Texts by the names of their files, which stand in one folder. Raises: SpecError where an answer names nothing.

    >>> sorted(new_job(Answers(hardware="8xH100")))
    ['job.schema.json', 'job.yaml', 'train.jsonl']
    """
    if answers.algorithm not in ALGORITHMS:
        raise SpecError(
            f"algorithm '{answers.algorithm}' is unknown",
            where="--algorithm",
            rule=f"one of {', '.join(ALGORITHMS)}." + did_you_mean(answers.algorithm, ALGORITHMS),
            way_out="`rlplan docs algorithms` says what each is for",
        )
    profile = hardware_of(answers.hardware, "--gpus")["profile"]  # which refuses what is none
    on_cpu = is_cpu_host(profile, where="--gpus")
    files = {job_name: _job_text(answers, job_name, on_cpu=on_cpu), NAME: json.dumps(job_schema(), indent=1) + "\n"}
    if answers.reward == "function":
        files[FUNCTION] = FUNCTION_TEXT
    if answers.data is None:
        files[ROWS] = _rows(answers, range(NUM_ROWS))
        if _needs_heldout(answers):
            files["heldout.jsonl"] = _rows(answers, range(NUM_ROWS, NUM_ROWS + 40), pairs=False)
    return files


def _needs_heldout(answers: Answers) -> bool:
    """Whether held-out prompts are no part of the data: of labelled answers, but where judging them is learned."""
    return _has_pairs(answers) and not ALGORITHMS[answers.algorithm].trains_scalar


def _has_pairs(answers: Answers) -> bool:
    """Whether the algorithm is given answers that were judged."""
    return ALGORITHMS[answers.algorithm].given in ("pair", "unpaired")


def _job_text(answers: Answers, job_name: str, *, on_cpu: bool) -> str:
    model = answers.model or (CPU_MODEL if on_cpu else GPU_MODEL)
    return f"""\
{HEADER.format(NAME)}
# {answers.algorithm} on {model}. Every key: `rlplan docs KEY`, such as `rlplan docs workload.num_steps`.
#   rlplan plan {job_name} -o plan.json   what fits and how fast, without starting anything
#   rlplan run {job_name} --dry-run       checks data, rewards, packages and memory
#   rlplan run {job_name} --report        runs it, and lays what was measured beside what was predicted
schema_version: 2
name: {answers.name}

policy: {model}   # any hub id, a folder, or a config.json (a config is enough for a plan)
algorithm: {answers.algorithm}   # {", ".join(name for name in ALGORITHMS if name != answers.algorithm)}
# algorithm: {{name: {answers.algorithm}, learning_rate: 1e-6, kl_coef: 0.001}}   # the same with numbers

{_hardware(answers, on_cpu=on_cpu)}
{_data(answers)}
{_rewards(answers)}
{_workload(answers, on_cpu=on_cpu)}
# Whatever stands nowhere here is decided by the planner, such as:
# training: {{zero_stage: 3, lora: {{rank: 16}}}}
# rollout: {{tp: 2}}
# placement: {{placement: colocated}}
checkpoints: {{every: 50}}   # `rlplan run --resume latest` goes on from the last one
# metrics: {{sinks: [tensorboard]}}   # or wandb, trackio
"""


def _hardware(answers: Answers, *, on_cpu: bool) -> str:
    if not on_cpu:
        return f"hardware: {answers.hardware}   # `rlplan profiles list`; 8xH100 + 8xL40S trains and generates apart\n"
    gib = max(1, answers.memory_bytes // GIB)
    return f"""\
hardware:
  profile: {answers.hardware}
  num_devices: {max(1, min(2, answers.num_cores))}   # processes that train or generate side by side
  memory: {gib}GiB   # that the job may take of this host
"""


def _data(answers: Answers) -> str:
    columns = f"  prompt_column: {answers.prompt_column}\n" if answers.prompt_column else ""
    own = answers.heldout or ("heldout.jsonl" if _needs_heldout(answers) and answers.data is None else None)
    heldout = f"heldout: {own}" if own else "# heldout: heldout.jsonl   # without it a tenth of the prompts is held out"
    return f"""\
data:   # JSONL, JSON, CSV, parquet or a saved data set, with the columns `prompt` and `answer`, or those of TRL or verl
  prompts: {answers.data or ROWS}
  {heldout}
{columns}"""


def _rewards(answers: Answers) -> str:
    if ALGORITHMS[answers.algorithm].trains_scalar:
        return "# rewards: none, the model learns from the pairs alone"
    return f"rewards:\n{REWARDS[answers.reward]}"


def _workload(answers: Answers, *, on_cpu: bool) -> str:
    given = ALGORITHMS[answers.algorithm].given
    samples = NUM_GIVEN[given] if given else 4 if on_cpu else 8
    steps, prompts, prompt_len, response_len = (20, 8, 256, 128) if on_cpu else (200, 128, 1024, 2048)
    return f"""\
workload:
  num_steps: {steps}
  num_prompts_per_step: {prompts}
  num_samples_per_prompt: {samples}   # responses to each prompt
  max_prompt_len: {prompt_len}   # tokens; longer prompts are refused before anything starts
  max_response_len: {response_len}   # tokens; longer responses are cut off
  evaluate_every: 10   # steps, on the held-out prompts
"""


def _rows(answers: Answers, numbers: range, *, pairs: bool | None = None) -> str:
    """Sums, whose right answers are known."""
    form = "\\boxed{...}" if answers.reward == "math" else "<answer>...</answer>"
    lines = []
    for number in numbers:
        a, b = 10 + number * 7 % 89, 10 + number * 31 % 83
        row: dict[str, str] = {"prompt": f"What is {a} + {b}? Write the number as {form}.", "answer": str(a + b)}
        if answers.reward == "code":
            row = {
                "prompt": f"Write a Python function add() that returns {a} + {b}, in a block of code.",
                "answer": f"assert add() == {a + b}",
            }
        if _has_pairs(answers) if pairs is None else pairs:
            right, wrong = (form.replace("...", str(value)) for value in (a + b, a + b + 10))
            row |= {"chosen": right, "rejected": wrong}
        elif ALGORITHMS[answers.algorithm].given:
            row["completion"] = form.replace("...", str(a + b))
        lines.append(json.dumps(row))
    return "\n".join(lines) + "\n"
