"""ExperienceBuffer: finished groups and their policy versions, until a step takes them.

In: finished groups. Out: the groups with the lowest numbers; the numbers of groups that became too stale, which are
generated again.
On-policy training is a staleness bound of 0. Groups beyond `max_in_memory` are spilled to disk, the newest first.
Left out: which prompts may start (simulate/staleness.py), and dynamic sampling (groups.py).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rlplan.errors import SpecError
from rlplan.runtime.rollout.experience import FinishedRequest
from rlplan.runtime.run_folder.disk_errors import writing_file

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class BufferedGroup:
    """The finished rollouts of one prompt."""

    number: int
    """Number of the prompt, from 0."""

    version: int
    """Policy version when the group was submitted; no token is older."""

    finished: FinishedRequest


class ExperienceBuffer:
    """See the module docstring. Not thread-safe.

    max_staleness: versions that a taken group may be behind. capacity: maximum number of groups; None for no limit.
    max_in_memory: maximum number of groups in memory; None for no limit. Others are written into `folder`.
    """

    def __init__(
        self,
        max_staleness: int,
        capacity: int | None = None,
        max_in_memory: int | None = None,
        folder: Path | None = None,
    ) -> None:
        assert max_in_memory is None or folder is not None, "groups beyond max_in_memory need a folder"
        self.max_staleness, self.capacity = max_staleness, capacity
        self.max_in_memory, self.folder = max_in_memory, folder
        self._groups: dict[int, BufferedGroup] = {}
        self._spilled: dict[int, tuple[int, Path]] = {}
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._groups) + len(self._spilled)

    def would_be_full(self, num_open: int) -> bool:
        """Whether the buffered groups and `num_open` running ones leave no room for another."""
        return self.capacity is not None and len(self) + num_open >= self.capacity

    def add(self, group: BufferedGroup) -> None:
        """Add a finished group; spill the newest groups to disk if there are too many in memory."""
        assert group.number not in self._groups, f"group {group.number} is in the buffer"
        assert group.number not in self._spilled, f"group {group.number} is in the buffer"
        self._groups[group.number] = group
        most = self.max_in_memory
        while most is not None and len(self._groups) > most:
            self._spill(self._groups.pop(max(self._groups)))  # the newest group is taken last

    def groups(self) -> list[BufferedGroup]:
        """All groups by number; they stay in the buffer."""
        spilled = [_read(path) for _, path in self._spilled.values()]
        return sorted([*self._groups.values(), *spilled], key=lambda group: group.number)

    def versions_after(self, count: int) -> list[int]:
        """Policy versions of the groups that remain after taking `count`."""
        return [self._find_version(number) for number in sorted([*self._groups, *self._spilled])[count:]]

    def evict_late(self, version: int, num_per_version: int, others: Sequence[int] = ()) -> list[int]:
        """Drop the groups that will be too stale when they are taken, and return their numbers.

        num_per_version: groups that are trained under each version, from `version` on. others: numbers of groups
        outside the buffer that will be taken too.
        """
        buffered = {*self._groups, *self._spilled}
        in_order = sorted(buffered.union(others))
        trained_under = {number: version + place // num_per_version for place, number in enumerate(in_order)}
        ages = {number: trained_under[number] - self._find_version(number) for number in sorted(buffered)}
        late = [number for number, age in ages.items() if age > self.max_staleness]
        for number in late:
            self._remove(number)
        self.num_evicted += len(late)
        return late

    def take(self, count: int) -> list[BufferedGroup]:
        """Remove and return the `count` groups with the lowest numbers, or all if there are fewer."""
        return [self._remove(number) for number in sorted([*self._groups, *self._spilled])[:count]]

    def state(self) -> dict[str, Any]:
        """All groups as JSON, for a checkpoint."""
        groups = [asdict(group) for group in self.groups()]
        return {"schema_version": STATE_VERSION, "num_evicted": self.num_evicted, "groups": groups}

    def restore(self, state: dict[str, Any]) -> None:
        """Replace the groups by a saved state. Raises: SpecError for another version, ValueError for malformed data."""
        groups = _parse_groups(state)
        self.close()
        self.num_evicted = int(state.get("num_evicted", 0))
        for group in groups:
            self.add(group)

    def close(self) -> None:
        for number in [*self._groups, *self._spilled]:
            self._remove(number)

    def _find_version(self, number: int) -> int:
        return self._groups[number].version if number in self._groups else self._spilled[number][0]

    def _remove(self, number: int) -> BufferedGroup:
        if number in self._groups:
            return self._groups.pop(number)
        _, path = self._spilled.pop(number)
        group = _read(path)
        path.unlink()
        return group

    def _spill(self, group: BufferedGroup) -> None:
        """Write a group to disk atomically."""
        assert self.folder is not None
        path = self.folder / f"group-{group.number:09d}.json"
        partial = path.with_suffix(".part")
        text = json.dumps(asdict(group)).encode()
        with writing_file(path, len(text), "raise placement.max_groups_in_memory"):
            self.folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(text)
            partial.replace(path)
        self._spilled[group.number] = (group.version, path)


_GROUP = TypeAdapter(BufferedGroup)


def list_buffered_prompts(state: dict[str, Any]) -> list[int]:
    """Numbers of the prompts whose groups are in a saved state. Raises: the errors of `ExperienceBuffer.restore`."""
    return [group.number for group in _parse_groups(state)]


def _parse_groups(state: dict[str, Any]) -> list[BufferedGroup]:
    if state.get("schema_version") != STATE_VERSION:
        raise SpecError(
            f"a buffer of version {state.get('schema_version')}",
            where="checkpoint: buffer",
            rule=f"version {STATE_VERSION}",
            way_out="resume with the rlplan that wrote the checkpoint",
        )
    return [_GROUP.validate_python(group) for group in state.get("groups", ())]


def _read(path: Path) -> BufferedGroup:
    return _GROUP.validate_python(json.loads(path.read_text("utf-8")))
