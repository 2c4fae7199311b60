"""What a shell completes: ids of models, GPUs, algorithms and keys of a job. Called by typer on Tab.

In: the word so far. Out: words that begin so. Left out: files, which the shell completes itself where nothing comes.
"""

COUNTS = ("1x", "2x", "4x", "8x", "16x", "32x", "64x")
"""Of GPUs, where none is typed yet."""


def models(incomplete: str) -> list[str]:
    """Bundled ids; case matters, as on the hub."""
    from rlplan.spec.models.catalogue import load_catalogue

    return [name for name in load_catalogue() if name.startswith(incomplete)]


def algorithms(incomplete: str) -> list[str]:
    """Names of algorithms."""
    from rlplan.spec.algorithms import ALGORITHMS

    return [name for name in ALGORITHMS if name.startswith(incomplete)]


def gpus(incomplete: str) -> list[str]:
    """`8xh100-sxm` where `8xh` was typed; counts where nothing was."""
    from rlplan.spec.hardware.catalogue import profile_paths

    count, cross, name = incomplete.partition("x")
    if not cross or not count.isdigit():
        return [one for one in (*COUNTS, "cpu-host") if one.startswith(incomplete)]
    return [f"{count}x{one}" for one in profile_paths() if one.startswith(name) and one != "cpu-host"]


def overrides(incomplete: str) -> list[str]:
    """Dotted keys with their `=`; behind it the words that the key may have."""
    from rlplan.spec.job_keys import job_keys

    key, is_whole, value = incomplete.partition("=")
    if not is_whole:
        return [f"{name}=" for name in job_keys() if name.startswith(key)]
    return [f"{key}={word}" for word in job_keys().get(key, ()) if word.startswith(value)]
