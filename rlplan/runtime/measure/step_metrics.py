"""StepMetrics: one step's metrics, under the names that common dashboards use.

Learning metrics contain nothing that depends on the clock, so two runs with one seed give the same rows bit for bit.
In: rollouts, sums from the trainer ranks, seconds. Out: one row of learning metrics and one of timings.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlplan.runtime.environments.conversation import CONTEXT, MAX_TURNS
from rlplan.runtime.environments.tool_calls import OUTCOMES
from rlplan.runtime.learning.logprob_mismatch import DIFFERENCE, merge_differences
from rlplan.runtime.rewards.verdict import EXHAUSTED
from rlplan.runtime.rollout.experience import Rollout, add_branches
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Dtype, Role


def accumulate(totals: dict[str, float], part: Mapping[str, float]) -> None:
    """Add the values of a pass or a rank: maxima of names that end in `_max`, sums of all others."""
    for key, value in part.items():  # the largest KL estimate may be below 0, so a maximum has no start value
        totals[key] = max(totals.get(key, value), value) if key.endswith("_max") else totals.get(key, 0.0) + value


class StepMetrics:
    """Collects values during a step; `take_rows` returns them and starts again."""

    def __init__(self, job: ResolvedJob) -> None:
        self.job = job
        self._has_told_staleness = False
        self._begin()

    def _begin(self) -> None:
        self.learning: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.num_tokens = 0
        self.training: dict[str, float] = defaultdict(float)
        self.value_training: dict[str, float] = defaultdict(float)
        self.optimizer_steps: dict[Role, list[Mapping[str, float]]] = defaultdict(list)
        self.started = time.monotonic()

    @contextmanager
    def timing(self, action_id: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[action_id] = time.monotonic() - start

    def add_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        lengths = [len(rollout.completion.tokens) for rollout in rollouts]
        self.num_tokens += sum(len(sequence.completion.logprobs) for sequence in add_branches(rollouts))
        self.learning["response_len/mean"] = sum(lengths) / len(lengths)
        self.learning["response_len/max"] = max(lengths)
        truncated = sum(rollout.completion.finish_reason == "length" for rollout in rollouts)
        self.learning["response_len/truncated_fraction"] = truncated / len(rollouts)
        if self.job.has_turns:
            self._add_turns(rollouts)

    def _add_turns(self, rollouts: Sequence[Rollout]) -> None:
        """Turns, observed tokens, failures and tool calls of multi-turn rollouts."""
        completions = [rollout.completion for rollout in rollouts]
        count = len(completions)
        self.learning["environment/turns_mean"] = sum(completion.num_turns for completion in completions) / count
        observed = sum(len(completion.tokens) - len(completion.logprobs) for completion in completions)
        self.learning["environment/observed_tokens_mean"] = observed / count
        failed = sum(bool(completion.failure) for completion in completions)
        self.learning["environment/failed_fraction"] = failed / count
        for reason in (MAX_TURNS, CONTEXT):
            ended = sum(completion.ended == reason for completion in completions)
            self.learning[f"environment/{reason}_fraction"] = ended / count
        if self.job.rollout.environment.agent is not None:
            branches = sum(len(completion.branches) for completion in completions)
            self.learning["environment/branches_mean"] = branches / count
        calls = Counter(call for completion in completions for call in completion.calls)
        if self.job.rollout.environment.has_tools or calls:
            self.learning["tools/calls_mean"] = calls.total() / count
            self.learning |= {f"tools/{outcome}": calls[outcome] for outcome in OUTCOMES}

    def add_replaced(self, num_groups: int) -> None:
        """Count zero-variance groups that dynamic sampling replaced by other prompts."""
        if self.job.max_refills:
            self.learning["group_replaced"] = num_groups

    def add_staleness(self, rollouts: Sequence[Rollout], version: int) -> None:
        """Age in weight versions of the tokens that will be trained; share of rollouts that span several versions."""
        spans = [span for rollout in rollouts for span in rollout.completion.spans]
        ages = [(version - span.version, span.end - span.start) for span in spans]
        total = sum(count for _, count in ages)
        self.learning["staleness/mean"] = sum(age * count for age, count in ages) / max(1, total)
        self.learning["staleness/max"] = max((age for age, _ in ages), default=0)
        by_rollout = [[span.version for span in rollout.completion.spans] for rollout in rollouts]
        oldest = [version - min(versions) for versions in by_rollout if versions]
        self.learning["staleness/rollout_mean"] = sum(oldest) / max(1, len(oldest))
        partial = sum(len(rollout.completion.spans) > 1 for rollout in rollouts)
        self.learning["staleness/partial_fraction"] = partial / len(rollouts)

    def uncorrected_staleness(self) -> str | None:
        """Text of an alarm at the first step that trains on stale tokens without correction; otherwise None."""
        text, oldest = self.job.uncorrected_staleness, self.learning.get("staleness/max", 0)
        if not text or not oldest or self._has_told_staleness:
            return None
        self._has_told_staleness = True
        return f"training on tokens up to {oldest:g} versions old; {text}"

    def add_begun_anew(self, num_requests: int) -> None:
        """Count requests that a lost engine had started; no metric if there are none."""
        if num_requests:
            self.learning["rollouts/begun_anew"] = num_requests

    def add_rewards(self, rollouts: Sequence[Rollout]) -> None:
        """Statistics of every reward and of their weighted sum. Rollouts without a reward are counted separately.

        Answers of the data set have no reward metrics: their `reward` only says which answer is the better one.
        """
        self.add_sources(rollouts)
        if not self.job.has_rollouts:
            return
        self.learning["reward/failed_fraction"] = sum(bool(rollout.failure) for rollout in rollouts) / len(rollouts)
        rollouts = [rollout for rollout in rollouts if not rollout.has_failed]
        if not rollouts:
            return
        rewards = [rollout.reward for rollout in rollouts]
        mean = math.fsum(rewards) / len(rewards)  # fsum is exact, so the order of rollouts does not change the result
        self.learning["reward/mean"] = mean
        self.learning["reward/std"] = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
        self.learning["reward/min"], self.learning["reward/max"] = min(rewards), max(rewards)
        for name in dict.fromkeys(name for rollout in rollouts for name in rollout.rewards):
            values = [rollout.rewards[name] for rollout in rollouts if name in rollout.rewards]
            self.learning[f"reward/{name}/mean"] = math.fsum(values) / len(values)
        groups: dict[int, set[float]] = defaultdict(set)
        for rollout in rollouts:
            groups[rollout.group].add(rollout.reward)
        self.learning["group_variance_zero_fraction"] = sum(len(g) == 1 for g in groups.values()) / len(groups)

    def add_sources(self, rollouts: Sequence[Rollout]) -> None:
        """Share and mean reward of each data set in a mixture."""
        by_source: dict[str, list[Rollout]] = defaultdict(list)
        for rollout in rollouts:
            by_source[rollout.prompt.source].append(rollout)
        for name, members in sorted(by_source.items()):
            if name:
                self.learning[f"data/{name}/fraction"] = len(members) / len(rollouts)
                rewards = [rollout.reward for rollout in members if not rollout.has_failed]
                if rewards and self.job.has_rollouts:
                    self.learning[f"data/{name}/reward_mean"] = math.fsum(rewards) / len(rewards)

    def add_reward_notes(self, notes: Mapping[str, int], num_judged: int, logged: Mapping[str, float]) -> None:
        """Shares of judged responses by the reason of their failure, such as `reward/NAME/timeout_fraction`.

        logged: numbers that reward functions have logged, by `NAME/METRIC`.
        """
        self.learning |= {f"reward/{name}": value for name, value in logged.items()}
        for note, count in sorted(notes.items()):
            self.learning[f"reward/{note}_fraction"] = count / num_judged
        exhausted = sum(count for note, count in notes.items() if note.rpartition("/")[2] in EXHAUSTED)
        if exhausted:
            self.learning["reward/exhausted_fraction"] = exhausted / num_judged

    def add_training(self, ranks: Sequence[dict[str, float]], *, is_first: bool) -> None:
        """Sums and maxima over the ranks of one mini-batch.

        The mismatch between the engine's and the trainer's log-probs is only taken before the first optimizer step on
        these rollouts: after it, the policy differs on purpose.
        """
        self.add_value_training([_select_value_sums(sums) for sums in ranks])
        left_out = (_VALUE,) if is_first else (_VALUE, DIFFERENCE)
        for sums in ranks:
            accumulate(self.training, {key: value for key, value in sums.items() if not key.startswith(left_out)})

    def add_value_training(self, ranks: Sequence[dict[str, float]]) -> None:
        """Sums over the ranks of one mini-batch of the value model."""
        for sums in ranks:
            accumulate(self.value_training, sums)

    def add_optimizer_step(self, result: dict[str, float], role: Role = Role.POLICY) -> None:
        """Learning rate, gradient norm before clipping and clipping of a role; in float16 also skipped steps."""
        is_skipped = result.get("is_skipped", 0.0)
        self.learning[f"{role}/learning_rate"] = result["learning_rate"]
        if not is_skipped:
            self.optimizer_steps[role].append(result)
        if self.job.training.dtype is Dtype.FLOAT16:
            name = f"{role}/skipped_steps"
            self.learning[name] = self.learning.get(name, 0.0) + is_skipped

    def add_cut_sequences(self, num_cut: int | None, num_rollouts: int) -> None:
        """Share of sequences truncated for a reward model with its own tokenizer. num_cut: None without one."""
        if num_cut is not None:
            self.learning["reward/reward_model/cut_fraction"] = num_cut / num_rollouts

    def add_evaluation(self, rollouts: Sequence[Rollout]) -> None:
        """Results on the held-out prompts, by data set and reward. If all rollouts failed, there is no value."""
        by_prompt: dict[tuple[str, int], list[Rollout]] = defaultdict(list)
        for rollout in rollouts:
            if not rollout.has_failed:
                by_prompt[rollout.prompt.source, rollout.group].append(rollout)
        for evaluation in self.job.evaluations:
            reward, k = evaluation.reward, evaluation.passes_of
            rewards_by_prompt = [
                [rollout.rewards[reward] for rollout in members if reward in rollout.rewards]
                for (source, _), members in by_prompt.items()
                if source == evaluation.heldout
            ]
            values = [_score_prompt(rewards, k) for rewards in rewards_by_prompt if rewards and len(rewards) >= k]
            if values:
                self.learning[evaluation.metric] = math.fsum(values) / len(values)

    def take_rows(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (learning row, timing row) of the step that ends now."""
        seconds = time.monotonic() - self.started
        learning = {"step": step, **self.learning, **self._training_row(), **self._value_row()}
        timings = {"step": step, "step_s": round(seconds, 6)}
        if self.num_tokens:
            timings["throughput/tokens_per_sec"] = round(self.num_tokens / seconds, 3)
        timings |= {f"seconds/{name}": round(value, 6) for name, value in self.seconds.items()}
        self._begin()
        return learning, timings

    def _training_row(self) -> dict[str, float]:
        """Metrics of the policy's training. Means and maxima over trained tokens are left out if there are none."""
        sums = self.training
        if not sums:
            return {}
        row = {
            "policy/loss": sums["loss"] / self.job.workload.num_mini_batches,
            **_summarize_tokens(sums),
            **(_summarize_differences(sums) if f"{DIFFERENCE}_sum" in sums else {}),
        }
        for name in _LOGGED:
            if sums.get(f"{name}_count"):
                row[_LOGGED[name]] = sums[f"{name}_sum"] / sums[f"{name}_count"]
        if squares := sums.get("importance_squared_sum"):
            row["importance/ess"] = sums["importance_sum"] ** 2 / (sums["importance_count"] * squares)
        return row | self._norm_row(Role.POLICY)

    def _norm_row(self, role: Role) -> dict[str, float]:
        """Means over the optimizer steps that were not skipped."""
        steps = self.optimizer_steps[role]
        names = {"grad_norm": "grad_norm", "is_clipped": "grad_clip_fraction"}
        return {
            f"{role}/{name}": math.fsum(result[key] for result in steps) / len(steps)
            for key, name in names.items()
            if steps
        }

    def _value_row(self) -> dict[str, float]:
        """Metrics of the value model's training.

        explained_var: 1 minus the mean squared error over the variance of the returns; 0 if the returns do not vary.
        """
        sums, tokens = self.value_training, self.value_training.get("num_tokens", 0.0)
        if not tokens:
            return {}
        variance = sums["squared_return_sum"] / tokens - (sums["return_sum"] / tokens) ** 2
        error = sums["squared_error_sum"] / tokens
        return {
            "value/loss": sums["loss"] / self.job.workload.num_mini_batches,
            "value/mean": sums["value_sum"] / tokens,
            "value/clip_fraction": sums["is_clipped_sum"] / tokens,
            "value/explained_var": 1 - error / variance if variance > 0 else 0.0,
            **self._norm_row(Role.VALUE),
        }


def _score_prompt(rewards: Sequence[float], passes_of: int) -> float:
    """Mean reward of one prompt's responses, or unbiased pass@k. passes_of: k, or 0 for the mean.

    Counts: 1 - C(n - c, k) / C(n, k) for c correct ones of n responses.
    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.

    >>> _score_prompt([1.0, 0.0, 0.0, 1.0], 0), round(_score_prompt([1.0, 0.0, 0.0, 1.0], 2), 4)  # 1 - 1 / 6
    (0.5, 0.8333)
    """
    if not passes_of:
        return math.fsum(rewards) / len(rewards)
    num_wrong = sum(reward < 1 for reward in rewards)
    return 1 - math.comb(num_wrong, passes_of) / math.comb(len(rewards), passes_of)


def _summarize_differences(sums: Mapping[str, float]) -> dict[str, float]:
    """Log-prob mismatch between engine and trainer in the step's first mini-batch."""
    differences = merge_differences([sums])
    kl = sums[f"{DIFFERENCE}_kl_sum"] / differences.count if differences.count else 0.0
    values = {"mean": differences.mean, "p99": differences.p99, "max": differences.largest, "kl": kl}
    return {f"sync/{DIFFERENCE}_{name}": value for name, value in values.items()}


def _summarize_tokens(sums: Mapping[str, float]) -> dict[str, float]:
    """Means over trained tokens; empty if there are none."""
    tokens = sums.get("num_tokens")
    if not tokens:
        return {}
    row = {
        "policy/entropy": sums["entropy_sum"] / tokens,
        "policy/clip_fraction": sums["is_clipped_sum"] / tokens,
        "policy/ratio_max": sums["ratio_max"],
    }
    if "kl_sum" in sums:
        row["kl/mean"], row["kl/max"] = sums["kl_sum"] / tokens, sums["kl_max"]
    if "teacher_reverse_kl_sum" in sums:
        row["teacher_reverse_kl/mean"] = sums["teacher_reverse_kl_sum"] / tokens
    return row


_LOGGED = {
    "importance": "importance/mean",
    "is_corrected": "importance/corrected_fraction",
    "is_masked": "importance/masked_fraction",
    "is_ranked_right": "policy/ranked_right_fraction",
    "margin": "policy/score_margin",
}
_VALUE = "value_"


def _select_value_sums(sums: dict[str, float]) -> dict[str, float]:
    """Select the sums of a value head on the policy's backbone."""
    return {key.removeprefix(_VALUE): value for key, value in sums.items() if key.startswith(_VALUE)}
