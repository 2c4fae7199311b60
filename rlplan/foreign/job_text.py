"""An imported job as the text of a job file, each key with the foreign one that it came from.

In: Imported and its job. Out: YAML. Left out: the file itself.
"""

import json
from typing import Any

from rlplan.foreign.convert import MEMORY, Imported
from rlplan.foreign.documents import flat
from rlplan.frameworks.rules import word_of
from rlplan.spec.job import JobSpec


def job_text(imported: Imported, job: JobSpec) -> str:
    """The job file. The KV cache is in bytes, which the engine's share of the GPU leaves."""
    table, origins = imported.settings.table, {one.ours: one for one in imported.taken}
    lines = [
        f"# From {imported.settings.file}, as {table.title} {table.version} reads it",
        f"# ({table.repository}@{table.commit[:8]}).",
        "# `default` is upstream's own. What has no counterpart: `rlplan import` lists it.",
        *(f"# Not counted, and can take more memory: {words}" for words in imported.not_counted),
        "schema_version: 2",
        f"name: {imported.data['name']}",
    ]
    data = dict(imported.data)
    if imported.share is not None and job.rollout.kv_cache_memory != "auto":
        data["rollout"] = {**data.get("rollout", {}), MEMORY.partition(".")[2]: job.rollout.kv_cache_memory}
        origins[MEMORY] = imported.share.taken
    for part, values in data.items():
        if isinstance(values, dict):
            lines.append(f"{part}:")
            lines += _lines(values, f"{part}.", 1, origins)
        elif part != "name":
            lines.append(f"{part}: {_text(values)}{_comment(origins.get(part))}")
    return "\n".join(lines) + "\n"


def _lines(values: dict[str, Any], prefix: str, depth: int, origins: dict[str, Any]) -> list[str]:
    found = []
    for key, value in values.items():
        if isinstance(value, dict) and any(f"{prefix}{key}.{inner}" in origins for inner in flat(value)):
            found.append(f"{'  ' * depth}{key}:")
            found += _lines(value, f"{prefix}{key}.", depth + 1, origins)
        else:
            found.append(f"{'  ' * depth}{key}: {_text(value)}{_comment(origins.get(prefix + key))}")
    return found


def _text(value: Any) -> str:
    return json.dumps(value)


def _comment(taken: Any) -> str:
    if taken is None or not taken.key:
        return "" if taken is None or not taken.place else f"  # {taken.place}"
    return f"  # {taken.key} = {word_of(taken.theirs)}" + ("" if taken.place else " (default)")
