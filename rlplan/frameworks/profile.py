"""FrameworkRelease: the passes of a step in one release of a framework, and the tensors that they materialize.

In: a name such as `verl@0.9`, and the profiles `rlplan/frameworks/*.yaml`. Out: a frozen FrameworkRelease. Left out:
the framework's own configuration keys (keys/, read by rlplan/foreign).

A profile lists releases from oldest to newest. An entry states only what changed since the previous one. A release
without an entry is treated as the last entry before it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

from rlplan.errors import did_you_mean
from rlplan.frameworks.rules import Rule
from rlplan.vocabulary import Backend, MemoryKind, Role

FOLDER = Path(__file__).parent
KEYS_FOLDER = FOLDER / "keys"
"""Folder with one file of configuration keys per framework, used by rlplan/foreign."""
NAMES = (
    *("rlplan", "verl", "trl", "openrlhf", "slime", "nemo_rl", "vllm", "tensorrt_llm", "deepspeed"),
    *("miles", "skyrl", "prime_rl", "areal", "roll"),
    *("ms_swift", "megatron_swift", "axolotl", "llama_factory", "deepspeed_chat"),
)
"""Frameworks with a profile."""
LogProbs = Literal["always", "never", "later_updates", "later_updates_or_correction"]


@dataclass(frozen=True)
class ScoredWords:
    """Number of [tokens, vocabulary] tensors that a forward-only pass holds at its peak."""

    in_model_type: int = 0
    """Tensors in the model's type, usually 2 bytes per element."""
    in_fp32: int = 0
    """Tensors in fp32, 4 bytes per element."""

    def bytes_per_word(self, element_bytes: int) -> int:
        """Bytes per token and vocabulary entry.

        >>> ScoredWords(in_model_type=1, in_fp32=1).bytes_per_word(2)
        6
        """
        return self.in_model_type * element_bytes + self.in_fp32 * 4


@dataclass(frozen=True)
class Logits:
    """The vocabulary-sized tensors that a backend's passes materialize."""

    train: str
    """Loss implementation in training, as in `training.logits` (memory/model/logits.py, Loss)."""
    train_given: dict[str, str] = field(default_factory=dict)
    """Loss implementation by algorithm, for algorithms that learn from answers in the data, if it differs."""
    score: ScoredWords | None = None
    """Tensors of a log-prob pass; None: same as the loss."""
    score_with_entropy: ScoredWords | None = None
    """Tensors of a pass that computes log-probs and entropies; None: entropies add nothing."""


@dataclass(frozen=True)
class Step:
    """The passes of a step besides generation and training."""

    policy_log_probs: LogProbs
    """When the trainer recomputes the policy's log-probs of finished rollouts.

    later_updates: if a step has several optimizer steps, or the KL is part of the reward. later_updates_or_correction:
    also if the engine's log-probs are corrected for (`algorithm.importance`)."""
    has_entropy: bool = False
    """Whether that pass also computes entropies."""
    reference: Literal["with_kl", "always"] = "with_kl"
    """When the reference scores: only with a KL coefficient, or in every step."""
    order: tuple[Role, ...] = (Role.POLICY, Role.VALUE, Role.REFERENCE, Role.REWARD, Role.TEACHER)
    """Order of the passes, which run one after another on shared devices."""


@dataclass(frozen=True)
class FrameworkRelease:
    """One release of a framework."""

    name: str
    """Name as in NAMES."""
    title: str
    """Name for display."""
    repository: str
    """Source repository."""
    version: str
    """Release that was read. A release between two that were read is treated as the earlier one."""
    backends: tuple[Backend, ...]
    """Trainers of the framework; the first is the default for dense models."""
    step: Step
    """Passes of a step."""
    logits: Mapping[Backend, Logits]
    """Vocabulary-sized tensors by backend."""
    date: str = ""
    """Date of the release."""
    head_rows: Literal["all", "responses", "by_loss"] = "all"
    """Tokens to which the head is applied: all tokens of a pass, responses only, or as the loss needs."""
    reference_dtype: Mapping[Backend, Literal["float32", "bfloat16"]] = field(default_factory=dict)
    """Data type of the reference's weights by backend, if it differs from the compute type."""
    sync_bucket: int = 0
    """Bytes of the weight-sync bucket; 0: the machine's default."""
    never_offloaded: Mapping[Backend, tuple[MemoryKind, ...]] = field(default_factory=dict)
    """Kinds of a trained role's memory that stay on the GPU while the role is offloaded, by backend."""
    host_copies: Literal["pinned", "pageable"] = "pinned"
    """Kind of host memory for offloaded roles. Copies to pageable memory are several times slower."""
    host_waits: Literal["none", "layers", "tokens"] = "none"
    """GPU work that the host waits for: each layer, so that its launches hide behind nothing. With `tokens` it also
    reads a value back for each token of a rollout."""
    is_read_only: bool = False
    """Whether rlplan only reads the framework's files and exports no plan to it."""
    engine_version: str = ""
    """vLLM release that this release installs; empty: the newest known one."""
    engine_log_probs: bool = False
    """Whether engines return the log-prob of each sampled token."""
    has_ray_executor: bool = False
    """Whether Ray runs the ranks of a vLLM engine. Such an engine schedules no step ahead."""
    dispatch: Literal["rollouts", "groups"] = "rollouts"
    """Unit that is spread evenly over the engines: single rollouts, or all rollouts of a prompt."""
    balances: Literal["mini_batch", "step", "never"] = "mini_batch"
    """Unit that is spread over data-parallel ranks by tokens: each mini-batch, or a whole step at once, whose
    mini-batches are then uneven."""
    sends_each_tensor: bool = False
    """Whether a weight sync sends each tensor by itself, with a request that names it, instead of buckets."""
    gathers_masters: bool = False
    """Whether FSDP gathers a weight sync in the masters' type. Otherwise tensors are cast to 16 bits first."""
    pads_batches: bool = False
    """Whether one driver process sends every batch to the trainers, padded to the longest prompt and response."""
    runs_eagerly: bool = False
    """Whether engines run without CUDA graphs by default (`enforce_eager`). Plans decide it and do not read this."""
    serves: bool = False
    """Whether it is a standalone engine, which trains nothing and has no step."""
    packs: bool = True
    """Whether a training micro-batch is packed by tokens. Otherwise it has a number of rollouts that divides a rank's
    part of a mini-batch."""
    splits_unevenly: bool = False
    """Whether ranks may have different numbers of a mini-batch's rollouts."""
    scores_in_units_of_training: bool = False
    """Whether scoring micro-batches are sized like training ones: by rollouts, or by packed tokens."""
    rules: tuple[Rule, ...] = ()
    """Allowed values of a job's keys; keys without a rule take every value."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Sources of the statements: files of the repository at this release."""

    @property
    def is_rlplan(self) -> bool:
        """Whether it is rlplan's own runtime."""
        return self.name == "rlplan"

    @property
    def label(self) -> str:
        """The name and release, as `framework` is typed. rlplan's own runtime has no releases.

        >>> find_release("verl").label
        'verl@0.9'
        """
        return self.name if self.is_rlplan else f"{self.name}@{self.version}"

    def choose_backend(self, *, has_experts: bool) -> Backend:
        """The default trainer. Mixtures of experts use Megatron-Core if the framework has it."""
        return "megatron" if has_experts and "megatron" in self.backends else self.backends[0]


def suggest_trainer(backend: Backend) -> str:
    """Overrides that plan a job for a trainer, whatever framework it names.

    >>> suggest_trainer("megatron")
    'framework=verl training.backend=megatron'
    """
    name = next(name for name in ("rlplan", "verl") if backend in find_release(name).backends)
    return "framework=rlplan" if name == "rlplan" else f"framework={name} training.backend={backend}"


class UnknownFrameworkError(ValueError):
    """The label has an unknown framework or an invalid version.

    instead: the nearest valid label.
    """

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(what)
        self.instead = instead


@cache
def find_release(label: str) -> FrameworkRelease:
    """The release that `NAME` or `NAME@VERSION` names: the newest, or the last one not newer than VERSION.

    Raises: UnknownFrameworkError.

    >>> find_release("nemo-rl@0.5.1").version, find_release("verl").is_rlplan
    ('0.5', False)
    """
    return _find_release(*split_label(label))


def split_label(label: str) -> tuple[str, str]:
    """(name as in NAMES, version or "") of a label. Raises: UnknownFrameworkError."""
    word, _, version = label.partition("@")
    name = word.strip().lower().replace("-", "_").replace(" ", "_")
    if name not in NAMES:
        near = "" if name in get_args(Backend) else did_you_mean(name, NAMES)  # a trainer is no framework
        instead = near.split("'")[1] if near else "verl"
        raise UnknownFrameworkError(f"unknown framework {word!r}: {', '.join(NAMES)}.{near}", instead)
    if version and not re.fullmatch(r"v?\d+(\.\d+){0,3}(\.?(a|b|rc|post|dev)\d*)*", version):
        newest = list_versions(name)[-1]
        raise UnknownFrameworkError(f"{version!r} is not a version: write {name}@{newest}, or only {name}", name)
    return name, version.removeprefix("v")


def note_unread_release(label: str) -> str:
    """The note of a plan whose job names a release that was not read; empty if it was read or none is named.

    >>> note_unread_release("verl@0.5.3")
    'framework verl@0.5.3: planned as verl 0.4, the last release before it that was read'
    >>> note_unread_release("trl@0.9"), note_unread_release("verl@v0.9.0")
    ('framework trl@0.9: planned as TRL 0.14, the earliest release that was read', '')
    """
    _, version = split_label(label)
    asked = _as_numbers(version)
    release = find_release(label)
    read = _as_numbers(release.version)
    if release.is_read_only:
        return f"framework {label}: files of {release.title} are read; a plan is not exported to it"
    if not version or asked == read or release.is_rlplan:
        return ""
    which = "the earliest release that was read" if asked < read else "the last release before it that was read"
    return f"framework {label}: planned as {release.title} {release.version}, {which}"


def list_versions(name: str) -> tuple[str, ...]:
    """Releases of a framework that were read, oldest first.

    >>> list_versions("openrlhf")[0]
    '0.5'
    """
    return tuple(str(entry["version"]) for entry in _read_profile(name)["releases"])


@cache
def _find_release(name: str, version: str) -> FrameworkRelease:
    profile = _read_profile(name)
    asked, merged = _as_numbers(version), dict[str, Any]()
    for index, entry in enumerate(profile["releases"]):
        # a version older than the first entry is treated as the first entry
        if index and version and _as_numbers(str(entry["version"])) > asked:
            break
        merged = merge_mappings(merged, entry)
    facts = {"name": name} | {key: value for key, value in profile.items() if key != "releases"} | merged
    facts["backends"] = tuple(facts["backends"])
    step = facts["step"]
    facts["step"] = Step(**step | {"order": tuple(map(Role, step.get("order", Step.order)))})
    kept = facts.get("never_offloaded", {})
    facts["never_offloaded"] = {backend: tuple(map(MemoryKind, kinds)) for backend, kinds in kept.items()}
    facts["logits"] = {backend: _parse_logits(words) for backend, words in facts["logits"].items()}
    listed = (rules for rules in facts.get("rules", ()) if _applies(rules, facts["version"]))
    facts["rules"] = tuple(chain.from_iterable(map(_parse_rules, listed)))
    return FrameworkRelease(**facts)


def _applies(facts: dict[str, Any], version: str) -> bool:
    """Whether an entry of rules holds in a release: from `since` on, and until `before`."""
    numbers = _as_numbers(version)
    is_later = _as_numbers(facts.get("since", "")) <= numbers
    return is_later and ("before" not in facts or numbers < _as_numbers(facts["before"]))


def _parse_rules(facts: dict[str, Any]) -> Iterator[Rule]:
    """The rule of an entry, or one rule for each of its `keys`, which have one value each."""
    shared = {name: value for name, value in facts.items() if name not in ("keys", "since", "before")}
    shared |= {name: tuple(facts[name]) for name in ("only", "searched") if name in facts}
    if "keys" not in facts:
        yield Rule(**shared)
    for key, value in facts.get("keys", {}).items():
        yield Rule(key=key, only=(value,), **shared)


def _parse_logits(facts: dict[str, Any]) -> Logits:
    words: dict[str, Any] = {key: ScoredWords(**facts[key]) for key in ("score", "score_with_entropy") if key in facts}
    return Logits(**(facts | words))


@cache
def _read_profile(name: str) -> dict[str, Any]:
    """The statements of a profile. A wheel also holds each profile as JSON, which loads faster."""
    path = FOLDER / f"{name}.yaml"
    as_json = path.with_suffix(".json")
    profile: dict[str, Any]
    if as_json.is_file():
        profile = json.loads(as_json.read_text("utf-8"))
    else:
        from ruamel.yaml import YAML  # lazy: its import takes as long as a short command

        profile = YAML(typ="safe", pure=True).load(path.read_text("utf-8"))
    return merge_mappings(_read_profile(base), profile) if (base := profile.pop("stands_on", "")) else profile


def merge_mappings(older: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    """Two mappings merged key by key at every depth; values of `newer` take precedence.

    >>> merge_mappings({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"c": 3}, "d": [2]})
    {'a': {'b': 1, 'c': 3}, 'd': [2]}
    """
    merged = dict(older)
    for key, value in newer.items():
        before = merged.get(key)
        merged[key] = merge_mappings(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def _as_numbers(version: str) -> tuple[int, ...]:
    """A version as comparable numbers, without trailing zeros, `.post1` or `rc1`.

    >>> _as_numbers("0.10.0.post1") > _as_numbers("0.9.9"), _as_numbers("0.9.0") == _as_numbers("0.9")
    (True, True)
    """
    numbers = re.match(r"[\d.]*", version.removeprefix("v"))
    text = re.sub(r"(\.0+)+$", "", numbers[0].strip(".")) if numbers else ""
    return tuple(map(int, text.split("."))) if text else ()
