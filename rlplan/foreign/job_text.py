"""The YAML text of an imported job, each key with a comment that names its foreign key.

In: Imported and its job. Out: YAML. Left out: writing the file.
"""

import json
from typing import Any

from rlplan.foreign.convert import MEMORY, Imported
from rlplan.foreign.documents import flatten_keys
from rlplan.frameworks.rules import format_value
from rlplan.spec.job import JobSpec


def write_job_text(imported: Imported, job: JobSpec) -> str:
    """The text of the job file, with the KV cache in bytes instead of the engine's fraction of the GPU."""
    table, origins = imported.settings.table, {entry.ours: entry for entry in imported.taken}
    lines = [
        f"# From {imported.settings.file}, as {table.title} {table.version} reads it",
        f"# ({table.repository}@{table.commit[:8]}).",
        "# `default` marks upstream's own values. `rlplan import` lists the keys without a counterpart.",
        *(f"# Not counted, may need more memory: {words}" for words in imported.not_counted),
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
            lines += _format_lines(values, f"{part}.", 1, origins)
        elif part != "name":
            lines.append(f"{part}: {_format_value(values)}{_format_comment(origins.get(part))}")
    return "\n".join(lines) + "\n"


def _format_lines(values: dict[str, Any], prefix: str, depth: int, origins: dict[str, Any]) -> list[str]:
    lines = []
    for key, value in values.items():
        if isinstance(value, dict) and any(f"{prefix}{key}.{inner}" in origins for inner in flatten_keys(value)):
            lines.append(f"{'  ' * depth}{key}:")
            lines += _format_lines(value, f"{prefix}{key}.", depth + 1, origins)
        else:
            lines.append(f"{'  ' * depth}{key}: {_format_value(value)}{_format_comment(origins.get(prefix + key))}")
    return lines


def _format_value(value: Any) -> str:
    return json.dumps(value)


def _format_comment(taken: Any) -> str:
    if taken is None or not taken.key:
        return "" if taken is None or not taken.place else f"  # {taken.place}"
    return f"  # {taken.key} = {format_value(taken.theirs)}" + ("" if taken.place else " (default)")
