"""Files of AgileRL's profiling rig: peaks of one generation and one update each, and what the engine left asleep.

In: the parsed file (`tools/memory_profiling/fixtures/*.json` of its branch `memory/profiling-rig`). Out: points.
Left out: the rig's own fits, which stand in the same file.
"""

from typing import Any

from rlplan.accuracy.points import Lenient, Measured, MeasuredPoint
from rlplan.spec.base import validate
from rlplan.units import GIB

KINDS = {"training": "train_peak", "generation": "rollout_peak"}
"""The rig's words for a phase."""


class _Device(Lenient):
    name: str


class _Phase(Lenient):
    device_peak_bytes: float
    """As NVML shows it."""
    knobs: dict[str, Any]
    phase: str
    sleeping_baseline_bytes: float | None = None
    """What the engine left before an update."""


class RigFile(Lenient):
    """One model on one GPU."""

    model_id: str
    device: _Device
    framework_versions: dict[str, str]
    measured: tuple[_Phase, ...]


def is_rig(data: object) -> bool:
    """Whether parsed JSON is such a file."""
    return isinstance(data, dict) and {"model_id", "device", "framework_versions", "measured"} <= data.keys()


def points_of_rig(data: dict[str, Any], *, file: str) -> tuple[MeasuredPoint, ...]:
    """A point for each phase, and one for each engine asleep. Raises: SpecError where the file is broken."""
    rig = validate(
        RigFile, data, file=file, way_out="take the file as AgileRL's tools/memory_profiling/sweep.py wrote it"
    )
    points = []
    for number, phase in enumerate(rig.measured):
        settings = _convert_settings(phase, rig.framework_versions)
        asleep = phase.sleeping_baseline_bytes
        if asleep:
            points.append(_make_point(rig, number, "sleeping_engine_residual", asleep, settings))
            settings["sleeping_engine_residual_gib"] = asleep / GIB
        if phase.phase in KINDS:
            points.append(_make_point(rig, number, KINDS[phase.phase], phase.device_peak_bytes, settings))
    return tuple(points)


def _make_point(rig: RigFile, number: int, kind: str, size: float, settings: dict[str, Any]) -> MeasuredPoint:
    return MeasuredPoint(
        id=f"{rig.model_id}@{rig.device.name}:{number}:{kind}",
        kind=kind,
        model=rig.model_id,
        gpu=f"1x {rig.device.name}",
        settings=settings,
        measured=Measured(value=size / GIB, unit="GiB device used (NVML peak)"),
        source="AgileRL tools/memory_profiling",
        reliability="A",
    )


def _convert_settings(phase: _Phase, versions: dict[str, str]) -> dict[str, Any]:
    """A phase's knobs in the words that predictors read; what the rig fixes for all is said too."""
    knobs = phase.knobs
    rows, seq = knobs.get("group_size", 1) * knobs.get("n_prompts", 1), knobs.get("seq_len", 0)
    return {
        "framework": f"AgileRL {versions.get('agilerl', '')}, trainer under colocated vLLM {versions.get('vllm', '')}",
        "algo": knobs.get("algorithm", "grpo"),
        "seq": seq,
        "prompt": max(seq // 4, 8),
        "micro_batch": knobs.get("micro_batch"),
        "micro_batch_effective": min(knobs.get("micro_batch", rows), rows),
        "group_size": knobs.get("group_size"),
        "n_prompts": knobs.get("n_prompts", 1),
        "lora_rank": knobs.get("lora_rank"),
        "lora_targets": knobs.get("lora_target_modules", "all-linear"),
        "lora_scope": knobs.get("lora_target_scope") or None,
        "adapters": "policy + reference adapter, fp32",
        "base_dtype": "bf16",
        "quant": knobs.get("quantization", "none"),
        "gradient_checkpointing": True,
        "attention": {"auto": "sdpa"}.get(knobs.get("attn_implementation", "auto"), knobs.get("attn_implementation")),
        "optimizer": "AdamW on adapters",
        "transformers": versions.get("transformers", ""),
        "gpu_memory_utilization": knobs.get("gpu_memory_utilization"),
    }
