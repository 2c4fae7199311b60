"""What vLLM's kernel for weights in 4 bits needs of a CPU before its first call.

In: nothing. Out: a process that may use the CPU's tiles, where it has any. Left out: the weights.
"""


def allow_tiles() -> None:
    """Ask the kernel of the system for AMX tiles, once a process: without it their first use ends the process (SIGILL).

    vLLM 0.32 multiplies 4 bits with tiles where the CPU has them, and leaves the asking to oneDNN, which does it only
    where it multiplies with them itself first. Source: kernels/linear/mixed_precision/cpu.py, `_get_isa_hint`.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
