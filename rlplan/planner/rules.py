"""Rules for what rlplan's runtime can run. The search reads them before it offers a choice; commands refuse a job by
them.

In: a job, a choice. Out: reasons; none if the choice can run. Left out: memory, and rules about a single key (spec/).
`find_job_refusals` lists reasons that hold for every choice, `find_choice_refusals` those against one choice.
"""

from collections.abc import Iterator
from pathlib import Path

from rlplan.dataflow.choice import Choice
from rlplan.errors import EmitError, SpecError
from rlplan.frameworks.profile import find_release
from rlplan.memory.model.engine_base import KEY as BASE_PATH
from rlplan.memory.weight_sync.adapters import ENGINE_LORA_RANKS
from rlplan.planner.checks.engine_base import (
    MXFP4,
    find_engine_base_choice_refusals,
    find_engine_base_refusals,
    find_shared_base_refusals,
    find_shared_stage_refusal,
)
from rlplan.planner.checks.frameworks import find_export_refusals, find_runtime_refusals
from rlplan.planner.checks.trainers import check_missing_axes, check_sharded_copies
from rlplan.planner.plan_parts import extract_keys
from rlplan.spec.hardware.catalogue import find_profile
from rlplan.spec.model import ModelSpec, has_vision_tower, is_for_images, load_model, load_scalar_base
from rlplan.spec.models.adapters import EXPERTS
from rlplan.spec.models.families.image_sizes import WITH_IMAGES
from rlplan.spec.models.parts import FULL
from rlplan.spec.resolved import SettledJob
from rlplan.vocabulary import Placement, Role, SyncContent

SYNC_MODES_ON_SHARED_GPUS = ("cuda_ipc", "disk", "adapter")
SYNC_MODES_ON_SEPARATE_GPUS = ("nccl", "disk", "adapter", "delta")
"""Weight-sync modes between processes on shared GPUs and on separate GPUs. NCCL allows one rank per GPU."""
CUDA_TRANSPORTS = ("cuda_ipc", "nccl")
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Source: vLLM 0.32.0, v1/attention/backends/cpu_attn.py, `get_supported_head_sizes`. Other sizes fail at the first
batch."""
CPU_EXPERT_MULTIPLE = 32
"""The hidden size must be a multiple of this for vLLM's CPU kernel for experts. Source: vLLM 0.32.0,
experts/cpu_moe.py."""
MAX_ENGINE_LORA_RANK = max(ENGINE_LORA_RANKS)
"""Source: vLLM 0.32.0, config/lora.py, `MaxLoRARanks`: 1, 8, 16, 32, 64, 128, 256, 320, 512."""
REPLAYED = ("Qwen3MoeForCausalLM",)
"""Architectures whose routers' choices are replayed in the trainer."""


def find_job_refusals(job: SettledJob) -> Iterator[str]:
    """Reasons why rlplan's runtime cannot run a job with any choice."""
    if not job.is_for_rlplan:
        but = next((f", which refuses {reason}" for reason in find_model_refusals(job)), "")
        yield f"framework {job.framework}: bundles run on rlplan's own runtime (framework=rlplan){but}"
        return
    yield from find_model_refusals(job)
    yield from _check_images(job)
    yield from _check_trainer(job)
    yield from find_runtime_refusals(job)
    yield from find_engine_base_refusals(job)
    if job.device_kind == "cuda":
        yield from _check_gpus(job)
    else:
        yield from _check_cpu_host(job)


def find_choice_refusals(job: SettledJob, choice: Choice) -> Iterator[str]:
    """Reasons why rlplan's runtime cannot run a job with this choice."""
    if not job.is_for_rlplan:
        return
    yield from _check_devices(job, choice)
    yield from _check_mini_batches(job, choice)
    yield from find_shared_base_refusals(job, choice)
    yield from find_engine_base_choice_refusals(job, choice)
    if job.device_kind == "cuda":
        yield from _check_gpu_engines(job, choice)
        yield from _check_gpu_sync(job, choice)
    else:
        yield from _check_host_sync(job, choice)


def list_refusals(job: SettledJob, choice: Choice) -> tuple[str, ...]:
    """Reasons why the job's framework refuses a choice; empty if it runs.

    Values that another framework does not support are refused before the search (checks/frameworks.py). Here only
    restrictions of its config files remain.
    """
    if not job.is_for_rlplan:
        return tuple(find_export_refusals(job, choice))
    return (*find_job_refusals(job), *find_choice_refusals(job, choice))


def build_refusal(reason: str, *, is_for_rlplan: bool = True) -> EmitError:
    """Build the error for a refusal. is_for_rlplan: whether rlplan's own runtime refuses."""
    # reasons begin with "KEY VALUE: ..."
    where, value = [word.rstrip(":") for word in [*reason.split(maxsplit=2), ""][:2]]
    change = extract_keys(reason) or "another value of the key (docs/job.md)"
    way_out = f"{change}; framework=verl plans for another framework" if is_for_rlplan else change
    if where == "framework":
        name = find_release(value).name.replace("_", "-")
        way_out = f"rlplan emit JOB --target {name} -o FOLDER writes it in the keys of {value}"
    return EmitError(
        f"refused: {reason}",
        where=where,
        rule="a plan must run in its framework, even if memory suffices (docs/planning.md, Running it)",
        way_out=way_out,
    )


def find_stage_refusal(job: SettledJob, choice: Choice) -> str:
    """The reason why a ZeRO stage conflicts with the rest of the trainer; empty if it does not."""
    trainer = choice.trainer
    asked = job.training.combination(
        trainer.zero_stage, (trainer.ulysses, trainer.tp), (trainer.offloads_optimizer, trainer.offloads_parameters)
    )
    return next((conflict.reason for conflict in asked.contradictions()), "") or find_shared_stage_refusal(job, choice)


def find_model_refusals(job: SettledJob) -> Iterator[str]:
    """Reasons why rlplan's runtime cannot run the job's models."""
    if job.policy.config is not None:
        yield "policy.config: a run needs the model itself (policy.path, a folder with its config.json and weights)"
        return
    if job.policy.max_position_embeddings is not None:
        yield "policy.max_position_embeddings: the runtime uses the value in the model's config.json"
    yield from _check_families(job)
    yield from _check_towers(job)
    model = _load_policy(job) if job.device_kind == "cuda" else None
    if model and (model.experts is not None or set(model.attention_kinds) - {FULL}):
        has = "experts" if model.experts is not None else "attention windows"
        yield f"policy.path {model.architecture}: {has}, which are tested on CPU hosts only; GPUs run dense models"


def _check_families(job: SettledJob) -> Iterator[str]:
    """Refuse model families that the runtime cannot train or serve."""
    if job.device_kind == "cpu":
        return  # on a CPU host, planner and runtime read models with the same function
    for key, path in job.named_models.items():
        if key == BASE_PATH:
            continue  # the only model that may be quantized (checks/engine_base.py)
        load = load_scalar_base if key in (f"roles.{Role.VALUE}.path", f"roles.{Role.REWARD}.path") else load_model
        try:
            load(Path(path))
        except SpecError as error:
            yield f"{key}: {error.what} ({error.rule})"


def _check_towers(job: SettledJob) -> Iterator[str]:
    """Refuse vision-language models where the language part is not extracted from them."""
    for key, path in job.named_models.items():
        try:
            has_vision = has_vision_tower(Path(path))
        except SpecError:
            continue  # the check that reads the model reports the error
        if has_vision and key != "policy.path":
            yield f"{key}: only the policy can be a vision-language model; {key} takes a language model"
        elif has_vision and job.device_kind == "cuda":
            yield f"{key}: a vision-language policy is tested on CPU hosts only, not on GPUs"


def _check_images(job: SettledJob) -> Iterator[str]:
    """Refuse features that do not support images in prompts."""
    if not job.takes_images:
        return
    asked, training, rollout = "data.image_column", job.training, job.rollout
    if not is_for_images(Path(job.policy.path)):
        yield f"{asked}: images need a policy of {', '.join(WITH_IMAGES)}; other policies take text prompts"
    others = {role for role in job.scored_roles if role not in (Role.REFERENCE, Role.POLICY)} | set(job.roles.paths)
    if others:
        named = ", ".join(sorted(others))
        yield f"{asked}: with images, only the policy and its reference are supported (here also {named})"
    for key, is_asked in {
        "hardware.profile of GPUs": job.device_kind == "cuda",
        "policy.init random": job.policy.init == "random",
        f"algorithm.name {job.algorithm.name}, which generates nothing": not job.has_rollouts,
        "rollout.environment": job.has_turns,
        "training.lora": training.lora is not None,
        "training.ulysses above 1": training.ulysses not in ("auto", 1),
        "training.tp above 1": training.tp not in ("auto", 1),
        "rollout.tp above 1": rollout.tp not in ("auto", 1),
        "rollout.speculative_tokens": bool(rollout.speculative_tokens),
        "rollout.stop with strings": any(isinstance(part, str) for part in rollout.stop),
    }.items():
        if is_asked:
            yield f"{asked}: images are not supported with {key}: remove one of the two"


def _check_trainer(job: SettledJob) -> Iterator[str]:
    training = job.training
    if training.offload_device == "nvme" and training.offloads_optimizer is not False:
        yield "training.offload_device nvme: the runtime offloads to host memory only (training.offload_device=cpu)"
    if job.roles.reference.dtype not in ("auto", training.dtype):
        yield "roles.reference.dtype: the reference must have the policy's dtype (roles.reference.dtype=auto)"
    yield from _check_copied_choices(job)
    if training.lora is not None and EXPERTS in training.lora.target_modules:
        yield "training.lora.target_modules experts: PEFT has no adapters for the stacked tensors of routed experts"


def _check_copied_choices(job: SettledJob) -> Iterator[str]:
    """Refuse router replay for untested architectures, and a teacher's distributions over another vocabulary."""
    policy, key = _load_policy(job), "rollout.replays_experts"
    if policy is not None and job.rollout.replays_experts and policy.architecture not in REPLAYED:
        yield f"{key}: it is tested with {', '.join(REPLAYED)} only ({key}=false)"
    teacher = job.load_role_models().get(Role.TEACHER) if job.algorithm.teacher_top_k else None
    if policy is not None and teacher is not None and policy.vocab_size != teacher.vocab_size:
        yield (
            f"algorithm.teacher_top_k {job.algorithm.teacher_top_k}: the teacher has {teacher.vocab_size} tokens, the "
            f"policy {policy.vocab_size} (algorithm.teacher_top_k=0)"
        )


def _check_gpus(job: SettledJob) -> Iterator[str]:
    hardware, rollout, gpu = job.hardware, job.rollout, job.load_gpu()
    if gpu.kind != "cuda":
        yield f"hardware.profile {gpu.name}: the runtime's engines and transports need CUDA, this GPU is {gpu.kind}"
    named, per_host = find_profile(hardware.profile, where="hardware.profile"), hardware.devices_per_host
    most = getattr(named, "num_gpus", None)
    if most is not None and per_host > most:
        yield f"hardware.num_hosts {hardware.num_hosts}: a {named.name} has {most} GPUs, not {per_host}"
    if hardware.num_devices % hardware.num_hosts:
        yield f"hardware.num_hosts {hardware.num_hosts}: {hardware.num_devices} GPUs do not fill whole hosts"
    if rollout.quantization not in ("none", "auto", "fp8", MXFP4):
        yield (
            f"rollout.quantization {rollout.quantization}: the engine can only quantize to fp8 while loading, and for "
            f"adapters to mxfp4; rollout.base_path=FOLDER takes a 4-bit checkpoint"
        )
    if rollout.speculative_tokens:
        yield "rollout.speculative_tokens: speculative decoding is tested on CPU hosts only, not on GPUs"


def _load_policy(job: SettledJob) -> ModelSpec | None:
    """Load the policy; None if its files are elsewhere, as for a bundle of another machine. Later readers report the
    error.
    """
    try:
        return job.load_model()
    except SpecError:
        return None


def _check_cpu_engine(job: SettledJob) -> Iterator[str]:
    """Refuse shapes for which vLLM has no CPU kernel."""
    model = _load_policy(job)
    if model is None or not job.has_rollouts:
        return
    if model.latent_attention is None and model.head_dim not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        yield f"policy.path: head size {model.head_dim}: vLLM's CPU attention supports head sizes {sizes}"
    if model.experts is not None and model.hidden_size % CPU_EXPERT_MULTIPLE:
        yield (
            f"policy.path: experts with hidden size {model.hidden_size}: vLLM's CPU kernel needs a multiple of "
            f"{CPU_EXPERT_MULTIPLE}"
        )


def _check_cpu_host(job: SettledJob) -> Iterator[str]:
    yield from _check_cpu_engine(job)
    for what, _, rule, way_out in (*check_missing_axes(job), *check_sharded_copies(job)):
        yield f"{what}: {rule} ({way_out})"
    lora = job.training.lora
    if lora is not None and job.placement.sync_content is SyncContent.ADAPTER:
        if job.training.has_packed_base and job.rollout.base_path is None:
            yield "placement.sync_content adapter: the engine would serve the base from before quantization"
        if lora.rank > MAX_ENGINE_LORA_RANK:
            yield f"training.lora.rank {lora.rank}: vLLM supports adapters of at most rank {MAX_ENGINE_LORA_RANK}"


def _check_devices(job: SettledJob, choice: Choice) -> Iterator[str]:
    """Require enough devices, and separate device groups for concurrent generation and training."""
    arrangement, engine = choice.arrangement, choice.engine
    placement, num_processes = arrangement.placement, choice.engines * engine.ranks
    if choice.sync_mode and num_processes > job.hardware.all_devices:
        yield f"{choice.engines} engine(s) of {engine.ranks} rank(s) need {num_processes} devices"
    # on a CPU host async is not an axis of the search, so the stated staleness counts
    is_asked = arrangement.is_async or (job.device_kind == "cpu" and job.placement.max_staleness)
    if is_asked and placement is not Placement.DISAGGREGATED:
        yield "async rollouts (placement.max_staleness) need separate devices for generation"
    if not job.has_engine and placement is not Placement.HYBRID:
        yield f"{job.algorithm.name} has no engine, so only the hybrid placement applies"
    elif not job.has_rollouts and (placement is Placement.COLOCATED or job.placement.max_staleness):
        yield f"{job.algorithm.name} generates nothing, so colocated and async placements do not apply"
    if arrangement.num_training < 1:
        needed = job.hardware.num_devices + 1 - arrangement.num_training
        yield f"disaggregated needs at least {needed} devices: {needed - 1} generate or score, the others train"
    if choice.trainer.offloads_parameters and arrangement.offloaded == "all":
        yield (
            "training.offloads_parameters with placement.offload: permanently offloaded parameters cannot be "
            "offloaded again"
        )


def _check_mini_batches(job: SettledJob, choice: Choice) -> Iterator[str]:
    """Require at least one rollout of a mini-batch for each group of ranks that share a sequence."""
    training, size = choice.arrangement.num_training, job.workload.rollouts_per_mini_batch
    ranks = choice.trainer.ranks_per_sequence
    if training < 1:
        return
    if training % ranks:
        yield f"{ranks} ranks share a sequence (training.ulysses, training.tp), {training} device(s) train"
        return
    if job.num_units_per_mini_batch < training // ranks:
        groups = f"{training // ranks} groups of {ranks} " if ranks > 1 else f"{training} "
        yield f"workload.mini_batch_size {size} gives some of the {groups}training device(s) no rollout"


def _check_gpu_engines(job: SettledJob, choice: Choice) -> Iterator[str]:
    arrangement, engine, hardware = choice.arrangement, choice.engine, job.hardware
    if not choice.sync_mode:
        return
    generating, ranks = arrangement.num_generation, choice.engines * engine.ranks
    if ranks != generating:
        yield (
            f"{choice.engines} engine(s) of {engine.ranks} rank(s) do not use all {generating} generation GPUs: "
            f"rollout.num_engines x rollout.tp must be their number"
        )
    per_host, count = hardware.devices_per_host, arrangement.num_devices
    if count > per_host and count % per_host and hardware.generation is None:
        yield f"{count} of {hardware.num_devices} GPUs do not fill hosts of {per_host}"
    if engine.ranks <= per_host < count and hardware.generation is None:
        for index in range(choice.engines):
            first, last = (count - ranks + index * engine.ranks + rank for rank in (0, engine.ranks - 1))
            if first // per_host != last // per_host:
                gpus = f"GPUs {first} to {last}"
                yield f"engine {index} ({gpus}) would span two hosts: rollout.tp must divide the GPUs of a host"
                break
    if arrangement.placement is Placement.COLOCATED:
        if not job.load_gpu().supports_sleep:
            yield f"colocated: vLLM's sleep mode is not supported on {job.load_gpu().name}"
        elif not engine.sleep_level:
            yield "rollout.sleep_level 0: a colocated engine must sleep (rollout.sleep_level=2, or placement hybrid)"


def _check_gpu_sync(job: SettledJob, choice: Choice) -> Iterator[str]:
    sync_mode, arrangement, lora = choice.sync_mode, choice.arrangement, job.training.lora
    if not sync_mode:
        return
    allowed = SYNC_MODES_ON_SHARED_GPUS if arrangement.shares_devices else SYNC_MODES_ON_SEPARATE_GPUS
    if sync_mode not in allowed:
        where = "shared GPUs" if arrangement.shares_devices else "separate GPUs"
        yield f"placement.transport {sync_mode}: {where} use {' or '.join(allowed[:2])}"
        return
    if sync_mode == "adapter":
        if lora is None:
            yield "placement.sync_content adapter needs training.lora"
        elif lora.rank > MAX_ENGINE_LORA_RANK:
            yield f"training.lora.rank {lora.rank}: vLLM supports adapters of at most rank {MAX_ENGINE_LORA_RANK}"
        return
    # CUDA IPC handles are opened on the device that made them, so every trainer rank sends its own
    needs_each = sync_mode == "cuda_ipc" and arrangement.num_training > 1
    if choice.senders != "auto" and needs_each != (choice.senders == "each"):
        wanted = "each" if needs_each else "one"
        yield f"placement.sync_senders {choice.senders}: transport {sync_mode} needs {wanted}"


def _check_restart(job: SettledJob) -> Iterator[str]:
    """Refuse inputs that a colocated engine on a CPU host cannot start from: it restarts from files in each step."""
    if job.takes_images:
        yield "data.image_column: a colocated engine restarts from files without the vision tower"
    if job.training.lora is not None and job.training.lora.path is not None:
        yield "training.lora.path: a colocated engine on a CPU host starts from the base without the adapter"
    if job.rollout.speculative_tokens:
        yield (
            "rollout.speculative_tokens: on a CPU, a colocated engine restarts in its process, which vLLM "
            "cannot do after speculative decoding (Numba is loaded then)"
        )


def _check_host_sync(job: SettledJob, choice: Choice) -> Iterator[str]:
    sync_mode, place, placement = choice.sync_mode, job.placement, choice.arrangement.placement
    if placement is Placement.COLOCATED:
        yield from _check_restart(job)
    if job.takes_images and choice.engine.tp > 1:
        yield f"rollout.tp {choice.engine.tp}: images need engines with one rank"
    if job.takes_images and choice.trainer.ranks_per_sequence > 1:
        yield "training.ulysses, training.tp: with images, every rank computes its own sequences"
    transport = place.transport if place.transport != "auto" else sync_mode
    content = place.sync_content
    if transport in CUDA_TRANSPORTS:
        yield f"placement.transport {transport} needs CUDA devices, and a CPU host has none"
    if (
        place.sync_senders == "each" and placement is not Placement.COLOCATED
    ):  # a colocated engine restarts instead of receiving weights
        if placement is not Placement.HYBRID or choice.engines * choice.engine.ranks != job.hardware.num_devices:
            yield "placement.sync_senders each: every training device needs an engine rank (hybrid)"
        elif transport not in ("shared_memory", "delta") or content is SyncContent.ADAPTER:
            yield "placement.sync_senders each: needs shared_memory, with full or delta content"
    if content is SyncContent.ADAPTER and job.training.lora is None:
        yield "placement.sync_content adapter needs training.lora"
    is_shared = place.transport == "shared_memory"
    if is_shared and job.hardware.num_hosts > 1:
        yield (
            f"transport shared_memory needs trainer and engine on one host; of {job.hardware.num_hosts} hosts the "
            "first trains and the last generates: use placement.transport gloo (or auto)"
        )
