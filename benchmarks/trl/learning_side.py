"""TRL's side of the learning curves: GRPOTrainer on the task, the prompts and the rewards of one of our jobs.

In: a settings file (JSON) that names a job and its overrides. Out: greedy held-out accuracy before training and after
every so many steps, mean rewards and gradient norms, as JSON on the last line. Runs where TRL is installed.

The job is read by rlplan: prompts come in the order in which our run has them, and our rules judge what TRL's policy
says. TRL samples, computes the loss and steps by itself.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback

from rlplan.runtime.data.prompt_sets import load_prompts
from rlplan.runtime.data.text_tokens import read_end_tokens
from rlplan.runtime.rewards.reward_pool import RewardPool
from rlplan.runtime.rollout.experience import Completion, Prompt, Rollout
from rlplan.runtime.rollout.groups import GroupMaker
from rlplan.runtime.rollout.requests import RequestMaker
from rlplan.spec.files.job_file import load_job
from rlplan.spec.resolved import ResolvedJob, resolve_on_cpu
from trl import GRPOConfig, GRPOTrainer


class Task:
    """The job's prompts and rewards. Every token sequence that TRL makes is judged here, after its end was cut off."""

    def __init__(self, job: ResolvedJob) -> None:
        self.job = job
        self.prompts = load_prompts(job)
        self.requests = RequestMaker(job, self.prompts)
        self.ends = read_end_tokens(Path(job.policy.path))
        self.maker = GroupMaker(job, self.requests.prompt, self.ends)
        self.reward_pool = RewardPool(job)

    def rows(self) -> list[dict[str, Any]]:
        """The prompts of the whole run, in order."""
        count = self.job.workload.num_steps * self.job.workload.num_prompts_per_step
        return [{"prompt": self.requests.prompt(number).text, "number": number} for number in range(count)]

    def rewards(self, completion_ids: list[list[int]], number: list[int], **others: Any) -> list[float]:
        """A reward function in TRL's signature."""
        judged = self.judge([self.requests.prompt(each) for each in number], completion_ids)
        return [rollout.reward for rollout in judged]

    def judge(self, prompts: list[Prompt], answers: list[list[int]]) -> list[Rollout]:
        """Rollouts with their rewards."""
        rollouts = [
            Rollout(prompt, 0, Completion(tuple(tokens), (), ""), self.maker.words.text(tokens))
            for prompt, tokens in zip(prompts, answers, strict=True)
        ]
        self.reward_pool.judge(rollouts)
        return rollouts

    def accuracy(self, model: Any) -> float:
        """Greedy, on the held-out prompts, which are all of one length."""
        greedy = GenerationConfig(
            do_sample=False,
            max_new_tokens=self.job.workload.max_response_len,
            eos_token_id=sorted(self.ends),
            pad_token_id=model.config.pad_token_id,
        )
        tokens = torch.tensor([prompt.tokens for prompt in self.prompts.heldout])
        was_training = model.training
        model.eval()
        with torch.no_grad():
            completions = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=greedy)
        model.train(was_training)
        rollouts = self.judge(
            list(self.prompts.heldout), [self._cut(row) for row in completions[:, tokens.shape[1] :].tolist()]
        )
        return sum(rollout.rewards["answer_matcher"] for rollout in rollouts) / len(rollouts)

    def _cut(self, tokens: list[int]) -> list[int]:
        ends = [index for index, token in enumerate(tokens) if token in self.ends]
        return tokens[: ends[0] + 1] if ends else tokens


class Evaluation(TrainerCallback):
    """Accuracy before training and after every so many optimizer steps."""

    def __init__(self, measure: Callable[[Any], float], every: int) -> None:
        self.measure, self.every = measure, every
        self.accuracy: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Measure the start policy."""
        self.accuracy.append(self.measure(keywords["model"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Measure the policy after an optimizer step."""
        if state.global_step % self.every == 0:
            self.accuracy.append(self.measure(keywords["model"]))


def configuration(job: ResolvedJob, out: str, batch_size: int) -> GRPOConfig:
    """TRL's names of what the job says. Raises: AssertionError for what is not said on both sides alike."""
    algorithm, load = job.algorithm, job.workload
    assert algorithm.name == "grpo"
    assert load.mini_batch_size == load.num_rollouts_per_step, "one optimizer step a batch"
    assert algorithm.kl_coef == 0, "no reference"
    assert algorithm.importance == "none", "TRL corrects nothing without vLLM"
    assert algorithm.token_weights == "sequence", "TRL's loss_type=grpo"
    return GRPOConfig(
        output_dir=out,
        seed=job.seed,
        max_steps=load.num_steps,
        num_generations=load.num_samples_per_prompt,
        generation_batch_size=load.num_rollouts_per_step,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=load.num_rollouts_per_step // batch_size,
        num_iterations=1,
        max_completion_length=load.max_response_len,
        temperature=load.temperature,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
        learning_rate=algorithm.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        optim="adamw_torch",
        adam_beta1=algorithm.adam_beta1,
        adam_beta2=algorithm.adam_beta2,
        weight_decay=algorithm.weight_decay,
        max_grad_norm=algorithm.gradient_clipping,
        beta=algorithm.kl_coef,
        epsilon=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        loss_type="grpo",
        scale_rewards="group",
        mask_truncated_completions=algorithm.masks_truncated,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_completions=False,
    )


def main(settings_file: str) -> None:
    """Train, and print the curve."""
    settings = json.loads(Path(settings_file).read_text())
    torch.set_num_threads(settings["num_threads"])
    job = resolve_on_cpu(load_job(Path(settings["job"]), settings["overrides"]))
    task = Task(job)
    tokenizer = AutoTokenizer.from_pretrained(job.policy.path)
    rows = task.rows()
    theirs = tokenizer([row["prompt"] for row in rows])["input_ids"]
    ours = [list(task.requests.prompt(row["number"]).tokens) for row in rows]
    assert theirs == ours, "both sides see the same tokens"
    evaluation = Evaluation(task.accuracy, settings["every"])
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.policy.path, dtype=torch.float32),
        reward_funcs=task.rewards,
        args=configuration(job, settings["out"], settings["batch_size"]),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[evaluation],
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    result = {
        "accuracy": evaluation.accuracy,
        "reward": [entry["reward"] for entry in logged],
        "grad_norm": [float(entry["grad_norm"]) for entry in logged],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
