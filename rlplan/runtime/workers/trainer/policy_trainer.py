"""PolicyTrainer: one rank of the policy on DeepSpeed.

In: the bundle's DeepSpeed configuration and samples. Out: updated weights, in place, and sums for the metrics.
Left out: creating the engine (deepspeed_engine.py), its memory (trained_states.py), packing (packing.py).
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from rlplan.errors import HostError
from rlplan.memory.weight_sync.packets import Packet, plan_policy_packets
from rlplan.runtime.device.layer import device_of
from rlplan.runtime.driver.rehearsal import MisfitError
from rlplan.runtime.host.engine_keys import check_deepspeed
from rlplan.runtime.images.tower import attach_tower, get_tower
from rlplan.runtime.losses.inputs import LossInputs
from rlplan.runtime.losses.policy_losses import estimate_kl_baseline, sum_margins
from rlplan.runtime.losses.registry import find_loss
from rlplan.runtime.losses.value import value_loss_and_sums
from rlplan.runtime.measure.step_metrics import accumulate
from rlplan.runtime.models.adapters import AdapterWeights, MergedWeights, activate_adapter, add_adapters, save_adapter
from rlplan.runtime.models.logprob_model import Entropies, LogprobModel, TokenBatch, list_numbers, make_batch
from rlplan.runtime.models.sequence_parallel import Sharing, create_sharing_groups
from rlplan.runtime.models.sharded_loading import build_sharded
from rlplan.runtime.models.start_checkpoint import (
    load_language_model,
    load_scalar_model,
    merge_into_whole_model,
    save_policy,
    warm_up,
)
from rlplan.runtime.models.tensor_parallel import PartWeights
from rlplan.runtime.models.value_model import PolicyValueModel, ValueModel
from rlplan.runtime.rollout.experience import SequencePair, TeacherTokens, TrainSample, blank_sample
from rlplan.runtime.weight_sync.channel import BaseHandle, Endpoint, SendReport, Update
from rlplan.runtime.weight_sync.sender import PolicySender
from rlplan.runtime.weight_sync.shared_base import HeldBase
from rlplan.runtime.weight_sync.source import WeightSource, gather_parameters
from rlplan.runtime.workers.trainer.deepspeed_engine import (
    TORCH_DTYPES,
    build_engine,
    find_missing_loss_scale,
    import_deepspeed,
    join_ranks,
    recompute_layers,
    score_in_lock_step,
    score_teacher,
    step_and_measure_norm,
    sum_over_ranks,
)
from rlplan.runtime.workers.trainer.learning_rates import LearningRates
from rlplan.runtime.workers.trainer.offloaded_states import OffloadedStates
from rlplan.runtime.workers.trainer.pass_summary import summarize_pass
from rlplan.runtime.workers.trainer.state_saver import StateSaver, restore_states
from rlplan.runtime.workers.trainer.trained_states import copy_mapped_parameters, count_bytes, list_storages
from rlplan.runtime.workers.worker import Worker, disable_garbage_collection
from rlplan.runtime.workers.worker_device import empty_device_cache, use_device, worker_device
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import MemoryKind, Role, SyncContent


class PolicyTrainer(Worker):
    """See the module docstring. All ranks run the same calls, each with its own samples."""

    role = Role.POLICY
    is_scalar = False
    """Whether the model has a scalar head instead of the language-model head."""

    def __init__(self, process: str, job: ResolvedJob, config: dict[str, Any], num_threads: int) -> None:
        super().__init__(process)
        self.job, self.config, self.num_threads = job, config, num_threads
        self.engine: Any = None
        self.sender: PolicySender | None = None
        self.sharing: Sharing | None = None
        self.offloaded = OffloadedStates()
        self.saver = StateSaver()
        self.device = torch.device("cpu")
        self.base: HeldBase | None = None
        self.baseline = 0.0

    @disable_garbage_collection()
    def import_libraries(self) -> None:
        import_deepspeed()
        torch.set_num_threads(self.num_threads)
        warm_up(self.job.load_model().architecture, backward=True)
        check_deepspeed(self.config, f"deepspeed/{self.role}.json")
        if self.has_adapters:
            import peft  # noqa: F401
        if self.job.training.needs_bitsandbytes:
            import bitsandbytes  # noqa: F401

    def start(self, rank: int, world_size: int, address: tuple[str, int], model_folder: str) -> None:
        """Join the other ranks, load the policy and hand it to DeepSpeed."""
        torch.manual_seed(self.job.seed)  # new adapters and heads must be equal on all ranks
        self.device, timeout_s = worker_device(self.job), self.job.limits.rank_timeout_s
        join_ranks(rank, world_size, address, timeout_s, self.take_listener(), device_of(self.device))
        self.sharing = create_sharing_groups(self.job.training.ulysses)
        self._build_engine(model_folder)

    def _build_engine(self, model_folder: str) -> None:
        if self._loads_sharded:
            language_model = build_sharded(
                model_folder, self.config, TORCH_DTYPES[self.job.training.dtype], is_scalar=self.is_scalar
            )
        else:
            language_model = self.load(model_folder)
            if self.job.rollout.shares_base:
                self.base = self.base or HeldBase(self.job.load_model(), language_model.dtype, self.device)
                self.base.adopt_module(language_model)
            copy_mapped_parameters(language_model, self.base)
        if self.job.training.gradient_checkpointing:
            recompute_layers(language_model)
        self.engine = build_engine(self.wrap(language_model), self.config)

    @property
    def _loads_sharded(self) -> bool:
        """Whether weights are sharded while loading: on GPUs under ZeRO-3, without adapters.

        Otherwise every rank of a host would load the full model into host memory.
        """
        zero = self.config.get("zero_optimization", {})
        return device_of(self.device) is not None and zero.get("stage") == 3 and not self.has_adapters

    def stop(self) -> None:
        """Destroy the engine and free its memory; the process group stays."""
        self.saver.finish()
        if self.engine is not None:
            self.engine.destroy()
            self.engine = None
            gc.collect()

    def share_base(self) -> BaseHandle:
        """Handle with which the engine on this device opens the frozen base."""
        assert self.base is not None, "the job shares the base, and the trainer has been started"
        return self.base.handle()

    def rehearse(self) -> None:
        """Take one step of the largest size with samples of weight 0; call `reset` afterwards.

        If a step has several micro-batches, two are run: the second one starts with the first one's gradients in
        memory. Raises: MisfitError where a GPU has too little memory.
        """
        workload = self.job.workload
        share = self.job.count_trained(torch.distributed.get_world_size() // self.job.training.num_ranks_per_pass)
        count = max(1, min(self.job.max_tokens_per_micro_batch // workload.max_seq_len, share))
        longest = blank_sample(workload.max_prompt_len, workload.max_response_len)
        num_micro_batches = 2 if share > count else 1
        try:
            self.forward_backward([[longest] * count] * num_micro_batches, [[0.0] * count] * num_micro_batches)
            self.optimizer_step()
        except torch.OutOfMemoryError as error:
            raise MisfitError(
                f"{self.process} needs more memory than its GPU has left for one micro-batch of the longest sequences",
                where=str(error).splitlines()[0],
                rule="the rehearsal, one micro-batch of the longest sequences, must fit",
                way_out="plan with less hardware.memory, or with smaller micro-batches",
            ) from None

    def reset(self, model_folder: str) -> None:
        """Reset to the state after `start`; keep the process group and the weight-sync channel."""
        self.stop()
        torch.manual_seed(self.job.seed)  # the rehearsal may have drawn random numbers
        self._build_engine(model_folder)

    @property
    def has_adapters(self) -> bool:
        return self.role is Role.POLICY and self.job.training.trains_adapters

    def load(self, model_folder: str) -> Any:
        """Load the Hugging Face module to train."""
        dtype = TORCH_DTYPES[self.job.training.dtype]
        if self.is_scalar:
            return load_scalar_model(model_folder, dtype)
        language_model = load_language_model(model_folder, dtype)
        if self.job.takes_images:
            attach_tower(language_model, Path(self.job.policy.path))
        if self.has_adapters:
            add_adapters(language_model, self.job)
        return language_model

    def wrap(self, language_model: Any) -> torch.nn.Module:
        """Wrap the module so that a forward pass returns log-probs, entropies and, with a shared value head, values.

        A scalar model returns only its scalar per token.
        """
        if self.is_scalar:
            return ValueModel(language_model, self.sharing)
        entropies: Entropies = "learned" if self.job.algorithm.entropy_coef else "seen"
        temperature = self.job.workload.temperature
        if Role.VALUE in self.job.scored_roles and self.job.find_holder(Role.VALUE) is Role.POLICY:
            return PolicyValueModel(language_model, temperature, entropies, self.sharing)
        return LogprobModel(language_model, temperature, entropies=entropies, sharing=self.sharing)

    def forward_backward(
        self,
        micro_batches: Sequence[Sequence[TrainSample]],
        token_weights: Sequence[Sequence[float]],
        baseline_samples: Sequence[TrainSample] = (),
    ) -> dict[str, float]:
        """Accumulate the gradient of this rank's share of a mini-batch, micro-batch by micro-batch.

        micro_batches: the same number on every rank; an empty one is a pass over a dummy sample without gradient.
        token_weights: weight of each sample's tokens in the loss; all token weights of a mini-batch sum to 1.
        baseline_samples: this rank's answers to other prompts (KTO); they are scored first and get no gradient.
        Returns: sums and maxima for the log, over the `num_tokens` tokens that the loss learns from.
        """
        totals: dict[str, float] = {}
        has_baseline = self.job.algorithm.declaration.has_baseline_answers
        self.baseline = self._compute_baseline(baseline_samples) if has_baseline else 0.0
        for samples, weights in zip(micro_batches, token_weights, strict=True):
            with use_device(self.device):
                accumulate(totals, self._micro_batch(samples, weights))
        empty_device_cache(self.device)
        return totals

    @torch.no_grad()
    def _compute_baseline(self, samples: Sequence[TrainSample]) -> float:
        """Compute the mini-batch's KL baseline from all ranks' answers to other prompts. Collective."""
        pairs = [SequencePair(s.prompt_tokens, s.response_tokens, s.observed, s.images) for s in samples]
        logprobs = concatenate(self._score_pairs(pairs, lambda batch: self.engine.module(batch)[0]))
        inputs = self._build_loss_inputs(samples, [0.0] * len(samples), logprobs, torch.zeros_like(logprobs))
        return estimate_kl_baseline(sum_over_ranks(sum_margins(inputs)))

    def _micro_batch(self, samples: Sequence[TrainSample], token_weights: Sequence[float]) -> dict[str, float]:
        """Run forward and backward passes over one micro-batch; return its summary."""
        batch = make_batch(samples)
        logprobs, entropies, *values = self.engine(batch)
        divergences = values.pop() if batch.teacher is not None else None
        inputs = self._build_loss_inputs(samples, token_weights, logprobs, entropies, divergences)
        loss, details = find_loss(self.job.algorithm)(inputs, self.job.algorithm)
        policy_loss = loss.detach()
        value_sums: dict[str, float] = {}
        if values:
            returns, old_values = concatenate(s.returns for s in samples), concatenate(s.values for s in samples)
            value_loss, value_sums = value_loss_and_sums(
                values[0], old_values, returns, inputs.weights, self.job.algorithm
            )
            loss = loss + self.job.algorithm.value_coef * value_loss
        self.backward(loss)
        difference = logprobs.detach() - inputs.behaviour_logprobs
        summary = summarize_pass(float(policy_loss), difference, entropies.detach(), details, inputs.weights != 0)
        return summary | {f"value_{name}": value for name, value in value_sums.items()}

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of a micro-batch's loss."""
        # Token weights already sum to 1 over the mini-batch. So DeepSpeed's average over ranks is undone, and its
        # average over micro-batches is switched off.
        factor = self.engine.dp_world_size * find_missing_loss_scale(self.engine)
        self.engine.backward(loss * factor, scale_wrt_gas=False)

    def _build_loss_inputs(
        self,
        samples: Sequence[TrainSample],
        token_weights: Sequence[float],
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        divergences: torch.Tensor | None = None,
    ) -> LossInputs:
        scored, weighted_samples = self.job.scored_roles, list(zip(samples, token_weights, strict=True))
        is_offline = not self.job.algorithm.declaration.has_rollouts
        return LossInputs(
            logprobs=logprobs,
            behaviour_logprobs=logprobs.detach() if is_offline else concatenate(sample.logprobs for sample in samples),
            reference_logprobs=concatenate(s.reference_logprobs for s in samples) if Role.REFERENCE in scored else None,
            advantages=concatenate(sample.advantages for sample in samples),
            weights=concatenate(sample.spread(weight) for sample, weight in weighted_samples),
            teacher_logprobs=concatenate(s.teacher_logprobs for s in samples) if Role.TEACHER in scored else None,
            teacher_divergences=divergences,
            lengths=tuple(len(sample.logprobs) for sample in samples),
            num_learned=tuple(sample.num_learned for sample in samples),
            sequence_weights=concatenate((sample.weigh_response(weight),) for sample, weight in weighted_samples),
            sequence_advantages=concatenate((sample.advantage,) for sample in samples),
            groups=tuple(sample.group for sample in samples),
            old_logprobs=concatenate(s.old_logprobs for s in samples) if any(s.old_logprobs for s in samples) else None,
            entropies=entropies,
            baseline=self.baseline,
        )

    @torch.no_grad()
    def score(self, pairs: Sequence[SequencePair], role: str) -> list[tuple[float, ...]] | list[TeacherTokens]:
        """Score responses with a role that shares these weights. A frozen role uses its own adapter, or none."""
        module, index = self.engine.module, 2 if role == Role.VALUE else 0
        with activate_adapter(module.language_model, role) if role != Role.VALUE else nullcontext():
            if role == Role.TEACHER and self.job.algorithm.teacher_top_k:
                with use_device(self.device):
                    return score_teacher(pairs, self.job, module)
            return self._score_pairs(pairs, lambda batch: module(batch)[index])

    @torch.no_grad()
    def score_passes(self, passes: Sequence[Sequence[SequencePair]]) -> list[tuple[float, ...]]:
        """Compute the policy's log-probs of each response, pass by pass. All ranks run the same number of passes."""
        with use_device(self.device):
            batches = map(make_batch, passes)
            parts = [part for batch in batches for part in self.engine.module(batch)[0].split(batch.lengths)]
        empty_device_cache(self.device)
        return [tuple(part.tolist()) for part in parts]

    def _score_pairs(
        self, pairs: Sequence[SequencePair], judge: Callable[[TokenBatch], torch.Tensor]
    ) -> list[tuple[float, ...]]:
        """Score each response token of the pairs. Collective: ranks run the same number of passes."""
        with use_device(self.device):
            scores = score_in_lock_step(pairs, self.job.max_tokens_per_micro_batch, judge, list_numbers)
        empty_device_cache(self.device)
        return scores

    def optimizer_step(self, step: int = 1) -> dict[str, float]:
        """Take an optimizer step with the learning rate of RL step `step`; `grad_norm` is the norm before clipping."""
        rate = self._learning_rates.find_rate(step)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        norm = step_and_measure_norm(self.engine, self.engine.step)
        empty_device_cache(self.device)
        return {
            "grad_norm": norm,
            "is_skipped": float(not self.engine.was_step_applied()),
            "is_clipped": float(0 < self.config["gradient_clipping"] < norm),
            "learning_rate": rate,
        }

    def offload(self, destination: str) -> None:
        """Offload all states of the engine. destination: `disk`, or `host` from a GPU.

        Raises: HostError for `host` on a host without a GPU, where it would free nothing.
        """
        if destination != "disk" and device_of(self.device) is None:
            raise HostError(
                f"states cannot be offloaded to '{destination}'",
                where="placement.offload",
                rule="host is for states on a GPU; on a CPU host they are already in host memory",
                way_out="placement.offload=disk frees their memory, placement.offload=none keeps them",
            )
        by_kind = list_storages(self.engine).values()
        # States that DeepSpeed keeps offloaded permanently are on the host already.
        on_device = [s for storages in by_kind for s in storages if s.device.type == self.device.type]
        self.offloaded.offload(on_device, in_memory=destination == "host")
        empty_device_cache(self.device)

    def reload(self) -> None:
        self.offloaded.reload()

    def reserve_staging(self) -> None:
        """Allocate the staging memory of checkpoints."""
        self.saver.reserve(self.engine)

    def save_states(self, path: str, waits: bool) -> None:
        """Write this rank's part of a checkpoint to a file; a receipt next to it marks the file complete."""
        self.saver.save(self.engine, Path(path), waits=waits)

    def load_states(self, paths: Sequence[str], own: str, facts: dict[str, Any]) -> None:
        """Restore the state from the checkpoint files of all ranks. own: this rank's file, if it wrote one."""
        restore_states(self.engine, [Path(path) for path in paths], Path(own), facts)

    def offer_channel(self, endpoint: Endpoint) -> Endpoint:
        """Prepare the weight-sync channel on this side, replacing an earlier one; return what readers open."""
        if self.sender is None:
            self.sender = PolicySender(
                self._packets,
                getattr(torch, self.job.rollout.dtype.value),
                sends_deltas=self.job.placement.sync_content is SyncContent.DELTA,
            )
        return self.sender.offer(endpoint)

    def open_channel(self, endpoint: Endpoint) -> None:
        assert self.sender is not None, "offer_channel comes first"
        self.sender.connect(endpoint)

    def send_weights(self, update: Update) -> SendReport | None:
        """Send one update; ranks without a channel only take part in gathering the weights."""
        if self.sender is None:
            self._weights_to_send().join_gathers(
                entry.name for packet in self._packets for entry in packet.bucket.entries
            )
            return None
        return self.sender.send(self._weights_to_send(), update)

    def _weights_to_send(self) -> WeightSource:
        """The weights that weight sync sends: the adapters, or the full policy."""
        if self.job.placement.sync_content is SyncContent.ADAPTER:
            return AdapterWeights(self.engine.module.language_model)
        return self.weights()

    def _write_adapter(self, folder: Path) -> None:
        """Write the adapters in PEFT's layout. Collective: all ranks gather them, the first one writes."""
        language_model = self.engine.module.language_model
        named = language_model.named_parameters()
        with gather_parameters([parameter for name, parameter in named if ".lora_" in name]):
            if not torch.distributed.get_rank():
                save_adapter(language_model, self.job, folder)

    @cached_property
    def _learning_rates(self) -> LearningRates:
        return LearningRates(self.job, self.config["optimizer"]["params"]["lr"])

    @cached_property
    def _packets(self) -> tuple[Packet, ...]:
        return plan_policy_packets(self.job, self.job.load_model())

    def save(self, folder: str, tokenizer_folder: str) -> dict[str, int] | None:
        """Write the policy in Hugging Face layout with adapters merged; write adapters also separately, for PEFT.

        Returns: the weights' checksums, on the rank that wrote; else None.
        """
        if self.has_adapters:
            self._write_adapter(Path(folder) / "adapter")
        if self.engine.global_rank:
            self.weights().join_gathers()
            return None
        language_model = self.engine.module.language_model
        return save_policy(language_model.config, self.weights(), Path(folder), Path(tokenizer_folder))

    def export(self, folder: str, model_folder: str) -> dict[str, int] | None:
        """Save the policy for users: like `save`, but put a language part back into its vision-language model."""
        checksums = self.save(folder, model_folder)
        if checksums is not None:
            merge_into_whole_model(Path(folder), Path(model_folder))
        return checksums

    def weights(self) -> WeightSource:
        """The policy's weights by their Hugging Face names, with adapters merged.

        Iterating is collective under ZeRO-3.
        """
        language_model = self.engine.module.language_model
        if self.job.training.tp > 1:
            return PartWeights(language_model, {p.name: p.shape for p in self.job.load_model().parameters})
        return MergedWeights(language_model) if self.has_adapters else WeightSource(language_model)

    def components(self) -> dict[tuple[str, str], int]:
        """Bytes of DeepSpeed's partitions and buffers, of staging memory and of a vision tower."""
        if self.engine is None:
            return {}
        sizes = count_bytes(self.engine)
        sizes[MemoryKind.SYNC_STAGING] = self.sender.num_bytes if self.sender else 0
        sizes[MemoryKind.CHECKPOINT_STAGING] = self.saver.num_bytes
        if tower := get_tower(self.engine.module.language_model):
            sizes[MemoryKind.WEIGHTS] += tower.num_bytes
        return {(self.role.value, kind.value): size for kind, size in sizes.items()}


def concatenate(sequences: Iterable[tuple[float, ...]]) -> torch.Tensor:
    """One fp32 tensor of the numbers of all sequences."""
    return torch.tensor([value for values in sequences for value in values], dtype=torch.float32)
