"""Rates of a GPU with a power limit below its rated power.

In: a GpuProfile, watts. Out: the profile with slower matmuls. Left out: memory and links, whose clocks do not change.
"""

from rlplan.spec.hardware.profile import GpuProfile

STATIC_WATTS = 100
"""Watts that do not depend on the clock: leakage, memory, links. Assumed: an idle H100 draws 70 to 120 W."""


def limit_gpu_power(gpu: GpuProfile, watts: int | None) -> GpuProfile:
    """Return the profile under a power limit; unchanged without a limit, or with one at or above the rated power.

    Counts: matmul rates follow the clock, which falls with the cube root of the dynamic power (P ~ f V^2, V ~ f). On
    Blackwell they fall linearly, as if its voltage were already at the minimum.
    Source: CMOS power. An H100 SXM limited to 500 of 700 W: (400 / 600)^(1/3) = 0.874. A GB300 with 1,400 W is 1.2
    times as fast as a GB200 with 1,200 W and the same peak (docs/lab-notes.md).

    >>> from rlplan.spec.hardware.catalogue import get_gpu
    >>> slow = limit_gpu_power(get_gpu("h100-sxm", where=""), 500)
    >>> round(slow.efficiencies.matmul.value / 0.63, 3)
    0.874
    """
    if watts is None or gpu.power is None or gpu.efficiencies is None or watts >= gpu.power.value:
        return gpu
    dynamic = max(1, watts - STATIC_WATTS) / (gpu.power.value - STATIC_WATTS)
    factor = dynamic if gpu.architecture.startswith("10.") else dynamic ** (1 / 3)
    rates = gpu.efficiencies
    slower = {
        name: share.model_copy(update={"value": share.value * factor})
        for name, share in (("matmul", rates.matmul), ("matmul_8bit", rates.matmul_8bit))
        if share
    }
    return gpu.model_copy(update={"efficiencies": rates.model_copy(update=slower)})
