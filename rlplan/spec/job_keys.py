"""The dotted keys of a job, derived from its specs.

In: JobSpec. Out: keys with their allowed words. Left out: what the keys mean (docs/job.md).
"""

from collections.abc import Iterator

from rlplan.spec.base import Spec
from rlplan.spec.job import JobSpec


def job_keys() -> dict[str, tuple[str, ...]]:
    """Every dotted key of a job, with its allowed words if it is an enumeration."""
    return dict(_list_keys(JobSpec, ""))


def _list_keys(spec: type[Spec], prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, field in spec.model_fields.items():
        parts = [*_parts(field.annotation)]
        inner = [part for part in parts if isinstance(part, type) and hasattr(part, "model_fields")]
        if len(inner) == 1:
            yield from _list_keys(inner[0], f"{prefix}{name}.")
        elif not inner:
            words = tuple(part for part in parts if isinstance(part, str))
            yield f"{prefix}{name}", ("true", "false") if bool in parts else words


def _parts(annotation: object) -> Iterator[object]:
    """The types and literal words of an annotation."""
    arguments = getattr(annotation, "__args__", ())
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _parts(argument)
