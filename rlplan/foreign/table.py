"""The mapping table of a stack: the foreign key and the conversion of every job key, for one release.

In: `rlplan/frameworks/keys/*.yaml`, one data file per stack. Out: a frozen Table.
Left out: conversions (convert.py), syntax (shell/script.py, source.py).

A job key has alternative rows in order; the first whose `when` holds and that has a value wins. `when` may ask for
foreign keys and for job keys that stand above. Its values are one value, a list of values, a bound such as `>0`, or `*`
for any value but null.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache, cached_property
from itertools import chain
from typing import Any, Literal

from pydantic import Field, field_validator

from rlplan.errors import did_you_mean
from rlplan.frameworks.profile import KEYS_FOLDER
from rlplan.planner.combinations import Effect
from rlplan.spec.base import Spec, validate
from rlplan.spec.files.yaml import parse_yaml
from rlplan.vocabulary import Role

FOLDER = KEYS_FOLDER
SOURCES = (
    *("areal", "areal_offline", "roll", "roll_offline", "roll_dpo"),
    *("megatron_swift", "megatron_swift_online", "ms_swift", "ms_swift_online", "axolotl", "axolotl_online"),
    *("llama_factory", "deepspeed_chat"),
    *("verl_offline", "verl", "nemo_rl_offline", "nemo_rl", "openrlhf_offline", "openrlhf", "miles", "slime"),
    *("prime_rl", "prime_rl_offline", "prime_rl_trainer", "skyrl_offline", "skyrl"),
    *("trl_given", "trl", "vllm", "deepspeed"),
)
"""Stacks with a table, in the order in which a file is tried."""
WITH_EXPORTS = ("verl", "trl", "openrlhf", "nemo_rl", "slime", "vllm", "deepspeed")
"""Stacks with exports, most used first. Messages name them before stacks that are only read."""
Condition = dict[str, Any]


class Row(Spec):
    """One way in which a stack expresses a job key."""

    key: str = ""
    """The foreign key; empty for a constant `value`."""
    value: Any = None
    """A constant value of the job key."""
    when: Condition = Field(default={})
    """Other keys' values under which the row holds."""
    times: tuple[str, ...] = ()
    """Foreign or job keys that multiply the value, also a constant one."""
    over: tuple[str, ...] = ()
    """Keys that divide the value."""
    minus: tuple[str, ...] = ()
    """Keys that are subtracted; here and below also products `a * b`, and quotients `a / b`, rounded up."""
    plus: tuple[str, ...] = ()
    """Keys that are added, after all other operations."""
    least: tuple[str, ...] = ()
    """Keys whose sum is the smallest value."""
    raised: str = ""
    """The reason in the note where `least` replaces a smaller value."""
    most: tuple[str, ...] = ()
    """Keys whose sum is the largest value."""
    under: str = ""
    """A key that the value must be smaller than, or the row does not hold."""
    aside: tuple[str, ...] = ()
    """Keys of GPUs that the stack uses besides `hardware.num_devices` and that are not counted."""
    part: float = 0
    """Fraction of the foreign value that is the job's, rounded down; 0 for all of it."""
    map: dict[str, Any] | None = None
    """The job's value for each foreign value."""
    otherwise: Any = None
    """The job's value for all other foreign values, with a note; without it they are refused."""
    below: float | None = None
    """Exclusive upper bound of values for which the row holds."""
    above: float | None = None
    """Exclusive lower bound of values for which the row holds."""
    is_only_read: bool = False
    """Whether exports skip the row: another name of a key, a weaker form of it, or an approximation with a note."""
    is_assumed: bool = False
    """Whether the row fills in a value that the stack has no key for, so that an exported plan may differ."""
    written: dict[str, tuple[str, ...]] = Field(default={})
    """Foreign keys that an export writes, each as a product of job keys, where `when` has only a bound."""
    note: str = ""
    """Note for the user where the row is used."""
    refused: str = ""
    """Reason of the refusal where the row holds."""
    way_out: str = ""
    """Way out of that refusal."""
    convert: Literal[
        "", "model", "packed", "mebibytes", "gpu_share", "static_share", "shared_share", "count", "names"
    ] = ""
    """A further conversion.

    `model` finds a model by its name, `packed` reads a weight format from it, `mebibytes` gives bytes. The shares turn
    a fraction of a GPU's memory into bytes of KV cache: of the whole engine (vLLM), of weights and cache (SGLang), or
    of an engine that computes with the trainer's weights (Unsloth).
    `count` counts the words of a list, `names` gives the names of layers.
    """

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that the row reads."""
        terms = (*self.plus, *self.minus, *self.least, *self.most, *self.aside)
        return (
            self.key,
            self.under,
            *self.when,
            *self.times,
            *self.over,
            *(key for term in terms for key in term.split(" ")[::2]),
        )


class Remedy(Spec):
    """A change to try where a configuration does not fit: values to set, or steps from the current value."""

    key: str
    to: tuple[Any, ...] = ()
    step: float = 0
    over: int = 1
    times: int = 1
    least: float = 1
    most: float = 1 << 30
    with_: dict[str, Any] = Field(default={}, alias="with")
    """Keys that change together with it."""
    when: Condition = Field(default={})
    effect: Effect = Effect.NONE
    """Its effect on the experiment."""

    @field_validator("effect", mode="before")
    @classmethod
    def _read_effect(cls, value: Any) -> Any:
        return Effect[value.upper()] if isinstance(value, str) else value


class Required(Spec):
    """Keys that a stack requires beside others, and that no job key corresponds to."""

    keys: dict[str, Any]
    """Values of the keys; `as it is` keeps the current value."""
    when: Condition = Field(default={})


class ReleasedDefault(Spec):
    """A default of other releases that needs more memory, for a key that a file leaves out.

    A script does not name the release that runs it, so its verdict must hold for both.
    """

    key: str
    value: Any
    """The default of those releases."""
    versions: str
    follows: str
    """The key whose value the table's own release uses."""
    ours: str
    """The job key, which an override may set."""
    needs_experts: bool = False
    """Whether the default matters only for a model with experts."""
    when: Condition = Field(default={})


class Fixed(Spec):
    """Upstream's settings that match rlplan's losses and optimizers.

    An export writes those whose upstream default differs.
    """

    keys: dict[str, Any]
    """Values of the keys; a job key as a value stands for the plan's value of it."""
    says: tuple[str, ...] = ()
    """Job keys that these settings express."""
    when: Condition = Field(default={})


class Identity(Spec):
    """How a stack's files and commands are recognised. It stands at the top of a table's file, above `defaults`."""

    title: str
    syntax: Literal["overrides", "flags", "python", "document"]
    """Syntax of its command lines: Hydra's `key=value`, `--key value`, a launcher before the program, or none."""
    entries: tuple[str, ...]
    """Words of a command line that identify the stack; consecutive words where an entry has a space."""
    unread: dict[str, str] = Field(default={})
    """Unsupported programs, and parts of their documents, with rlplan's algorithm and further overrides for them."""
    roots: tuple[str, ...]
    """Keys that identify the stack in a file, or beside its entry on a command line of flags."""
    root_values: tuple[str, ...] = ()
    """Patterns of values that identify the stack as a root does."""
    needs: tuple[str, ...] = ()
    """Keys that a command has besides a root."""
    suffix: str = ""
    """Suffix of its documents, where its keys alone are too common to identify the stack."""

    positional: str = ""
    """The key of a word that stands before all flags."""

    framework_name: str = ""
    """The framework's profile (rlplan/frameworks), where its name is not the table's title."""

    servers: tuple[str, ...] = ()
    """Words of commands that start the stack's engine beside a training."""

    def is_root(self, key: str, value: Any) -> bool:
        """Whether a key, or its value, identifies the stack in a file."""
        is_named = isinstance(value, str) and any(fnmatchcase(value, pattern) for pattern in self.root_values)
        return is_named or any(key == root or key.startswith(root + ".") for root in self.roots)


class Table(Identity):
    """The mapping table of one stack."""

    name: str
    """The name of its file in frameworks/keys, without the suffix."""
    version: str
    repository: str
    commit: str
    """Upstream commit that the table describes."""
    files: tuple[str, ...]
    vllm: str = ""
    """The version of vLLM that the stack requires."""
    in_python: dict[str, str] = Field(default={})
    """Keys of a command line with another name in a Python script, and that name."""
    required: tuple[Required, ...] = ()
    """Keys that must be set where a condition holds."""
    fixed: tuple[Fixed, ...] = ()
    """Settings that change what is learned and have no job key: dropout, a second clip, top-p."""
    stages: dict[str, str] = Field(default={})
    """Keys of the layers of Megatron's `first` and `last` pipeline stage, and of a whole `layout`."""
    trains: bool = False
    """Whether the stack describes a whole experiment: an export must keep everything that changes what is learned."""
    model_files: tuple[str, ...] = ()
    """Upstream's files with a model's shape each; a command must name one."""
    short: dict[str, str] = Field(default={})
    """Keys of flags with one dash."""
    fsdp_by_config: bool = False
    """Whether `fsdp_config` alone turns FSDP on; in transformers `fsdp` does."""
    instead: dict[str, Condition] = Field(default={})
    """Tables of the same stack that read a file in place of this one, where their conditions hold."""
    shipped: dict[str, dict[str, Any]] = Field(default={})
    """Accelerate's keys for files of DeepSpeed and FSDP that the stack ships, by their names without a suffix."""
    refusals: tuple[Row, ...] = ()
    """Settings that decide memory or time and that no job can state: rows with a reason, which convert to nothing."""
    older: dict[str, str] = Field(default={})
    """Current names of keys by their names in earlier versions."""
    serves: bool = False
    """Whether the stack is an engine alone, which is then checked alone."""
    unsaid: tuple[Any, ...] = ()
    """Values that count as not given."""
    has_suffixes: bool = False
    """Whether `16k` is 16,000 and `16K` 16,384."""
    appended: tuple[str, ...] = ()
    """Patterns of keys that upstream's configuration does not list: Hydra accepts them only with `++`."""
    parsed: dict[str, dict[str, str]] = Field(default={})
    """Expressions that find parts of a composite value, by key, and by the part's name or its whole key. The part is
    the one group, or the second group minus the first."""
    of_roles: dict[Role, dict[str, str]] = Field(default={})
    """Prefixes of another role's keys by the policy's prefixes, for roles that share the policy's layout."""
    compared: dict[Role, dict[str, str]] = Field(default={})
    """The same for keys that are only read: by default they follow the policy's."""
    shared_roots: tuple[str, ...] = ()
    """Keys that identify the stack, but not one of its tables."""
    programs: tuple[str, ...] = ()
    """Programs of the stack; the first belongs to this table, the others are not read."""
    own_keys: dict[str, tuple[str, ...]] = Field(default={})
    """Keys that identify one of the programs that share this table."""
    defaults: dict[str, Any]
    presets: dict[str, dict[str, Any]] = Field(default={})
    """Other defaults by the name of a configuration or program, or by a part of a document."""
    rows: dict[str, tuple[Row, ...]]
    without_counterpart: dict[str, tuple[str, ...]]
    uncounted: tuple[str, ...] = ()
    """Patterns of those keys that can need more memory than a plan counts, unless they are false, 0 or empty."""
    released_defaults: tuple[ReleasedDefault, ...] = ()
    remedies: tuple[Remedy, ...] = ()

    @cached_property
    def asked(self) -> frozenset[str]:
        """Foreign and job keys that rows, requirements and remedies ask for."""
        mentioned = [key for row in self.all_rows for key in row.keys]
        extra: list[Fixed | Required] = [*self.fixed, *self.required]
        mentioned += [key for entry in extra for key in (*entry.keys, *entry.when)]
        mentioned += [key for words in self.stages.values() for key in words.split()]
        mentioned += [key for remedy in self.remedies for key in (remedy.key, *remedy.with_, *remedy.when)]
        mentioned += [key for condition in self.instead.values() for key in condition]
        return frozenset(mentioned) - {""}

    @property
    def framework(self) -> str:
        """The framework at the table's release, as a job names it."""
        return f"{get_table_name(self.framework_name or self.title)}@{self.version}"

    @cached_property
    def all_rows(self) -> tuple[Row, ...]:
        """The rows of all job keys, and the refusals."""
        return (*chain.from_iterable(self.rows.values()), *self.refusals)

    @cached_property
    def keys(self) -> frozenset[str]:
        """Every foreign key that is known by name."""
        return (self.asked - self.rows.keys()).union(self.defaults)

    @cached_property
    def parts(self) -> frozenset[str]:
        """Names of parts of composite values that are no keys of upstream."""
        return frozenset(f"{key}.{name}" for key, parts in self.parsed.items() for name in parts if "." not in name)

    def reads_value(self, key: str, value: Any) -> bool:
        """Whether a row has this value of a key as its condition, so that the value is not dropped as null."""
        asked = [row.when[key] for row in self.all_rows if key in row.when]
        return any(value == wanted or (isinstance(wanted, list) and value in wanted) for wanted in asked)

    def knows(self, key: str) -> bool:
        """Whether a key belongs to the stack: by name, or by a pattern of keys without a counterpart."""
        patterns = (pattern for patterns in self.without_counterpart.values() for pattern in patterns)
        return key in self.keys or key in self.in_python or any(fnmatchcase(key, pattern) for pattern in patterns)

    def why_without_counterpart(self, key: str) -> str:
        """The reason why a key has no row."""
        for why, patterns in self.without_counterpart.items():
            if any(fnmatchcase(key, pattern) for pattern in patterns):
                return why
        hint = did_you_mean(key, self.keys)
        return f"not known of {self.title} {self.version}{'.' * bool(hint)}{hint}"


def get_table_name(word: str) -> str:
    """The name of a stack's table.

    >>> get_table_name("NeMo-RL")
    'nemo_rl'
    """
    return word.lower().replace("-", "_")


@cache
def load_table(source: str) -> Table:
    """The table of a stack.

    >>> load_table("verl").rows["workload.max_response_len"][0].key
    'data.max_response_length'
    """
    facts = read_facts(source)
    own, shared = _parse(source).get("defaults", {}), ("defaults", "without_counterpart")
    # rows that replace those of a table below may leave its defaults without a reader
    asked = set(
        _list_words([part for name, part in facts.items() if name not in (*shared, "presets", "older", "parsed")])
    )
    asked |= {word for key, value in facts["defaults"].items() if key in asked for word in _list_words(value)}
    kept = {key: value for key, value in facts["defaults"].items() if key in own or key in asked}
    return validate(Table, facts | {"defaults": kept, "name": source}, file=str(FOLDER / f"{source}.yaml"))


@cache
def load_identity(source: str) -> Identity:
    """How the stack of a table is recognised: a part that is read several times faster than the table.

    >>> load_identity("prime_rl").title, load_identity("prime_rl").suffix
    ('prime-rl', '.toml')
    """
    return validate(Identity, _read_identity(source), file=str(FOLDER / f"{source}.yaml"))


def _read_identity(name: str) -> dict[str, Any]:
    own = _parse(name, "\ndefaults:")
    inherited = [_read_identity(base) for base in _list_bases(own)]
    facts = {key: value for mapping in (*inherited, own) for key, value in mapping.items()}
    return {key: facts[key] for key in Identity.model_fields if key in facts}


def _list_bases(own: Mapping[str, Any]) -> list[str]:
    """The tables that a table stands on; later ones win."""
    bases = own.get("stands_on", [])
    return [bases] if isinstance(bases, str) else bases


@cache
def _parse(name: str, end: str = "\0") -> dict[str, Any]:
    """The data of a file of keys, up to a text that ends it."""
    path = FOLDER / f"{name}.yaml"
    facts = parse_yaml(path.read_text("utf-8").partition(end)[0], where=str(path), what="a mapping table")
    return dict(facts or {})


def read_facts(name: str) -> dict[str, Any]:
    """The raw data of a file of keys, merged with the tables that it extends, whose keys it may rename."""
    own = dict(_parse(name))
    bases, renamed, inherited = _list_bases(own), own.pop("renamed", {}), own.pop("inherits", ["*"])
    own.pop("stands_on", None)
    merged: dict[str, Any] = {}
    for base in bases:
        facts = _rename(read_facts(base), renamed)
        # `inherits` has patterns of job keys
        rows = {ours: row for ours, row in facts["rows"].items() if any(fnmatchcase(ours, key) for key in inherited)}
        merged = _extend(merged, facts | {"rows": rows}) if merged else facts | {"rows": rows}
    return _extend(merged, own) if merged else own


def _rename(facts: Any, prefixes: Mapping[str, str]) -> Any:
    """Facts in which every text that begins with one of the prefixes begins with the new one.

    >>> _rename({"model.lr": ["model.path", "lr"]}, {"model.": "actor."})
    {'actor.lr': ['actor.path', 'lr']}
    """
    if isinstance(facts, dict):
        return {_rename(key, prefixes): _rename(value, prefixes) for key, value in facts.items()}
    if isinstance(facts, list):
        return [_rename(value, prefixes) for value in facts]
    starts = (begin for begin in prefixes if isinstance(facts, str) and facts.startswith(begin))
    begin = next(starts, "")
    return prefixes[begin] + facts.removeprefix(begin) if begin else facts


def _extend(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A table merged with the one that it extends: its hardware rows come first, because shared rows ask for them."""
    rows, inherited = own.get("rows", {}), base.get("rows", {})
    first = {ours: row for ours, row in rows.items() if ours.startswith("hardware.")}
    joined: dict[str, Any] = {"defaults": base.get("defaults", {}) | own.get("defaults", {})}
    left, more = base.get("without_counterpart", {}), own.get("without_counterpart", {})
    joined["without_counterpart"] = {why: [*left.get(why, ()), *more.get(why, ())] for why in (*left, *more)}
    joined |= {name: [*own.get(name, ()), *base.get(name, ())] for name in ("refusals", "uncounted")}
    return base | own | joined | {"rows": first | inherited | rows}


def _list_words(facts: Any) -> Iterator[str]:
    """All words of nested data; of a reference `${key}` the key."""
    if isinstance(facts, str):
        yield from facts.removeprefix("${").removesuffix("}").split()
    for part in [*facts, *facts.values()] if isinstance(facts, dict) else facts if isinstance(facts, list) else ():
        yield from _list_words(part)


@cache
def list_given_trainers() -> frozenset[str]:
    """TRL's trainers that learn from given responses, by the names of its programs.

    >>> sorted(list_given_trainers())
    ['dpo', 'kto', 'reward', 'sft']
    """
    rows = load_table("trl_given").rows["algorithm.name"]
    return frozenset(name for row in rows if row.key == "trainer" for name in row.map or {})
