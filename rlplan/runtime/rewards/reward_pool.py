"""RewardPool: computes rewards of responses as they finish, several at a time, in threads and child processes.

Regular-expression rewards are computed on demand, because handing them to a thread takes longer. Batch functions are
called when the whole batch is there (batches.py).

In: responses by id, from any thread. Out: verdicts, written into rollouts.
"""

import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

from rlplan.errors import RunError
from rlplan.runtime.rewards.batches import BatchedFunctions
from rlplan.runtime.rewards.code_executor import make_limits
from rlplan.runtime.rewards.judge import Judge, Response
from rlplan.runtime.rewards.verdict import EXHAUSTED, RewardFailure, Verdict
from rlplan.runtime.rollout.experience import Rollout
from rlplan.runtime.sandbox.choice import AUTO, open_sandbox
from rlplan.spec.parts.rewards import CodeExecutorSpec, RewardSpec, needs_processes
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Role


class RewardPool:
    """See the module docstring. sandbox: name from `rlplan run --sandbox`. Raises: HostError when it does not work."""

    def __init__(self, job: ResolvedJob, sandbox: str = AUTO) -> None:
        self.job = job
        self.has_processes = any(needs_processes(spec) for spec in job.rewards)
        self._pool_size = job.limits.num_reward_workers if self.has_processes else 1
        limits = [make_limits(spec) for spec in job.rewards if isinstance(spec, CodeExecutorSpec)]
        # One sandbox serves all code rewards, so its control groups get the largest limit; programs have their own too.
        widest = max(limits, key=lambda limit: limit.memory_bytes, default=None)
        self.sandbox = open_sandbox(sandbox, self._pool_size, widest) if widest else None
        self._batched = BatchedFunctions(job.rewards, job.limits.action_timeout_s)
        self._single_rewards: tuple[RewardSpec, ...] = ()
        self._all_judges: list[Judge] = []
        self._free_judges: queue.SimpleQueue[Judge] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(self._pool_size, thread_name_prefix="reward")
        self._started: dict[str, tuple[str, Future[Verdict]]] = {}
        self._lock = threading.Lock()
        self._notes: Counter[str] = Counter()
        self._num_judged = 0
        self._span: tuple[float, float] | None = None

    def start(self, columns: Collection[str] | None = None) -> None:
        """Start the rewards' processes, so that a broken reward is reported before any generation.

        columns: columns that every row has; None if unknown. Raises: SpecError.
        """
        with self._lock:
            self._prepare_judges(columns)
        if self.is_early:
            for judge in self._all_judges:
                judge.start(columns)

    def _prepare_judges(self, columns: Collection[str] | None = None) -> None:
        """Start the batch functions and create judges for the other rewards, once. Raises: SpecError."""
        if self._all_judges:
            return
        self._batched.start(columns)
        self._single_rewards = tuple(spec for spec in self.job.rewards if spec.label not in self._batched.labels)
        self._all_judges = [Judge(self._single_rewards, self.sandbox) for _ in range(self._pool_size)]
        for judge in self._all_judges:
            self._free_judges.put(judge)

    @property
    def is_early(self) -> bool:
        """Whether responses are judged as soon as they finish. Raises: SpecError."""
        return any(needs_processes(spec) for spec in self._single_rewards)

    def begin(self, key: str, response: Response) -> None:
        """Start to judge a response in the background, unless that was started already."""
        with self._lock:
            started = self._started.get(key)
            # After a fault a rollout may be generated again, with the same key and another text.
            if self.is_early and (started is None or started[0] != response.text):
                self._started[key] = (response.text, self._pool.submit(self._judge, response))

    def judge(self, rollouts: Sequence[Rollout], num_steps_done: int = 0) -> None:
        """Write `rewards`, `reward` and `failure` of every unjudged rollout; together they form one batch.

        A rollout is judged only once, even if every reward returned None and a reward model or environment judges it.
        """
        with self._lock:
            self._prepare_judges()
        rollouts = [rollout for rollout in rollouts if not rollout.is_judged and not rollout.has_failed]
        # begun before the batch functions are called, so that both kinds of rewards work at the same time
        for rollout in rollouts:
            self.begin(rollout.id, _make_response(rollout))
        deadline = time.monotonic() + self.job.limits.action_timeout_s
        progress = (num_steps_done, self.job.workload.num_steps)
        start_s = time.time()
        answers = self._batched.judge([_make_response(rollout) for rollout in rollouts], progress)
        spans = [(start_s, time.time())] if answers else []
        verdicts = [self._await_verdict(rollout, deadline) for rollout in rollouts]
        self._num_judged += len(verdicts)
        for index, (rollout, verdict) in enumerate(zip(rollouts, verdicts, strict=True)):
            self._notes.update(verdict.notes)
            self._write_reward(rollout, verdict, {label: values[index] for label, values in answers.items()})
        spans += [(verdict.start_s, verdict.end_s) for verdict in verdicts]
        if verdicts and self.has_processes:
            spans += [] if self._span is None else [self._span]
            self._span = min(start_s for start_s, _ in spans), max(end_s for _, end_s in spans)
        with self._lock:  # only now: `begin` must find a rollout until its verdict is written
            for rollout in rollouts:
                self._started.pop(rollout.id, None)

    def take_notes(self) -> tuple[Counter[str], int]:
        """(counts of notes such as a program's timeout, judged rollouts) since the last call."""
        taken = self._notes, self._num_judged
        self._notes, self._num_judged = Counter(), 0
        return taken

    def take_metrics(self) -> dict[str, float]:
        """Means of the numbers that reward functions have logged since the last call, by `NAME/METRIC`."""
        sums: dict[str, list[tuple[float, int]]] = {}
        judged = (process for judge in self._all_judges for process in judge.processes)
        for process in (*self._batched.processes, *judged):
            for name, total, count in process.take_metrics():
                sums.setdefault(name, []).append((total, count))
        # fsum is exact, so it does not matter which process has judged which response
        return {
            name: math.fsum(total for total, _ in parts) / sum(count for _, count in parts)
            for name, parts in sorted(sums.items())
        }

    def take_span(self) -> tuple[float, float] | None:
        """(start, end) of the work of rewards in child processes since the last call; None without any."""
        span, self._span = self._span, None
        return span

    def reset(self) -> None:
        """Discard notes and pending verdicts when the steps start over."""
        self.take_notes()
        self.take_metrics()
        self.take_span()
        with self._lock:
            self._started.clear()

    def check_failures(self, rollouts: Sequence[Rollout], step: int) -> None:
        """Raises: RunError when more rollouts of a step have no reward than the job allows."""
        reasons = Counter(rollout.failure for rollout in rollouts if rollout.failure)
        max_share = self.job.limits.max_failed_rewards
        if reasons.total() > max_share * len(rollouts):
            reason, count = reasons.most_common(1)[0]
            raise RunError(
                f"{reasons.total()} of {len(rollouts)} rollouts have no reward; {count} because of {reason}",
                where=f"step {step}, rewards",
                rule=f"at most {max_share:.0%} of a step's rewards may fail (limits.max_failed_rewards)",
                way_out="fix the reward or the rows that it cannot judge; failures.jsonl in the run folder lists them",
            )

    def describe_exhaustion(self, notes: Counter[str], num_judged: int) -> str | None:
        """Text of an alarm when more responses exhausted their limits than may fail, else None.

        The cause is a slow host, or a row that cannot be judged.
        """
        exhausted = Counter({note: count for note, count in notes.items() if note.rpartition("/")[2] in EXHAUSTED})
        if exhausted.total() <= self.job.limits.max_failed_rewards * num_judged:
            return None
        kinds = ", ".join(f"{count} {note}" for note, count in exhausted.most_common(3))
        return f"{exhausted.total()} of {num_judged} responses have the reward 0 for exhausting their limits ({kinds})"

    def close(self) -> None:
        """End every process and abandon running judgments."""
        # Processes are closed before the threads are joined: a thread may wait for an answer of its process.
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._batched.close()
        for judge in self._all_judges:
            judge.close()
        if self.sandbox is not None:
            self.sandbox.close()
        self._pool.shutdown(wait=True)
        for judge in self._all_judges:  # again: a thread may just have replaced a process
            judge.close()

    def _judge(self, response: Response) -> Verdict:
        judge = self._free_judges.get()
        try:
            return judge.judge(response)
        finally:
            self._free_judges.put(judge)

    def _await_verdict(self, rollout: Rollout, deadline: float) -> Verdict:
        if not self.is_early:
            return self._judge(_make_response(rollout))
        with self._lock:
            _, future = self._started[rollout.id]
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError:
            raise RunError(
                f"rewards took longer than {self.job.limits.action_timeout_s:g} s with {self._pool_size} workers",
                where="verify",
                rule="rewards must be computed within limits.action_timeout_s",
                way_out="give the rewards shorter timeouts, or raise limits.num_reward_workers",
            ) from None

    def _write_reward(
        self, rollout: Rollout, verdict: Verdict, answers: Mapping[str, float | RewardFailure | None]
    ) -> None:
        """Write a rollout's verdict. A reward that is None is left out of the sum.

        A rollout without any reward is not trained on, which is not a failure. Source: TRL 1.16, GRPOTrainer.
        """
        failures = [
            f"{label}: {answer.reason}" for label, answer in answers.items() if isinstance(answer, RewardFailure)
        ]
        values = verdict.values | {label: answer for label, answer in answers.items() if isinstance(answer, float)}
        self._notes.update({f"{label}/skipped": 1 for label, answer in answers.items() if answer is None})
        self._notes.update(
            {
                f"{label}/late": 1
                for label, answer in answers.items()
                if isinstance(answer, RewardFailure) and answer.is_late
            }
        )
        rollout.is_judged = True
        rollout.failure = verdict.failure or next(iter(failures), "")
        rollout.rewards = {spec.label: values[spec.label] for spec in self.job.rewards if spec.label in values}
        is_judged_elsewhere = Role.REWARD in self.job.scored_roles or self.job.rollout.environment.has_environment
        is_unjudged = bool(self.job.rewards) and not values and not is_judged_elsewhere
        rollout.has_failed = bool(rollout.failure) or is_unjudged
        weighted = [spec.weight * values.get(spec.label, 0.0) for spec in self.job.rewards]
        rollout.reward = 0.0 if rollout.has_failed else sum(weighted)


def list_failures(rollouts: Iterable[Rollout], step: int) -> list[dict[str, object]]:
    """Lines of failures.jsonl: the rollouts without a reward, with the reason."""
    return [
        {"step": step, "prompt": rollout.prompt.id, "reason": rollout.failure, "response": rollout.text[:2000]}
        for rollout in rollouts
        if rollout.failure
    ]


def _make_response(rollout: Rollout) -> Response:
    return Response(rollout.prompt, rollout.text, rollout.completion.tokens)
