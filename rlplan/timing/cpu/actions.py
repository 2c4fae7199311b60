"""CPU jobs: seconds of every action of a job's schedule on a host without a GPU.

In: a job, its model and profile, a Schedule. Out: a Cost for each action, or None where the profile lacks a rate.
Left out: the first step, which takes 1.3 to 2 times as long (Adam's states, oneDNN's kernels); differences between
rollouts, which all have the usual length; the controller's work between actions (50 ms a step on two cores).

Symbols: P parameters, n ranks of the trainer, S = P/n, R rollouts, c sequences that the engine runs at once, V
vocabulary, h hidden. Compute, memory and calls follow each other; no overlap is counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from rlplan.dataflow.schedule import Action, Part, RoleLayout, Schedule
from rlplan.memory.trainers.checkpoints import saved_bytes
from rlplan.memory.trainers.training import build_role_rank, build_trained_rank
from rlplan.spec.hardware.profile import CpuProfile
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import ResolvedJob
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.cpu.eager import FLOAT_BYTES, MicroBatch, backward_counts, forward_counts
from rlplan.timing.cpu.engine import CpuEngine, Requests, time_weight_sync
from rlplan.timing.cpu.host import CpuHost, CpuShare, find_task_ends, read_host, verify_s
from rlplan.timing.step import JobTiming, PartCosts, time_job
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind, Phase, Role


def predict_job(
    job: ResolvedJob,
    model: ModelSpec,
    profile: CpuProfile,
    schedule: Schedule,
    role_models: Mapping[Role, ModelSpec] | None = None,
) -> JobTiming | None:
    """Predict the seconds of a job's actions; None where the profile has no rates. role_models: models other than the
    policy's."""
    host = read_host(profile)
    return None if host is None else time_job(schedule, action_costs(job, model, host, schedule, role_models))


def action_costs(
    job: ResolvedJob,
    model: ModelSpec,
    host: CpuHost,
    schedule: Schedule,
    role_models: Mapping[Role, ModelSpec] | None = None,
) -> PartCosts:
    """Compute the Cost of each action, by part and id."""
    others = role_models or {}

    return {
        (part, action.id): CpuTimes(job, others.get(action.role, model), host, schedule, action.role).cost(part, action)
        for part, actions in schedule.parts
        for action in actions
    }


@dataclass(frozen=True)
class CpuTimes:
    """Costs of actions. The docstring of each method lists what it counts."""

    job: ResolvedJob
    model: ModelSpec
    host: CpuHost
    schedule: Schedule
    role: Role = Role.POLICY

    def cost(self, part: Part, action: Action) -> Cost:
        """Cost of one action, with the driver's call of its processes and the driver's own work."""
        work = self.job.workload
        kind = action.kind
        if kind is ActionKind.COMPUTE_ADVANTAGES:
            return self._python(work.num_rollouts_per_step / 10)
        if kind is ActionKind.VERIFY:
            waited = verify_s(self.job, self.host.num_cores, self.generate_cost().seconds)
            others = Cost({Resource.HOST: waited}) if waited else NOTHING
            return self._python(work.num_rollouts_per_step * len(self.job.rewards)) + others
        if kind is ActionKind.TAKE_ROLLOUTS:
            return self._python(work.num_rollouts_per_step)
        if kind is ActionKind.START_ENGINE and part == "step":
            return self.restart_cost()
        if kind in (ActionKind.START_TRAINER, ActionKind.START_ENGINE, ActionKind.START_SCORER):
            return self._start(action)
        if action.phase is Phase.EVALUATE and part == "finish" and work.num_steps % work.evaluate_every == 0:
            return NOTHING  # the last step has already evaluated
        if action.phase is Phase.EVALUATE and kind is ActionKind.SCORE:
            return self.score_cost(self.job.num_evaluated_responses) + self._call()
        if kind is ActionKind.SYNC_WEIGHTS:
            return time_weight_sync(self.job, self.engine, self.host, is_first=part == "start")
        trained = next((la for la in self.schedule.layouts if la.role == action.role and "trainer" in la.worker), None)
        if trained is not None and kind in (ActionKind.OFFLOAD_ROLE, ActionKind.RELOAD_ROLE):
            return self.move_states_cost(trained, is_back=kind is ActionKind.RELOAD_ROLE) + self._call()
        if trained is not None and kind in (ActionKind.SAVE_STATES, ActionKind.WRITE_STATES):
            return self.save_states_cost(trained, waits=kind is ActionKind.WRITE_STATES) + self._call()
        kind_cost = {
            ActionKind.GENERATE: self.generate_cost,
            ActionKind.EVALUATE: self.evaluate_cost,
            ActionKind.SCORE: self.score_cost,
            ActionKind.TRAIN_FORWARD_BACKWARD: self.train_cost,
            ActionKind.OPTIMIZER_STEP: self.optimizer_cost,
            ActionKind.CHECKPOINT: self.checkpoint_cost,
            ActionKind.SAVE_WEIGHTS: self.checkpoint_cost,
            # after the engine is torn down, Python collects garbage
            ActionKind.STOP_ENGINE: lambda: self.host.share(1).latency_cost(self.host.latencies.stop_engine.value),
            ActionKind.OFFLOAD_ROLE: lambda: NOTHING,  # a frozen model only frees its pages
            ActionKind.RELOAD_ROLE: self.load_cost,
        }[kind]
        return kind_cost() + self._call()

    def move_states_cost(self, trained: RoleLayout, *, is_back: bool) -> Cost:
        """A trained role's states, all ranks, written to a file or read back into fresh memory through one disk.

        Source: `rlplan.runtime.workers.trainer.offloaded_states`.
        """
        states = build_trained_rank(
            self.job.training, self.model, trained.zero_stage, trained.num_shards, 0
        ).states.after_step()
        num_bytes = (states.device_bytes + states.host_bytes) * len(trained.devices)
        moved = Cost({Resource.DISK: num_bytes / self.host.disk_bytes_per_s})
        return moved + self._training.fresh_cost(num_bytes) if is_back else moved

    def save_states_cost(self, trained: RoleLayout, *, waits: bool) -> Cost:
        """Seconds to save what a resumed run needs of a trained role. waits: the trainer waits for the write.

        Counts: C bytes of all ranks, read and written once in memory (2 C), or through one disk.
        Source: `rlplan.runtime.workers.trainer.state_saver`. Assumes: a background write does not slow the next step.
        """
        job, shards = self.job, trained.num_shards
        cut = trained.tp, trained.zero_stage, shards
        ranks = [
            build_role_rank(job, trained.role, self.model, cut, shard, training=job.training) for shard in range(shards)
        ]
        num_bytes = trained.tp * sum(saved_bytes(rank.states) for rank in ranks)
        if waits:
            return Cost({Resource.DISK: num_bytes / self.host.disk_bytes_per_s})
        return self._training.touch_cost(2 * num_bytes / (trained.tp * shards))

    def generate_cost(self) -> Cost:
        """The engine's work on a step's rollouts, and the driver's decoding of each rollout."""
        work = self.job.workload
        requests = Requests(work.num_prompts_per_step, self.job.num_generated_per_prompt, *self._lengths)
        return self.engine.cost(requests) + self._python(requests.num_sequences)

    def evaluate_cost(self) -> Cost:
        """Generation for the held-out prompts, and the rewards of these responses."""
        num_samples = self.job.workload.num_evaluation_samples
        requests = Requests(self.job.num_evaluated_prompts, num_samples, *self._lengths)
        return self.engine.cost(requests) + self._python(requests.num_sequences * (1 + len(self.job.rewards)))

    def score_cost(self, num_sequences: int = 0) -> Cost:
        """Forward passes of a model over `num_sequences` (default: a step's rollouts), split over its processes.

        Assumes: Python sends, pads and answers each rollout; the time of verifiers beside it is negligible.
        """
        num_sequences = num_sequences or self.job.workload.num_rollouts_per_step
        layout = self._scoring
        threads = len(self._group("scorer")) if layout.worker == "scorer" else 1
        share = self.host.share(threads, len(layout.devices))
        passes = self._passes(share, ceil_div(num_sequences, layout.dp), layout, trains=False)
        return passes + self._python(2 * num_sequences)

    def train_cost(self) -> Cost:
        """Forward and backward passes of a mini-batch on n ranks at once, and the communication of each micro-batch.

        Counts: stages 2 and 3 reduce in every backward pass (`_reduction_cost`), others in the optimizer step. Stage 3
        gathers all weights in both passes, and reads and writes them once more. Recomputed layers need another forward
        pass, and so do the answers of a greedy baseline.
        """
        layout = self.schedule.find_layout("policy_trainer")
        num_rollouts = self.job.count_trained(layout.dp)
        share, stage = self._training, self._zero_stage
        num_passes = ceil_div(num_rollouts, self._micro_batch(num_rollouts))
        cost = self._passes(share, num_rollouts, layout, trains=True) + self._python(2 * num_rollouts)
        if self.job.training.gradient_checkpointing:
            cost += self._passes(share, num_rollouts, layout, trains=False)
        if baseline := self.job.num_baseline_answers_per_mini_batch:
            cost += self._passes(share, ceil_div(baseline, layout.dp), layout, trains=False) + self._python(
                2 * baseline
            )
        if stage >= 2:
            cost += self._reduction_cost().times(num_passes)
        if stage == 3 and self._num_ranks > 1:
            cost += (share.time_all_gather(self._weight_bytes) + share.touch_cost(2 * self._weight_bytes)).times(
                2 * num_passes
            )
        return cost

    def _reduction_cost(self) -> Cost:
        """One reduction of all gradients.

        Counts: P e bytes copied into a bucket and back (4 P e read and written) and all-reduced; each rank keeps S e.
        Each parameter has one hook.
        Source: DeepSpeed 0.19.8, stage_1_and_2.py: `reduce_ready_partitions_and_remove_grads`, `average_tensor`.
        """
        share, gradients = self._training, self._weight_bytes
        cost = share.touch_cost(4 * gradients) + share.fresh_cost(gradients / self._num_ranks)
        cost += share.time_all_reduce(gradients)
        return cost + share.latency_cost(self.host.latencies.gradient.value, len(self.model.parameters))

    def optimizer_cost(self) -> Cost:
        """Gradient norm, clipping, Adam on a rank's shard, and the all-gather of the updated weights.

        Counts: gradients flattened (4S fresh, 8S), norm 4S, scaling 8S, Adam 28S (four reads, three writes), weights
        copied 8S. Stage 0 has S = P. Stages 0 and 1 reduce here. Stages 1 and 2 all-gather P e into a fresh buffer of
        that size and copy it out (2 P e). One rank gathers nothing.
        Source: DeepSpeed 0.19.8 `step`; the buffer is gloo's (docs/lab-notes.md).
        """
        share, stage, whole = self._training, self._zero_stage, self._weight_bytes
        part = self.model.num_parameters / (self._num_ranks if stage else 1)
        cost = share.touch_cost((8 + 4 + 8 + 28 + 8) * part) + share.fresh_cost(FLOAT_BYTES * part)
        if stage < 2:
            cost += self._reduction_cost()
        if self._num_ranks > 1 and stage in (1, 2):
            cost += share.time_all_gather(whole) + share.fresh_cost(whole) + share.touch_cost(2 * whole)
        return cost + share.latency_cost(self.host.latencies.update.value, len(self.model.parameters))

    @property
    def _weight_bytes(self) -> int:
        """P e: bytes of the weights in the training dtype."""
        return self.job.training.dtype.num_bytes * self.model.num_parameters

    @cached_property
    def _zero_stage(self) -> int:
        return self.schedule.find_layout("policy_trainer").zero_stage

    def checkpoint_cost(self) -> Cost:
        """The policy's weights copied and written to disk."""
        whole = FLOAT_BYTES * self.model.num_parameters
        share = self.host.share(1)
        written = Cost({Resource.DISK: whole / self.host.disk_bytes_per_s})
        return share.fresh_cost(whole) + share.touch_cost(2 * whole) + written

    def load_cost(self) -> Cost:
        """A frozen model reloaded: its bytes copied into fresh memory."""
        whole = FLOAT_BYTES * self.model.num_parameters
        return self.host.share(1).fresh_cost(whole) + self.host.share(1).touch_cost(2 * whole)

    def restart_cost(self) -> Cost:
        """An engine created again in a process that has already loaded its libraries.

        Counts: the profile's seconds for a small model; fresh memory for weights, packed weights and the KV cache;
        reading the weights. Source: `workers/engine/rollout_engine.py`, start after stop.
        """
        share, whole = self.engine.share, FLOAT_BYTES * self.model.num_parameters
        packed = self.engine.matrix_bytes + FLOAT_BYTES * 2 * self.model.vocab_size * self.model.hidden_size
        cost = share.fresh_cost(whole + packed + self.job.rollout.kv_cache_memory)
        return cost + share.touch_cost(2 * whole) + share.latency_cost(self.host.latencies.restart_engine.value)

    def _start(self, action: Action) -> Cost:
        """Imports of all processes that start together, one core each, and then the weights in fresh memory."""
        latencies = self.host.latencies
        seconds = {
            ActionKind.START_TRAINER: latencies.start_trainer.value,
            ActionKind.START_ENGINE: latencies.start_engine.value,
            ActionKind.START_SCORER: latencies.start_scorer.value,
        }
        pairs = [pair for part, *pair in self.schedule.concurrent if part == "start" and action.id in pair]
        concurrent_ids = {action.id}.union(*pairs)
        starts = [start for start in self.schedule.start if start.id in concurrent_ids and start.kind in seconds]
        process_seconds = [seconds[start.kind] for start in starts for _ in start.processes]
        ends = find_task_ends(process_seconds, self.host.num_cores)
        share = self.host.share(1, len(process_seconds))
        whole = FLOAT_BYTES * self.model.num_parameters
        ended = ends[process_seconds.index(seconds[action.kind])]
        return Cost({Resource.LATENCY: ended}) + share.fresh_cost(2 * whole) + share.touch_cost(2 * whole)

    def _passes(self, share: CpuShare, num_rollouts: int, layout: RoleLayout, *, trains: bool) -> Cost:
        """Micro-batches of `num_rollouts`, the last one smaller, and the traffic between ranks that share a pass.

        Counts: each rank that shares a pass computes an equal part of it.
        """
        prompt, response = self._lengths
        size = self._micro_batch(num_rollouts)
        num_full, remainder = divmod(num_rollouts, size)

        def time_pass(num_sequences: int) -> Cost:
            batch = MicroBatch(num_sequences, prompt + response, response)
            work = forward_counts(self.model, batch, computes_entropy=trains)
            work = work + backward_counts(self.model, batch) if trains else work
            if not self.job.hardware.keeps_heap:
                return share.pass_cost(work)
            # a heap that keeps its pages makes no fresh memory: results overwrite earlier ones
            warm = share.touch_cost(work.fresh_bytes)
            return share.pass_cost(replace(work, fresh_bytes=0.0)) + warm

        cost = time_pass(size).times(num_full) + (time_pass(remainder) if remainder else NOTHING)
        sent = self._exchanged_bytes(layout) * num_rollouts * (prompt + response) * (2 if trains else 1)
        return cost.times(1 / layout.num_ranks_per_pass) + share.time_all_gather(sent)

    def _exchanged_bytes(self, layout: RoleLayout) -> float:
        """Bytes per token that a rank sends to others that share its forward pass; a backward pass sends the same.

        Counts, per layer: with Ulysses, queries, keys, values and attention output of its own tokens, e(2q + 2k) / n.
        Tensor-parallel ranks all-reduce e h of every token after attention and after the MLP, and send each twice.
        """
        model, e, ranks_per_pass = self.model, self.job.training.dtype.num_bytes, layout.num_ranks_per_pass
        if ranks_per_pass == 1:
            return 0.0
        own = model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads) / ranks_per_pass
        return e * model.num_layers * (own if layout.tp == 1 else 4 * model.hidden_size)

    def _micro_batch(self, num_rollouts: int) -> int:
        """Number of rollouts of usual length that are packed into one pass."""
        return max(1, min(self.job.max_tokens_per_micro_batch // sum(self._lengths), num_rollouts))

    @property
    def _lengths(self) -> tuple[int, int]:
        """(prompt, response) tokens of a rollout of usual length."""
        return self.job.workload.usual_prompt_len, self.job.workload.usual_response_len

    @property
    def _scoring(self) -> RoleLayout:
        """Layout that computes the role's scores: its own, or the policy trainer's."""
        layouts = [layout for layout in self.schedule.layouts if layout.role is self.role]
        return next((layout for layout in layouts if layout.worker != "rollout_engine"), self.schedule.layouts[0])

    @cached_property
    def _num_ranks(self) -> int:
        return len(self.schedule.find_layout("policy_trainer").devices)

    @cached_property
    def _training(self) -> CpuShare:
        num_engines = self.job.rollout.num_engines if self._is_async else 0
        return self.host.share(1, self._num_ranks, num_engines)

    @property
    def _is_async(self) -> bool:
        """Whether generation and training run at the same time."""
        return self.job.placement.max_staleness > 0

    @cached_property
    def engine(self) -> CpuEngine:
        """The rollout engine with its share of the host."""
        num_beside = self._num_ranks if self._is_async else 0
        share = self.host.share(len(self._group("rollout_engine")), num_beside=num_beside)
        return CpuEngine(self.model, self.job.rollout, share)

    def _group(self, worker: str) -> tuple[str, ...]:
        """Devices whose threads a worker may use: those of its device group (emit/ray.py)."""
        name = next(layout.group for layout in self.schedule.layouts if layout.worker == worker)
        return next(group.devices for group in self.schedule.groups if group.name == name)

    def _call(self) -> Cost:
        return Cost({Resource.LATENCY: self.host.latencies.call.value})

    def _python(self, num_rollouts: float) -> Cost:
        return Cost({Resource.LATENCY: self.host.latencies.rollout.value * num_rollouts})
