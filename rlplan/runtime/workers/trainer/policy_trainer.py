"""PolicyTrainer: one data-parallel rank of the policy on DeepSpeed.

In: the bundle's DeepSpeed config and samples. Out: updated weights, in place, and what is worth logging.
Left out: how the engine is built (deepspeed_engine.py), what it holds (trained_states.py), packing (packing.py).
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from rlplan.errors import HostError
from rlplan.memory.weight_sync.packets import Packet, policy_packets
from rlplan.runtime.device.layer import device_of
from rlplan.runtime.driver.rehearsal import MisfitError
from rlplan.runtime.host.engine_keys import check_deepspeed
from rlplan.runtime.images.tower import give_tower, tower_of
from rlplan.runtime.losses.inputs import LossInputs
from rlplan.runtime.losses.policy_losses import kl_baseline, summed_margins
from rlplan.runtime.losses.registry import find_loss
from rlplan.runtime.losses.value import value_loss_and_sums
from rlplan.runtime.measure.step_metrics import accumulate
from rlplan.runtime.models.adapters import AdapterWeights, MergedWeights, add_adapters, computing_as, save_adapter
from rlplan.runtime.models.logprob_model import Entropies, LogprobModel, TokenBatch, make_batch
from rlplan.runtime.models.sequence_parallel import Sharing, meet
from rlplan.runtime.models.sharded_loading import build_cut
from rlplan.runtime.models.start_checkpoint import load_language_model, merge_into_whole_model, save_policy, warm_up
from rlplan.runtime.models.tensor_parallel import PartWeights
from rlplan.runtime.models.value_model import PolicyValueModel
from rlplan.runtime.rollout.experience import SequencePair, TrainSample, blank_sample
from rlplan.runtime.weight_sync.channel import BaseHandle, Endpoint, SendReport, Update
from rlplan.runtime.weight_sync.sender import PolicySender
from rlplan.runtime.weight_sync.shared_base import HeldBase
from rlplan.runtime.weight_sync.source import WeightSource, gathered
from rlplan.runtime.workers.trainer.deepspeed_engine import (
    TORCH_DTYPES,
    build_engine,
    global_norm,
    import_deepspeed,
    join_ranks,
    missing_loss_scale,
    recompute_layers,
    score_together,
    sum_over_ranks,
)
from rlplan.runtime.workers.trainer.learning_rates import LearningRates
from rlplan.runtime.workers.trainer.offloaded_states import OffloadedStates
from rlplan.runtime.workers.trainer.pass_summary import summarize
from rlplan.runtime.workers.trainer.state_saver import StateSaver, load
from rlplan.runtime.workers.trainer.trained_states import bytes_of, own_storages, storages_of
from rlplan.runtime.workers.worker import Worker, no_collections
from rlplan.runtime.workers.worker_device import forget_cache, inside, worker_device
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import MemoryKind, Role, SyncContent


class PolicyTrainer(Worker):
    """See the module docstring. Every rank runs the same calls with its own samples."""

    role = Role.POLICY
    is_scalar = False
    """Whether the model has a scalar head in place of the language head."""

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

    @no_collections()
    def import_libraries(self) -> None:
        """Load the code that `start` needs, so that its memory alone can be measured."""
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
        torch.manual_seed(self.job.seed)
        self.device, timeout_s = worker_device(self.job), self.job.limits.rank_timeout_s
        join_ranks(rank, world_size, address, timeout_s, self.take_listener(), device_of(self.device))
        self.sharing = meet(self.job.training.ulysses)
        self._take_over(model_folder)

    def _take_over(self, model_folder: str) -> None:
        if self._is_cut_from_the_start:
            language_model = build_cut(
                model_folder, self.config, TORCH_DTYPES[self.job.training.dtype], is_scalar=self.is_scalar
            )
        else:
            language_model = self.load(model_folder)
            if self.job.rollout.shares_base:
                self.base = self.base or HeldBase(self.job.load_model(), language_model.dtype, self.device)
                self.base.take_in(language_model)
            own_storages(language_model, self.base)
        if self.job.training.gradient_checkpointing:
            recompute_layers(language_model)
        self.engine = build_engine(self.wrap(language_model), self.config)

    @property
    def _is_cut_from_the_start(self) -> bool:
        """On GPUs under ZeRO-3: as many ranks as a host has GPUs would each load the whole model. Not with adapters."""
        zero = self.config.get("zero_optimization", {})
        return device_of(self.device) is not None and zero.get("stage") == 3 and not self.has_adapters

    def stop(self) -> None:
        """Let go of the engine and everything that it holds; the ranks stay together."""
        self.saver.finish()
        if self.engine is not None:
            self.engine.destroy()
            self.engine = None
            gc.collect()

    def share_base(self) -> BaseHandle:
        """What opens the frozen base in the engine on this device."""
        assert self.base is not None, "the job shares the base, and the trainer was started"
        return self.base.handle()

    def rehearse(self) -> None:
        """One step at its largest, of sequences that count nothing; `begin_anew` comes next.

        Of several micro-batches two, for the second finds the first one's gradients there.
        Raises: MisfitError where a GPU has too little memory for it.
        """
        workload = self.job.workload
        share = self.job.num_trained_by(torch.distributed.get_world_size() // self.job.training.num_ranks_per_pass)
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
                way_out="plan for less: hardware.memory, or fewer tokens a pass",
            ) from None

    def begin_anew(self, model_folder: str) -> None:
        """Forget everything since `start`, but for the other ranks and the way to the engine."""
        self.stop()
        torch.manual_seed(self.job.seed)
        self._take_over(model_folder)

    @property
    def has_adapters(self) -> bool:
        return self.role is Role.POLICY and self.job.training.trains_adapters

    def load(self, model_folder: str) -> Any:
        """The Hugging Face module that is trained."""
        language_model = load_language_model(model_folder, TORCH_DTYPES[self.job.training.dtype])
        if self.job.takes_images:
            give_tower(language_model, Path(self.job.policy.path))
        if self.has_adapters:
            add_adapters(language_model, self.job)
        return language_model

    def wrap(self, language_model: Any) -> torch.nn.Module:
        entropies: Entropies = "learned" if self.job.algorithm.entropy_coef else "seen"
        if Role.VALUE in self.job.scored_roles and self.job.holder_of(Role.VALUE) is Role.POLICY:  # one more head
            return PolicyValueModel(language_model, self.job.workload.temperature, entropies, self.sharing)
        temperature = self.job.workload.temperature
        return LogprobModel(language_model, temperature, entropies=entropies, sharing=self.sharing)

    def forward_backward(
        self,
        micro_batches: Sequence[Sequence[TrainSample]],
        token_weights: Sequence[Sequence[float]],
        baseline_samples: Sequence[TrainSample] = (),
    ) -> dict[str, float]:
        """Accumulate the gradient of one mini-batch's share of this rank, micro-batch by micro-batch.

        micro_batches: as many on every rank; an empty one is a pass over a dummy without gradient.
        token_weights: what each token of a sample counts, so that those of the whole mini-batch add up to 1.
        baseline_samples: this rank's answers to other prompts, which are scored first and get no gradient.
        Returns: sums and maxima for the log, over the tokens that are learned from; `num_tokens` says how many.
        """
        totals: dict[str, float] = {}
        self.baseline = self._baseline(baseline_samples) if self._has_baseline else 0.0
        for samples, weights in zip(micro_batches, token_weights, strict=True):
            with inside(self.device):
                accumulate(totals, self._micro_batch(samples, weights))
        forget_cache(self.device)
        return totals

    @property
    def _has_baseline(self) -> bool:
        return self.job.algorithm.declaration.has_baseline_answers

    @torch.no_grad()
    def _baseline(self, samples: Sequence[TrainSample]) -> float:
        """The mini-batch's baseline, from the answers to other prompts of all ranks. Collective: every rank asks."""
        pairs = [SequencePair(s.prompt_tokens, s.response_tokens, s.observed, s.images) for s in samples]
        judged = joined(self._judge(pairs, lambda batch: self.engine.module(batch)[0]))
        inputs = self._loss_inputs(samples, [0.0] * len(samples), judged, torch.zeros_like(judged))
        return kl_baseline(sum_over_ranks(summed_margins(inputs)))

    def _micro_batch(self, samples: Sequence[TrainSample], token_weights: Sequence[float]) -> dict[str, float]:
        batch = make_batch(samples)
        logprobs, entropies, *values = self.engine(batch)
        inputs = self._loss_inputs(samples, token_weights, logprobs, entropies)
        loss, details = find_loss(self.job.algorithm)(inputs, self.job.algorithm)
        policy_loss = loss.detach()
        more: dict[str, float] = {}
        if values:
            returns, old_values = joined(s.returns for s in samples), joined(s.values for s in samples)
            value_loss, more = value_loss_and_sums(values[0], old_values, returns, inputs.weights, self.job.algorithm)
            loss = loss + self.job.algorithm.value_coef * value_loss
        self.backward(loss)
        apart = logprobs.detach() - inputs.behaviour_logprobs
        summary = summarize(float(policy_loss), apart, entropies.detach(), details, inputs.weights != 0)
        return summary | {f"value_{name}": value for name, value in more.items()}

    def backward(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's gradient to the others'.

        DeepSpeed averages over ranks, and would over micro-batches: the weights already add up to 1 over all of them.
        """
        factor = self.engine.dp_world_size * missing_loss_scale(self.engine)
        self.engine.backward(loss * factor, scale_wrt_gas=False)

    def _loss_inputs(
        self,
        samples: Sequence[TrainSample],
        token_weights: Sequence[float],
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
    ) -> LossInputs:
        scored, weighed = self.job.scored_roles, list(zip(samples, token_weights, strict=True))
        given = not self.job.algorithm.declaration.has_rollouts
        return LossInputs(
            logprobs=logprobs,
            behaviour_logprobs=logprobs.detach() if given else joined(sample.logprobs for sample in samples),
            reference_logprobs=joined(s.reference_logprobs for s in samples) if Role.REFERENCE in scored else None,
            advantages=joined(sample.advantages for sample in samples),
            weights=joined(sample.spread(weight) for sample, weight in weighed),
            teacher_logprobs=joined(s.teacher_logprobs for s in samples) if Role.TEACHER in scored else None,
            lengths=tuple(len(sample.logprobs) for sample in samples),
            num_learned=tuple(sample.num_learned for sample in samples),
            sequence_weights=joined((sample.weighed(weight),) for sample, weight in weighed),
            sequence_advantages=joined((sample.advantage,) for sample in samples),
            groups=tuple(sample.group for sample in samples),
            old_logprobs=joined(s.old_logprobs for s in samples) if any(s.old_logprobs for s in samples) else None,
            entropies=entropies,
            baseline=self.baseline,
        )

    @torch.no_grad()
    def score(self, pairs: Sequence[SequencePair], role: str) -> list[tuple[float, ...]]:
        """What a role that shares these weights says of each response: a frozen one by its own adapter, or none."""
        module, index = self.engine.module, 2 if role == Role.VALUE else 0
        with computing_as(module.language_model, role) if role != Role.VALUE else nullcontext():
            return self._judge(pairs, lambda batch: module(batch)[index])

    @torch.no_grad()
    def score_passes(self, passes: Sequence[Sequence[SequencePair]]) -> list[tuple[float, ...]]:
        """The policy's log-probs of each response, pass by pass. As many passes on every rank, as in training."""
        with inside(self.device):
            batches = map(make_batch, passes)
            parts = [part for batch in batches for part in self.engine.module(batch)[0].split(batch.lengths)]
        forget_cache(self.device)
        return [tuple(part.tolist()) for part in parts]

    def _judge(
        self, pairs: Sequence[SequencePair], judge: Callable[[TokenBatch], torch.Tensor]
    ) -> list[tuple[float, ...]]:
        """Numbers of each response's tokens; as many passes on every rank, for ZeRO-3 gathers in each."""
        with inside(self.device):
            judged = score_together(pairs, self.job.max_tokens_per_micro_batch, judge)
        forget_cache(self.device)
        return judged

    def optimizer_step(self, step: int = 1) -> dict[str, float]:
        """With the learning rate of an RL step. The norm is that before clipping."""
        rate = self._learning_rates.at(step)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        norm = global_norm(self.engine, self.engine.step)
        forget_cache(self.device)
        return {
            "grad_norm": norm,
            "is_skipped": float(not self.engine.was_step_applied()),
            "is_clipped": float(0 < self.config["gradient_clipping"] < norm),
            "learning_rate": rate,
        }

    def offload(self, destination: str) -> None:
        """Move everything that the engine holds out of the way. destination: `disk`, or `host` from a GPU.

        Raises: HostError for `host` on a host without a GPU, where it would free nothing.
        """
        if destination == "disk" or device_of(self.device):
            held = storages_of(self.engine)
            # what is offloaded for good is on the host already
            storages = [s for mine in held.values() for s in mine if s.device.type == self.device.type]
            self.offloaded.offload(storages, in_memory=destination == "host")
            forget_cache(self.device)
        else:
            raise HostError(
                f"states cannot move to '{destination}'",
                where="placement.offload",
                rule="host is for states on a GPU; on a CPU host they lie there already",
                way_out="placement.offload=disk frees their memory, placement.offload=none leaves them",
            )

    def reload(self) -> None:
        self.offloaded.bring_back()

    def reserve_staging(self) -> None:
        """Take the memory into which states are copied for a checkpoint."""
        self.saver.reserve(self.engine)

    def save_states(self, path: str, waits: bool) -> None:
        """Write what a resumed run needs of this rank into a file; a receipt beside it says when it is whole."""
        self.saver.save(self.engine, Path(path), waits=waits)

    def load_states(self, paths: Sequence[str], own: str, facts: dict[str, Any]) -> None:
        """Become what the ranks were that wrote these files. own: this rank's, where it was one of them."""
        load(self.engine, [Path(path) for path in paths], Path(own), facts)

    def offer_channel(self, endpoint: Endpoint) -> Endpoint:
        """Prepare the channel through which weights go out, in place of an earlier one."""
        if self.sender is None:
            self.sender = PolicySender(
                self._packets,
                getattr(torch, self.job.rollout.dtype.value),
                sends_deltas=self.job.placement.sync_content is SyncContent.DELTA,
            )
        return self.sender.offer(endpoint)

    def open_channel(self, endpoint: Endpoint) -> None:
        assert self.sender is not None, "offer_channel comes first"
        self.sender.open(endpoint)

    def send_weights(self, update: Update) -> SendReport | None:
        """Send one update; ranks without a channel only help to gather the weights."""
        if self.sender is None:
            self._sent_weights().take_part(entry.name for packet in self._packets for entry in packet.bucket.entries)
            return None
        return self.sender.send(self._sent_weights(), update)

    def _sent_weights(self) -> WeightSource:
        """What a weight sync sends: the adapters alone, or the whole policy."""
        if self.job.placement.sync_content is SyncContent.ADAPTER:
            return AdapterWeights(self.engine.module.language_model)
        return self.weights()

    def _write_adapter(self, folder: Path) -> None:
        """Write the adapters in PEFT's layout: every rank helps to gather them, the first one writes."""
        language_model = self.engine.module.language_model
        named = language_model.named_parameters()
        with gathered([parameter for name, parameter in named if ".lora_" in name]):
            if not torch.distributed.get_rank():
                save_adapter(language_model, self.job, folder)

    @cached_property
    def _learning_rates(self) -> LearningRates:
        return LearningRates(self.job, self.config["optimizer"]["params"]["lr"])

    @cached_property
    def _packets(self) -> tuple[Packet, ...]:
        return policy_packets(self.job, self.job.load_model())

    def save(self, folder: str, tokenizer_folder: str) -> dict[str, int] | None:
        """Write the policy in Hugging Face layout; adapters merged into it, and beside it in PEFT's layout.

        Returns: the weights' checksums, from the rank that wrote.
        """
        if self.has_adapters:
            self._write_adapter(Path(folder) / "adapter")
        if self.engine.global_rank:
            self.weights().take_part()
            return None
        language_model = self.engine.module.language_model
        return save_policy(language_model.config, self.weights(), Path(folder), Path(tokenizer_folder))

    def export(self, folder: str, model_folder: str) -> dict[str, int] | None:
        """As `save`, for people: what was a vision-language model's language part is put back into it."""
        checksums = self.save(folder, model_folder)
        if checksums is not None:
            merge_into_whole_model(Path(folder), Path(model_folder))
        return checksums

    def weights(self) -> WeightSource:
        """The policy's weights by their names in the Hugging Face model, adapters merged into them.

        Iterating is collective under ZeRO-3.
        """
        language_model = self.engine.module.language_model
        if self.job.training.tp > 1:
            return PartWeights(language_model, {p.name: p.shape for p in self.job.load_model().parameters})
        return MergedWeights(language_model) if self.has_adapters else WeightSource(language_model)

    def components(self) -> dict[tuple[str, str], int]:
        """Bytes of DeepSpeed's own partitions and buffers."""
        if self.engine is None:
            return {}
        held = bytes_of(self.engine)
        held[MemoryKind.SYNC_STAGING] = self.sender.num_bytes if self.sender else 0
        held[MemoryKind.CHECKPOINT_STAGING] = self.saver.num_bytes
        if tower := tower_of(self.engine.module.language_model):
            held[MemoryKind.WEIGHTS] += tower.num_bytes
        return {(self.role.value, kind.value): size for kind, size in held.items()}


def joined(each: Iterable[tuple[float, ...]]) -> torch.Tensor:
    return torch.tensor([value for values in each for value in values], dtype=torch.float32)
