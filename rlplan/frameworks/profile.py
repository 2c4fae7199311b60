"""FrameworkRelease: what one release of a framework does in a step, and what its passes materialize.

In: a name such as `verl@0.9`, and the profiles `rlplan/frameworks/*.yaml`. Out: a frozen FrameworkRelease.
Left out: the framework's own configuration keys (keys/, read by rlplan/foreign).

A profile lists releases from the oldest to the newest. Each entry states only what changed since the entry before it,
so that a release has the values of the last entry that is not newer than it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from rlplan.errors import did_you_mean
from rlplan.frameworks.rules import Rule
from rlplan.vocabulary import Backend, Role

FOLDER = Path(__file__).parent
KEYS_FOLDER = FOLDER / "keys"
"""One file of configuration keys a stack, which rlplan/foreign reads and writes."""
NAMES = ("rlplan", "verl", "trl", "openrlhf", "slime", "nemo_rl", "vllm", "deepspeed")
"""Frameworks that have a profile."""
LogProbs = Literal["always", "never", "later_updates", "later_updates_or_correction"]


@dataclass(frozen=True)
class ScoredWords:
    """Tensors of [tokens, vocabulary] that a pass without gradient holds at its largest moment."""

    in_model_type: int = 0
    """Of the model's type, mostly 2 bytes an element."""
    in_fp32: int = 0
    """Of 4 bytes an element."""

    def bytes_per_word(self, element_bytes: int) -> int:
        """Bytes of one token and word of the vocabulary.

        >>> ScoredWords(in_model_type=1, in_fp32=1).bytes_per_word(2)
        6
        """
        return self.in_model_type * element_bytes + self.in_fp32 * 4


@dataclass(frozen=True)
class Logits:
    """What a backend's passes materialize of the vocabulary."""

    train: str
    """The loss with gradient, as `training.logits` names it (memory/model/logits.py, Loss)."""
    train_given: dict[str, str] = field(default_factory=dict)
    """The loss of algorithms whose data hold the answers, by the algorithm's name, where it is another."""
    score: ScoredWords | None = None
    """A pass that takes log-probs alone. None where it takes them as the loss does."""
    score_with_entropy: ScoredWords | None = None
    """A pass that takes entropies beside log-probs. None where they add nothing."""


@dataclass(frozen=True)
class Step:
    """Which passes a step has beside generation and training."""

    policy_log_probs: LogProbs
    """When the trainer recomputes the policy's log-probs of a finished rollout.

    later_updates: when a step has several optimizer steps, or the KL is part of the reward.
    later_updates_or_correction: also when the engine's log-probs are corrected for (`algorithm.importance`).
    """
    has_entropy: bool = False
    """Whether that pass takes entropies too."""
    reference: Literal["with_kl", "always"] = "with_kl"
    """When the reference scores: where the job has a KL coefficient, or in every step."""
    order: tuple[Role, ...] = (Role.POLICY, Role.VALUE, Role.REFERENCE, Role.REWARD, Role.TEACHER)
    """The order of the passes, which follow one another on shared devices."""


@dataclass(frozen=True)
class FrameworkRelease:
    """One release of a framework."""

    name: str
    """As NAMES has it."""
    title: str
    """As people write it."""
    repository: str
    version: str
    """The release that was read. Of a release between two that were read, the earlier one."""
    backends: tuple[Backend, ...]
    """Trainers that it has. The first trains dense models unless a job says otherwise."""
    step: Step
    logits: Mapping[Backend, Logits]
    """By backend."""
    date: str = ""
    """The day of the release."""
    head_rows: Literal["all", "responses", "by_loss"] = "all"
    """Tokens that are multiplied with the head: all of a pass, those of the responses, or as the loss needs them."""
    reference_dtype: Mapping[Backend, Literal["float32", "bfloat16"]] = field(default_factory=dict)
    """The type in which a reference's weights are kept, by backend, where it is not that of the passes."""
    sync_bucket: int = 0
    """Bytes of the bucket through which weights pass to the engines; 0 where the machine's default holds."""
    host_copies: Literal["pinned", "pageable"] = "pinned"
    """The host memory to which waiting roles are offloaded. Copies to pageable memory are several times slower."""
    serves: bool = False
    """Whether it is an engine alone, which trains nothing and has no step."""
    packs: bool = True
    """Whether a training pass may hold as many tokens as fit, instead of as many rollouts as divide a rank's part of a
    mini-batch."""
    scores_in_units_of_training: bool = False
    """Whether a scoring pass counts rollouts where training's passes do, and packed tokens where those do."""
    rules: tuple[Rule, ...] = ()
    """Values of a job's keys that it can say and run; keys without a rule take every value."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each statement was read: files of the repository at this release."""

    @property
    def is_rlplan(self) -> bool:
        """Whether it is rlplan's own runtime."""
        return self.name == "rlplan"

    @property
    def label(self) -> str:
        """The name and the release, as `framework` is typed; rlplan's own runtime has no releases.

        >>> find_release("verl").label
        'verl@0.9'
        """
        return self.name if self.is_rlplan else f"{self.name}@{self.version}"

    def backend_for(self, *, has_experts: bool) -> Backend:
        """The trainer where a job leaves it open: for a mixture of experts Megatron-Core where the framework has it."""
        return "megatron" if has_experts and "megatron" in self.backends else self.backends[0]


def switch_to(backend: Backend) -> str:
    """Overrides with which a job is planned for a trainer, whatever framework it names.

    >>> switch_to("megatron")
    'framework=verl training.backend=megatron'
    """
    name = next(name for name in ("rlplan", "verl") if backend in find_release(name).backends)
    return "framework=rlplan" if name == "rlplan" else f"framework={name} training.backend={backend}"


class UnknownFrameworkError(ValueError):
    """The name is no framework's, or its version is no version.

    instead: the nearest label that names a release.
    """

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(what)
        self.instead = instead


@cache
def find_release(label: str) -> FrameworkRelease:
    """The release that `NAME` or `NAME@VERSION` names: the newest, or the last that is not newer than VERSION.

    Raises: UnknownFrameworkError.

    >>> find_release("nemo-rl@0.5.1").version, find_release("verl").is_rlplan
    ('0.5', False)
    """
    return _find_release(*split_label(label))


def split_label(label: str) -> tuple[str, str]:
    """(name as in NAMES, version or nothing) of a label. Raises: UnknownFrameworkError."""
    word, _, version = label.partition("@")
    name = word.strip().lower().replace("-", "_").replace(" ", "_")
    if name not in NAMES:
        near = did_you_mean(name, NAMES)
        instead = near.split("'")[1] if near else "verl"
        raise UnknownFrameworkError(f"no framework is named {word!r}: {', '.join(NAMES)}.{near}", instead)
    if version and not re.fullmatch(r"v?\d+(\.\d+){0,3}(\.?(a|b|rc|post|dev)\d*)*", version):
        newest = known_versions(name)[-1]
        raise UnknownFrameworkError(f"{version!r} is no version: write {name}@{newest}, or {name} alone", name)
    return name, version.removeprefix("v")


def note_unread_release(label: str) -> str:
    """The note of a plan whose job names a release that was not read; empty where it was read or none is named.

    >>> note_unread_release("verl@0.5.3")
    'framework verl@0.5.3: planned as verl 0.4, the last release before it that was read'
    >>> note_unread_release("trl@0.9"), note_unread_release("verl@v0.9.0")
    ('framework trl@0.9: planned as TRL 0.14, the earliest release that was read', '')
    """
    _, version = split_label(label)
    asked = _as_numbers(version)
    release = find_release(label)
    read = _as_numbers(release.version)
    if not version or asked == read or release.is_rlplan:
        return ""
    which = "the earliest release that was read" if asked < read else "the last release before it that was read"
    return f"framework {label}: planned as {release.title} {release.version}, {which}"


def known_versions(name: str) -> tuple[str, ...]:
    """Releases of a framework that were read, the oldest first.

    >>> known_versions("openrlhf")[0]
    '0.5'
    """
    return tuple(str(entry["version"]) for entry in _read_profile(name)["releases"])


@cache
def _find_release(name: str, version: str) -> FrameworkRelease:
    profile = _read_profile(name)
    asked, merged = _as_numbers(version), dict[str, Any]()
    for index, entry in enumerate(profile["releases"]):
        if index and version and _as_numbers(str(entry["version"])) > asked:
            break
        merged = _merged(merged, entry)
    facts = {"name": name} | {key: value for key, value in profile.items() if key != "releases"} | merged
    facts["backends"] = tuple(facts["backends"])
    step = facts["step"]
    facts["step"] = Step(**step | {"order": tuple(map(Role, step.get("order", Step.order)))})
    facts["logits"] = {backend: _logits_of(words) for backend, words in facts["logits"].items()}
    listed = (rules for rules in facts.get("rules", ()) if _is_of(rules, facts["version"]))
    facts["rules"] = tuple(chain.from_iterable(map(_rules_of, listed)))
    return FrameworkRelease(**facts)


def _is_of(facts: dict[str, Any], version: str) -> bool:
    """Whether an entry of rules holds in a release: those with `since` from then on, those with `before` up to then."""
    numbers = _as_numbers(version)
    is_later = _as_numbers(facts.get("since", "")) <= numbers
    return is_later and ("before" not in facts or numbers < _as_numbers(facts["before"]))


def _rules_of(facts: dict[str, Any]) -> Iterator[Rule]:
    """The rule of an entry, or of each of its `keys`, which have one value each."""
    shared = {name: value for name, value in facts.items() if name not in ("keys", "since", "before")}
    shared |= {name: tuple(facts[name]) for name in ("only", "searched") if name in facts}
    if "keys" not in facts:
        yield Rule(**shared)
    for key, value in facts.get("keys", {}).items():
        yield Rule(key=key, only=(value,), **shared)


def _logits_of(facts: dict[str, Any]) -> Logits:
    words: dict[str, Any] = {key: ScoredWords(**facts[key]) for key in ("score", "score_with_entropy") if key in facts}
    return Logits(**(facts | words))


@cache
def _read_profile(name: str) -> dict[str, Any]:
    """The statements of a profile. A wheel holds each as JSON too, made when it is built."""
    path = FOLDER / f"{name}.yaml"
    as_json = path.with_suffix(".json")
    read: dict[str, Any]
    if as_json.is_file():
        read = json.loads(as_json.read_text("utf-8"))
        return read
    from ruamel.yaml import YAML  # its import takes as long as the rest of a short command

    read = YAML(typ="safe", pure=True).load(path.read_text("utf-8"))
    return read


def _merged(older: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    """The statements of two entries, of which the newer one's hold; mappings are merged key by key."""
    both = dict(older)
    for key, value in newer.items():
        before = both.get(key)
        both[key] = _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return both


def _as_numbers(version: str) -> tuple[int, ...]:
    """A version as numbers that can be compared: without zeros at its end, and without `.post1` or `rc1`.

    >>> _as_numbers("0.10.0.post1") > _as_numbers("0.9.9"), _as_numbers("0.9.0") == _as_numbers("0.9")
    (True, True)
    """
    numbers = re.match(r"[\d.]*", version.removeprefix("v"))
    text = re.sub(r"(\.0+)+$", "", numbers[0].strip(".")) if numbers else ""
    return tuple(map(int, text.split("."))) if text else ()
