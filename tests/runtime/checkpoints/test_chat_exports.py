"""A chat model keeps its chat template: from stage to stage, and into what vLLM and transformers load of an export."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlplan.runtime.run_folder.reading_rollouts import choose_rollouts
from tests.factories import EXAMPLES
from tests.runtime.conftest import FinishedRun, Runner

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
CHAT_IN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=1 << 26)
chat = [{"role": "user", "content": "Sort: 312"}]
(done,) = llm.chat(chat, SamplingParams(max_tokens=4, temperature=0))
print("PROMPT " + json.dumps(llm.get_tokenizer().decode(done.prompt_token_ids)))
"""


def chat_rows(path: Path, count: int, completion: dict[str, Any] | None = None) -> str:
    rows = []
    for line in (EXAMPLES / "data" / "sort_digits" / "train.jsonl").read_text().splitlines()[:count]:
        row = json.loads(line)
        prompt = [{"role": "user", "content": row["prompt"]}]
        answer = [{"role": "assistant", "content": f"<answer>{row['answer']}</answer>"}]
        rows.append({"prompt": prompt} | ({"completion": answer} if completion is None else {"answer": row["answer"]}))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def stages(run_job: Runner, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """SFT and then GRPO on what it leaves, from a model whose template is a file of its own."""
    folder = tmp_path_factory.mktemp("chats")
    shutil.copytree(EXAMPLES / "models" / "sorter", folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    workload = {"num_steps": 1, "num_prompts_per_step": 8, "micro_batch_size_per_gpu": 4, "num_heldout_prompts": 8}
    workload |= {"max_prompt_len": 16, "max_response_len": 12, "evaluate_every": 1}
    job = {
        "schema_version": 2,
        "name": "chats",
        "hardware": {"profile": "cpu-host", "num_devices": 1, "memory": "8GiB"},
        "policy": str(folder / "model"),
        "rewards": [{"kind": "answer_matcher"}],
        "workload": workload,
        "stages": [
            {
                "name": "sft",
                "algorithm": {"name": "sft", "learning_rate": 3e-5},
                "data": {"prompts": chat_rows(folder / "sft.jsonl", 64)},
                "rewards": [],
            },
            {
                "name": "grpo",
                "policy": "stage:sft",
                "algorithm": {"name": "grpo", "learning_rate": 1e-5, "kl_coef": 0},
                "data": {"prompts": chat_rows(folder / "grpo.jsonl", 64, {})},
                "workload": {"num_samples_per_prompt": 2, "mini_batch_size": 16},
            },
        ],
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    run = run_job(str(folder / "job.yaml"))
    assert run.exit_code == 0, run.stderr
    return run


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_each_stage_trains_on_texts_that_the_template_has_written(stages: FinishedRun, stage: str) -> None:
    facts = json.loads((stages.folder / stage / "data.json").read_text())
    assert "chats by the policy's template" in json.dumps(facts)


def test_the_rollouts_of_the_second_stage_begin_with_the_template_s_words(stages: FinishedRun) -> None:
    samples = choose_rollouts(stages.folder / "grpo")
    assert samples
    assert all(str(sample["prompt"]).startswith("[u]Sort: ") for sample in samples), samples[0]


def test_transformers_and_vllm_write_chats_with_an_exported_policy(stages: FinishedRun) -> None:
    from transformers import AutoTokenizer

    policy = stages.folder / "grpo" / "policy"
    chat = [{"role": "user", "content": "Sort: 312"}]
    text = AutoTokenizer.from_pretrained(policy).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "[u]Sort: 312[a]"
    command = [sys.executable, "-c", CHAT_IN_VLLM, str(policy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert f"PROMPT {json.dumps(text)}" in done.stdout, done.stderr[-2000:]
