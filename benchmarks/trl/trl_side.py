"""TRL's side of the comparison: GRPOTrainer on the same model, prompts and lengths. Runs in an environment with TRL.

In: a settings file (JSON). Out: seconds of each step, as JSON on the last line.

TRL has no length limit of a single rollout. A logits processor gives each row of a generation batch its own length: the
end of sequence is impossible before it and certain at it, so the batch ends when its longest row does.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback

from trl import GRPOConfig, GRPOTrainer


class ForcedLengths(LogitsProcessor):
    """Ends row i of a batch after exactly lengths[i] tokens. Lengths are taken from one endless list."""

    def __init__(self, lengths: list[int], end_token: int) -> None:
        self.lengths, self.end_token = lengths, end_token
        self.taken = 0

    def begin(self, num_rows: int, prompt_len: int) -> None:
        """A new generation batch."""
        rows = [self.lengths[(self.taken + row) % len(self.lengths)] for row in range(num_rows)]
        self.taken += num_rows
        self.ends = torch.tensor(rows) + prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_last = self.ends <= input_ids.shape[1] + 1
        end = torch.where(is_last, torch.tensor(1e4, dtype=scores.dtype), torch.tensor(-1e4, dtype=scores.dtype))
        scores[:, self.end_token] = end
        return scores


class StepClock(TrainerCallback):
    """Seconds of each optimizer step, generation included."""

    def __init__(self) -> None:
        self.ends = [time.monotonic()]

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Training begins."""
        self.ends = [time.monotonic()]

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """An optimizer step has ended."""
        self.ends.append(time.monotonic())


def reward(completions: list[str], **columns: Any) -> list[float]:
    """The same rule as ours: whether the answer stands in the text."""
    return [float(answer in text) for answer, text in zip(columns["answer"], completions, strict=True)]


def _config(settings: dict[str, Any]) -> GRPOConfig:
    """TRL's settings for ours."""
    return GRPOConfig(
        output_dir=settings["out"],
        max_steps=settings["num_steps"],
        num_generations=settings["num_samples"],
        generation_batch_size=settings["num_rollouts"],
        per_device_train_batch_size=settings["batch_size"],
        gradient_accumulation_steps=settings["num_rollouts"] // settings["batch_size"],
        max_completion_length=settings["max_response_len"],
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        bf16=settings["autocast"],
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        shuffle_dataset=False,
        seed=0,
    )


def main(settings_file: str) -> None:
    """Train and print the seconds of each step."""
    settings = json.loads(Path(settings_file).read_text())
    torch.set_num_threads(settings["num_threads"])
    dtype = getattr(torch, settings["dtype"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    rows = [json.loads(line) for line in Path(settings["prompts"]).read_text().splitlines()]
    clock = StepClock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=_config(settings),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    forced = ForcedLengths(settings["lengths"], tokenizer.eos_token_id)
    plain = trainer.model.generate
    seconds: list[float] = []
    sampled: list[int] = []

    def generate(input_ids: torch.Tensor, **keywords: Any) -> torch.Tensor:
        forced.begin(*input_ids.shape)
        start = time.monotonic()
        completions = plain(input_ids, logits_processor=LogitsProcessorList([forced]), **keywords)
        seconds.append(time.monotonic() - start)
        sampled.append(int((forced.ends - input_ids.shape[1]).sum()))
        return completions

    trainer.model.generate = partial(generate)
    trainer.train()
    steps = [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)]
    lengths = [
        entry["completions/mean_length"] for entry in trainer.state.log_history if "completions/mean_length" in entry
    ]
    print(json.dumps({"step_s": steps, "generate_s": seconds, "num_tokens": sampled, "mean_lengths": lengths}))


if __name__ == "__main__":
    main(sys.argv[1])
