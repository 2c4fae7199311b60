"""Shell completion of model ids, GPUs, algorithms and keys of a job. Typer calls it on Tab.

In: the typed prefix. Out: words with that prefix. Left out: files, which the shell completes itself.
"""

COUNTS = ("1x", "2x", "4x", "8x", "16x", "32x", "64x")
"""Suggested numbers of GPUs."""


def models(incomplete: str) -> list[str]:
    """Bundled model ids. Case matters, as on the Hugging Face Hub."""
    from rlplan.spec.models.catalogue import load_catalogue

    return [name for name in load_catalogue() if name.startswith(incomplete)]


def algorithms(incomplete: str) -> list[str]:
    """Algorithm names."""
    from rlplan.spec.algorithms import ALGORITHMS

    return [name for name in ALGORITHMS if name.startswith(incomplete)]


def gpus(incomplete: str) -> list[str]:
    """GPUs such as `8xh100-sxm` for `8xh`; numbers of GPUs for an empty prefix."""
    from rlplan.spec.hardware.catalogue import profile_paths

    count, cross, name = incomplete.partition("x")
    if not cross or not count.isdigit():
        return [word for word in (*COUNTS, "cpu-host") if word.startswith(incomplete)]
    return [f"{count}x{profile}" for profile in profile_paths() if profile.startswith(name) and profile != "cpu-host"]


def overrides(incomplete: str) -> list[str]:
    """Dotted keys with their `=`; after the `=`, the allowed values."""
    from rlplan.spec.files.job_schema import job_keys

    key, equals, value = incomplete.partition("=")
    if not equals:
        return [f"{name}=" for name in job_keys() if name.startswith(key)]
    return [f"{key}={word}" for word in job_keys().get(key, ()) if word.startswith(value)]
