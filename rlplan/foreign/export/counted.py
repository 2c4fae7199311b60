"""The memory of written settings, counted as `rlplan check` counts a file, compared with what the plan promises.

A stack may take its loss in its own way (OpenRLHF keeps the logits), load a checkpoint in its own type, or add what the
plan does not have. No key of the settings shows it, so the bytes are compared.

In: Settings that say a plan, the plan. Out: Count; CostlierError where they fit less surely than the plan does.
Left out: stacks that say an engine or a trainer alone (vLLM, DeepSpeed).
"""

from rlplan.errors import EmitError, RlplanError
from rlplan.foreign.check import Asked, plan_as_given
from rlplan.foreign.settings import Settings
from rlplan.frameworks.profile import find_release
from rlplan.planner.plan import Plan
from rlplan.records import dataclass
from rlplan.spec.hardware.catalogue import find_profile
from rlplan.spec.hardware.profile import NodeProfile
from rlplan.units import format_bytes

SAME_PEAK = 0.02
"""Part of the plan's peak by which the count of its files may differ without a word."""
LOGITS = "training.logits"


class CostlierError(EmitError):
    """The files fit less surely than the plan."""


@dataclass(frozen=True)
class Count:
    """Bytes of the fullest device, of a plan and of the files that say it. logits: how the stack takes its loss."""

    planned: int
    written: int
    capacity: int
    logits: str
    command: str
    """How the files are counted, as it is typed behind the name of one of them."""

    @property
    def differs(self) -> bool:
        """Whether the files come to more, or less, than the plan, by more than what is passed over."""
        return abs(self.written - self.planned) > SAME_PEAK * self.planned

    def note(self, title: str) -> str:
        """Both figures, for people; empty where they are alike."""
        if not self.differs:
            return ""
        return (
            f"{title} needs {format_bytes(self.written)} of {format_bytes(self.capacity)} on the fullest device, as "
            f"`rlplan check` counts these files ({self.command}); the plan counts {format_bytes(self.planned)}"
        )


def name_hardware(plan: Plan) -> str:
    """A plan's GPUs as they are typed: `8xh100-sxm`, `8xdgx-h100` for eight nodes of eight."""
    hardware = plan.job.hardware
    pools = [(hardware.num_devices, hardware.profile)]
    if hardware.generation is not None:
        pools.append((hardware.generation.num_devices, hardware.generation.profile))
    return " + ".join(f"{_named_count(count, profile)}x{profile}" for count, profile in pools)


def _named_count(num_devices: int, profile: str) -> int:
    node = find_profile(profile, where="hardware.profile")
    return num_devices // node.num_gpus if isinstance(node, NodeProfile) else num_devices


def count_settings(settings: Settings, plan: Plan) -> Count | None:
    """The count of settings that say a plan; None for stacks that say an engine or a trainer alone.

    Raises: CostlierError where they fit less surely than the plan, or cannot be laid out at all.
    """
    table = settings.table
    if not table.trains or plan.is_on_host:
        return None
    hardware, sizes = name_hardware(plan), plan.asked.hardware
    memory = {"memory": sizes.memory, "host_memory": sizes.host_memory}
    overrides = [f"hardware.{key}={value}" for key, value in memory.items() if value is not None]
    if find_release(table.framework) != plan.job.release:
        overrides.append(f"framework={plan.job.framework}")
    where = f"plan of {plan.job.name}, target {table.title} {table.version}"
    rule = "what is written fits as surely as the plan, counted by `rlplan check`"
    try:
        counted = plan_as_given(settings, Asked(hardware, overrides=overrides))
    except RlplanError as error:
        raise CostlierError(
            f"{table.title} has no layout for what is written: {error.what}; {error.rule}",
            where=where,
            rule=rule,
            way_out=error.way_out,
        ) from None
    command = " ".join([f"--hardware {hardware!r}" if " " in hardware else f"--hardware {hardware}", *overrides])
    logits = counted.job.training.logits
    count = Count(plan.binding.num_bytes, counted.binding.num_bytes, counted.binding_capacity, logits, command)
    if counted.fit.rank <= plan.fit.rank:
        return count
    low, high = counted.row_interval()
    raise CostlierError(
        f"{table.title} needs {format_bytes(count.written)} of {format_bytes(count.capacity)} (range "
        f"{format_bytes(low)} to {format_bytes(high)}) on the fullest device for what the plan does in "
        f"{format_bytes(count.planned)}: it {counted.fit.value}",
        where=f"{where}: {LOGITS} = {logits} there, {plan.job.training.logits} in the plan",
        rule=rule,
        way_out=f"plan the job with what it does: {LOGITS}={logits}",
    )
