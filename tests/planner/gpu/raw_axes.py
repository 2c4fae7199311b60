"""Every choice of the raw axes of a job, one after the other, for the search's oracle."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from rlplan.dataflow.choice import Arrangement, EngineChoice, TrainerChoice, WeightSyncMode
from rlplan.dataflow.placements import GENERATION
from rlplan.errors import SpecError
from rlplan.planner.setting import GpuSetting
from rlplan.spec.hardware.profile import ComputeDtype
from rlplan.spec.models.shards import has_even_stages
from rlplan.spec.parts.lengths import Lengths
from rlplan.spec.parts.workload import WorkloadSpec
from rlplan.spec.resolved import SettledJob, build_search_rules
from rlplan.vocabulary import Placement, SyncContent

FLAGS = (False, True)
POWERS = tuple(2**power for power in range(15))


class RawAxes:
    """The choices of one job."""

    spec: SettledJob
    setting: GpuSetting
    work: WorkloadSpec
    lengths: Lengths

    def _frames(self) -> Iterator[Arrangement]:
        spec, count = self.spec, self.setting.num_gpus
        wants, frozen, has_rollouts = spec.placement, spec.frozen_roles, spec.has_rollouts
        axes = product(Placement, range(1, count + 1), (0, *POWERS), ("none", "all", "frozen"), FLAGS)
        for placement, training, scoring, offloaded, is_async in axes:
            disaggregated, colocated = placement is Placement.DISAGGREGATED, placement is Placement.COLOCATED
            generation = count - training - scoring if disaggregated else count
            if not has_rollouts and placement is not Placement.HYBRID:
                continue
            if has_rollouts and wants.placement not in ("auto", placement.value):
                continue
            if not disaggregated and (training != count or scoring or is_async):
                continue
            if is_async and not wants.max_staleness:
                continue
            if disaggregated and (generation < 1 or (scoring and not frozen)):
                continue
            if wants.num_scoring_devices not in ("auto", scoring):
                continue
            if disaggregated and not self._has_sizes(generation, scoring):
                continue
            if offloaded == "all" and not colocated:
                continue
            if offloaded == "frozen" and (not frozen or scoring):
                continue
            if not self._may_offload(offloaded, colocated, scoring):
                continue
            sleeps = colocated and spec.rollout.sleep_level != 0 and has_rollouts
            yield Arrangement(placement, training, generation, scoring, offloaded, is_async, sleeps)  # type: ignore[arg-type]

    def _may_offload(self, offloaded: str, colocated: bool, scoring: int) -> bool:
        """Whether the job leaves it open, or asks for it. Where it asks for all and none can go, all stay."""
        place = self.spec.placement
        if place.offload in ("auto", "none") and offloaded == "none":
            return True
        if place.offload == "none":
            return False
        if offloaded == "none":
            frozen_can = place.offload_roles == "auto" and self.spec.frozen_roles and not scoring
            return not colocated and place.offload_roles != "frozen" and not frozen_can
        return place.offload_roles in ("auto", offloaded)

    def _has_sizes(self, generation: int, scoring: int) -> bool:
        """Whether groups of their own may have so many GPUs."""
        wants, count = self.spec.placement, self.setting.num_gpus
        is_open = wants.num_scoring_devices == "auto"
        if is_open and scoring and not count // 16 <= scoring <= count // 4:
            return False
        if wants.num_generation_devices == "auto":
            return True
        return generation == wants.num_generation_devices and not (is_open and scoring)

    @property
    def selects_rows(self) -> bool:
        """Whether logits are of responses alone: in rlplan's runtime, and TRL's fused head."""
        return self.spec.backend == "deepspeed" and self.spec.training.logits in ("auto", "by_rows", "fused")

    def _trainers(self, arrangement: Arrangement) -> Iterator[TrainerChoice]:
        wants, backend, heads = self.spec.training, self.spec.backend, self.setting.policy.num_heads
        experts = self.setting.policy.experts.num_experts if self.setting.policy.experts else 1
        contexts = min(8, max(1, self.work.max_seq_len // 2048))
        opens = {
            "deepspeed": (contexts, 8, 1, 1, 1),
            "fsdp2": (contexts, 8, 1, contexts, 1),
            "megatron": (1, 8, 16, contexts, 64),
        }[backend]
        stated = wants.ulysses, wants.tp, wants.pp, wants.cp, wants.ep
        ranges = [
            [size for size in POWERS if size <= most] if sync_mode == "auto" else [sync_mode]
            for sync_mode, most in zip(stated, opens, strict=True)
        ]
        for ulysses, tp, pp, cp, ep in product(*ranges):
            ways, ranks = ulysses * tp * pp * cp, arrangement.num_training
            if backend == "deepspeed" and not self._can_share(ulysses, tp):
                continue
            if heads % (ulysses * tp) or ways > ranks or ranks % ways or not self._has_stages(pp):
                continue
            if wants.tp == "auto" and any(model.num_heads % tp for model in self.setting.models.values()):
                continue
            if (
                (tp > 1 and self._lacks_rows(experts))
                or experts % ep
                or self._leaves_frozen_uncut(arrangement, (ways, tp * pp * ep, pp * ep if ep > 1 else 1))
                or (ep > 1 and ranks % (tp * pp * ep) and ranks % (pp * ep))
            ):
                continue
            size, groups = self.work.rollouts_per_mini_batch, ranks // ways
            if groups > size if backend == "deepspeed" else size % groups:
                continue
            share = -(-size // groups)
            for stage, again, optimizer, parameters in product(range(4), FLAGS, FLAGS, FLAGS):
                if not self._has_stage(stage, ranks, tp) or not self._has_offload(stage, tp, optimizer, parameters):
                    continue
                if wants.gradient_checkpointing not in ("auto", again):
                    continue
                if arrangement.offloaded == "all" and parameters:
                    continue
                for micro, tokens in self._passes(share, ulysses * cp):
                    yield TrainerChoice(stage, again, optimizer, parameters, micro, ulysses, tp, pp, cp, ep, tokens)

    def _has_stages(self, pp: int) -> bool:
        """Whether the layers go on so many stages, of which all but the last have equally many."""
        return pp == 1 or (pp <= self.setting.policy.num_layers and has_even_stages(self.setting.policy, pp))

    def _lacks_rows(self, experts: int) -> bool:
        """Whether Megatron refuses to train experts behind tensor parallel ranks."""
        return self.spec.backend == "megatron" and experts > 1 and not self.spec.training.sequence_parallel

    def _leaves_frozen_uncut(self, arrangement: Arrangement, sizes: tuple[int, int, int]) -> bool:
        """Whether frozen roles on GPUs of their own, which other trainers cut like the policy, cannot be cut so.

        sizes: ranks that share a sequence, and, of which one must divide, ranks that hold all experts.
        """
        alone, (ways, across, whole) = arrangement.num_scoring, sizes
        return self.spec.backend != "deepspeed" and bool(alone % ways or (alone % across and alone % whole))

    def _can_share(self, ulysses: int, tp: int) -> bool:
        """Whether DeepSpeed's ranks can share the policy's micro_batch: with as many heads, and AutoTP as much of
        all.
        """
        model = self.setting.policy
        keys = model.num_kv_heads
        if keys % ulysses and ulysses % keys:
            return False
        divides = keys % tp == 0 and model.intermediate_size % tp == 0
        return tp == 1 or (model.experts is None and divides and ulysses == 1 and self.spec.training.lora is None)

    def _has_stage(self, stage: int, ranks: int, tp: int) -> bool:
        wants, backend = self.spec.training.zero_stage, self.spec.backend
        if backend == "deepspeed" and tp > 1 and stage == 3:
            return False
        if wants != "auto":
            return stage == wants
        if backend != "deepspeed":
            return stage == {"fsdp2": 3, "megatron": 1}[backend]
        return stage in ((0, 1, 2, 3) if ranks > 1 else (0, 3))

    def _has_offload(self, stage: int, tp: int, optimizer: bool, parameters: bool) -> bool:
        wants = self.spec.training
        if wants.offloads_optimizer not in ("auto", optimizer) or wants.offloads_parameters not in ("auto", parameters):
            return False
        if self.spec.backend == "fsdp2":
            return optimizer == parameters
        if self.spec.backend == "megatron":
            return not parameters
        if parameters and stage < 3:
            return False
        if optimizer and (stage < 2 or tp > 1 or wants.optimizer != "adamw"):
            return False
        if optimizer and wants.offload_device == "nvme" and stage < 3:
            return False
        return not (wants.lora is not None and wants.lora.base_dtype == "nf4" and stage == 3)

    def _has_framework(self, arrangement: Arrangement, trainer: TrainerChoice, engine: EngineChoice) -> bool:
        """Whether the job's framework has the whole choice, of which each rule is asked."""
        axes = ("zero_stage", "gradient_checkpointing", "offloads_optimizer", "offloads_parameters")
        axes += ("ulysses", "tp", "pp", "cp", "ep")
        chosen = {f"training.{axis}": getattr(trainer, axis) for axis in axes}
        for name in ("tp", "attention_dp", "has_expert_parallel", "sleep_level"):
            chosen[f"rollout.{name}"] = getattr(engine, name)
        chosen["placement.placement"] = arrangement.placement.value
        chosen["placement.num_scoring_devices"] = arrangement.num_scoring
        chosen["placement.offload"] = "none" if arrangement.offloaded == "none" else "host"
        if arrangement.offloaded != "none":
            chosen["placement.offload_roles"] = arrangement.offloaded
        return build_search_rules(self.spec).allows(chosen)

    def _passes(self, share: int, ways: int) -> Iterator[tuple[int, int]]:
        work, tokens, packs = self.work, self.spec.training.max_tokens_per_micro_batch, self.spec.backend == "deepspeed"
        if tokens != "auto":
            yield max(1, tokens // work.max_seq_len), tokens
            return
        if work.micro_batch_size_per_gpu != "auto":
            size = min(share, work.micro_batch_size_per_gpu)
            yield size, size * work.max_seq_len if packs else 0
            return
        is_even = work.usual_prompt_len + self.lengths.quantile(0.0) >= work.max_seq_len
        for micro in POWERS:
            if micro == 1 or (micro <= share and micro * work.max_seq_len <= 32_768 * ways):
                if not packs:
                    yield micro, 0
                if packs or not is_even:
                    yield micro, micro * work.max_seq_len

    def _engines(self, arrangement: Arrangement) -> Iterator[EngineChoice]:
        for engine in self._engines_without_adapters(arrangement):
            yield engine
            if self.spec.training.lora is not None:
                yield replace(engine, adapter_versions=self._adapter_versions(arrangement))

    def _engines_without_adapters(self, arrangement: Arrangement) -> Iterator[EngineChoice]:
        if not self.spec.has_rollouts:
            yield EngineChoice(1, 0)
            return
        wants, model = self.spec.rollout, self.setting.policy
        fp8 = ComputeDtype.FLOAT8 in self.setting.get_pool(GENERATION).gpu.dense_flops_per_s
        all_seqs = POWERS[:11] if wants.max_num_seqs == "auto" else (wants.max_num_seqs,)
        cuts = product(POWERS[:6], POWERS[:7])
        for (tp, dp), level, whole, form, per_rank in product(cuts, (0, 1, 2), FLAGS, (None, "fp8"), all_seqs):
            seqs = per_rank if wants.max_num_seqs != "auto" else dp * per_rank
            if wants.tp not in ("auto", tp) or arrangement.num_generation % (tp * dp) or model.num_heads % tp:
                continue
            if not self._may_share_attention(tp, dp, whole):
                continue
            if arrangement.sleeps != (level > 0) or (arrangement.sleeps and wants.sleep_level not in ("auto", level)):
                continue
            if wants.has_expert_parallel not in ("auto", whole) or (whole and (model.experts is None or tp * dp == 1)):
                continue
            if wants.quantization == "auto":
                if form and not fp8:
                    continue
            elif form is not None:
                continue
            if seqs not in self._num_seqs(arrangement.num_generation // (tp * dp), dp):
                continue
            quantization = None if wants.quantization in ("auto", "none") else wants.quantization
            engine = EngineChoice(tp, level, seqs, form or quantization, whole, dp)
            try:
                _ = self._engine(arrangement, engine).weight_bytes
            except SpecError:
                continue
            yield engine

    def _adapter_versions(self, arrangement: Arrangement) -> int:
        """Adapters in flight, each in its own slot, and the next one; other stacks replace one by another."""
        place = self.spec.placement
        is_beside = arrangement.is_async and place.partial_rollouts and self.spec.backend == "deepspeed"
        return 1 + place.max_staleness if is_beside else 1

    def _may_share_attention(self, tp: int, dp: int, whole: bool) -> bool:
        """Whether an engine may have so many groups that attend to sequences of their own."""
        wants = self.spec.rollout
        if wants.attention_dp != "auto":
            return dp == wants.attention_dp and (whole or dp == 1)
        if dp == 1:
            return True
        divides = wants.max_num_seqs == "auto" or wants.max_num_seqs % dp == 0
        divides = divides and wants.max_num_batched_tokens % dp == 0
        return self.spec.backend != "deepspeed" and whole and tp <= 8 and tp * dp <= 64 and divides

    def _num_seqs(self, num_engines: int, dp: int) -> list[int]:
        """Equal numbers on each data-parallel attention group; with several groups, at most a step's tokens."""
        wanted = self.spec.rollout.max_num_seqs
        if wanted != "auto":
            return [wanted]
        share = -(-self.work.num_rollouts_per_step // (num_engines * dp))
        most = min(1024, 2 ** (share - 1).bit_length())
        if dp > 1:
            most = max(
                seqs for seqs in POWERS if seqs <= most and seqs * dp <= self.spec.rollout.max_num_batched_tokens
            )
        return [dp * seqs for seqs in POWERS if min(16, most) <= seqs <= most]

    def _sync_modes(self, arrangement: Arrangement, engine: EngineChoice) -> Iterator[WeightSyncMode]:
        place = self.spec.placement
        if not self.spec.has_rollouts:
            yield ""
            return
        ways: tuple[WeightSyncMode, ...] = ("cuda_ipc", "nccl", "disk", "adapter", "delta")
        for sync_mode in ways:
            content = {"adapter": SyncContent.ADAPTER, "delta": SyncContent.DELTA}.get(sync_mode, SyncContent.FULL)
            if place.sync_content not in ("auto", content):
                continue
            is_own = self.spec.backend == "deepspeed"  # nobody else's export says it
            if sync_mode == "delta" and place.sync_content == "auto" and (arrangement.shares_devices or not is_own):
                continue
            if sync_mode == "adapter" and (self.spec.training.lora is None or engine.sleep_level == 2):
                continue
            if (sync_mode == "adapter") != (engine.adapter_versions > 0):
                continue
            if place.transport != "auto" and sync_mode != place.transport and place.sync_content in ("auto", "full"):
                continue
            usual = ("cuda_ipc",) if arrangement.shares_devices else ("nccl", "disk")
            if content is SyncContent.FULL and sync_mode not in usual and place.transport != "disk":
                continue
            yield sync_mode
