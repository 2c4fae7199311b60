"""ExperienceBuffer: finished groups with the policy version that they were begun under, until a step takes them.

In: finished groups. Out: the oldest ones by number; the numbers of those that became too old, to be asked for again.
On-policy is a bound of 0. What goes beyond `max_in_memory` waits on the disk, the newest first.
Left out: which prompts may be begun (simulate/staleness.py), and their variance (groups.py).
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
    number: int
    """The prompt's, from 0."""

    version: int
    """Of the policy that they were begun under: no token of theirs is older."""

    finished: FinishedRequest


class ExperienceBuffer:
    """See the module docstring. Not for several threads at once.

    max_staleness: versions that a taken group may be behind. capacity: groups in all; None: any number. max_in_memory:
    of these; None: any number. The others are written into `folder`.
    """

    def __init__(
        self,
        max_staleness: int,
        capacity: int | None = None,
        max_in_memory: int | None = None,
        folder: Path | None = None,
    ) -> None:
        assert max_in_memory is None or folder is not None, "what goes beyond max_in_memory needs a folder"
        self.max_staleness, self.capacity = max_staleness, capacity
        self.max_in_memory, self.folder = max_in_memory, folder
        self._groups: dict[int, BufferedGroup] = {}
        self._spilled: dict[int, tuple[int, Path]] = {}
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._groups) + len(self._spilled)

    def would_be_full(self, num_open: int) -> bool:
        """Whether what is there and so many groups under way leave no room for another."""
        return self.capacity is not None and len(self) + num_open >= self.capacity

    def add(self, group: BufferedGroup) -> None:
        """Take in a finished group. The newest go to the disk where there are too many in memory."""
        assert group.number not in self._groups, f"group {group.number} is there"
        assert group.number not in self._spilled, f"group {group.number} is there"
        self._groups[group.number] = group
        most = self.max_in_memory
        while most is not None and len(self._groups) > most:
            self._spill(self._groups.pop(max(self._groups)))

    def groups(self) -> list[BufferedGroup]:
        """Everything that is in it, by number; it stays there."""
        spilled = [_read(path) for _, path in self._spilled.values()]
        return sorted([*self._groups.values(), *spilled], key=lambda group: group.number)

    def versions_after(self, count: int) -> list[int]:
        """What the groups that taking `count` would leave there were begun under."""
        return [self._find_version(number) for number in sorted([*self._groups, *self._spilled])[count:]]

    def evict_late(self, version: int, num_per_version: int, others: Sequence[int] = ()) -> list[int]:
        """Drop what will be too old when it is taken, where so many are trained under each version from this one on.

        others: numbers that are not in it and are taken too.
        """
        mine = {*self._groups, *self._spilled}
        trained_under = {n: version + place // num_per_version for place, n in enumerate(sorted(mine.union(others)))}
        ages = {number: trained_under[number] - self._find_version(number) for number in sorted(mine)}
        late = [number for number, age in ages.items() if age > self.max_staleness]
        for number in late:
            self._remove(number)
        self.num_evicted += len(late)
        return late

    def take(self, count: int) -> list[BufferedGroup]:
        """The `count` groups with the lowest numbers, or all where there are fewer."""
        return [self._remove(number) for number in sorted([*self._groups, *self._spilled])[:count]]

    def state(self) -> dict[str, Any]:
        """Everything that is in it, as JSON: for a checkpoint."""
        groups = [asdict(group) for group in self.groups()]
        return {"schema_version": STATE_VERSION, "num_evicted": self.num_evicted, "groups": groups}

    def restore(self, state: dict[str, Any]) -> None:
        """Become what `state` said. Raises: SpecError where that is of another version, ValueError where it is none."""
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
        """Write a group whole or not at all."""
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


def numbers_of(state: dict[str, Any]) -> list[int]:
    """Which prompts' groups are in what `ExperienceBuffer.state` said. Raises: as `restore`."""
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
