"""The mapping table: for each of our keys the foreign key that says it, the conversion, and the version it is of.

In: `rlplan/frameworks/keys/*.yaml`, data alone, one file a stack. Out: a frozen Table.
Left out: conversions (convert.py), syntax (shell/script.py, source.py).

A row of ours has alternatives in order: the first whose `when` holds and that has a value is taken. `when` may ask for
foreign keys and for ours that stand above; its values are one value, a list of them, a bound such as `>0`, or `*`,
which is any value but null.
"""

from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

from pydantic import Field

from rlplan.errors import did_you_mean
from rlplan.frameworks.profile import KEYS_FOLDER
from rlplan.spec.base import Spec, validate
from rlplan.spec.files.yaml import parse_yaml
from rlplan.vocabulary import Role

FOLDER = KEYS_FOLDER
SOURCES = ("verl", "nemo_rl", "openrlhf", "slime", "trl_given", "trl", "vllm", "deepspeed")
"""Stacks with a table, in the order in which a file is looked at."""
Condition = dict[str, Any]


class Row(Spec):
    """One way to say a key of ours."""

    key: str = ""
    """Theirs; empty where `value` is what holds."""
    value: Any = None
    """A constant."""
    when: Condition = Field(default={})
    """What else must hold."""
    times: tuple[str, ...] = ()
    """Keys, theirs or ours, that it is multiplied by, also a constant."""
    over: tuple[str, ...] = ()
    """Keys that it is divided by."""
    minus: tuple[str, ...] = ()
    """Keys that are taken off it; here and below also products of keys, `a * b`, and quotients `a / b`, rounded up."""
    plus: tuple[str, ...] = ()
    """Keys that are added to it, after all else."""
    least: tuple[str, ...] = ()
    """Keys whose sum it is never below."""
    raised: str = ""
    """The reason that a note gives where `least` replaces a smaller value."""
    most: tuple[str, ...] = ()
    """Keys whose sum it is never above."""
    under: str = ""
    """A key whose value it must be below to be ours."""
    aside: tuple[str, ...] = ()
    """Of `hardware.num_devices`: GPUs that the stack uses besides and that are not counted, as keys to be summed."""
    part: float = 0
    """The part of it that is ours, rounded down."""
    map: dict[str, Any] | None = None
    """Our value for each of theirs."""
    otherwise: Any = None
    """Our value for all others, with a note; without one they are refused."""
    below: float | None = None
    """Only values below it are ours."""
    above: float | None = None
    """Only values above it are ours."""
    is_only_read: bool = False
    """Whether it is read and never written: another name of another row's key, less than that row asks for, or what
    only comes close to ours, with a note.
    """
    is_assumed: bool = False
    """Whether it fills in what the stack does not say, so that an exported plan may have another value."""
    written: dict[str, tuple[str, ...]] = Field(default={})
    """Their keys that say it, each as a product of ours, where `when` has a bound alone."""
    note: str = ""
    """What is said where it is taken and given."""
    refused: str = ""
    """Why there is no answer where it is taken."""
    way_out: str = ""
    """What answers instead."""
    convert: Literal["", "model", "packed", "mebibytes", "gpu_share", "static_share"] = ""
    """What else is done: a model's name found, the format of its weights by its name, MiB as bytes; a share of a GPU's
    memory as bytes of KV cache, where the share is of all that the engine takes (vLLM) or of weights and cache alone
    (SGLang).
    """

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that it asks for."""
        terms = (*self.plus, *self.minus, *self.least, *self.most, *self.aside)
        return (
            self.key,
            self.under,
            *self.when,
            *self.times,
            *self.over,
            *(key for one in terms for key in one.split(" ")[::2]),
        )


class Remedy(Spec):
    """A change to try where it does not fit: values to set, or steps from what there is."""

    key: str
    to: tuple[Any, ...] = ()
    step: float = 0
    over: int = 1
    times: int = 1
    least: float = 1
    most: float = 1 << 30
    with_: dict[str, Any] = Field(default={}, alias="with")
    """Keys that go with it."""
    when: Condition = Field(default={})


class Required(Spec):
    """Keys that a stack asks for beside others, and that say nothing of ours."""

    keys: dict[str, Any]
    """Their values; `as it is` for the one that holds."""
    when: Condition = Field(default={})


class ReleasedDefault(Spec):
    """A default that other releases have and that takes more memory, of a key that a file leaves out.

    A script does not say the release that runs it, so that its verdict has to hold with both.
    """

    key: str
    value: Any
    """The default of those releases."""
    versions: str
    follows: str
    """The key whose value holds in the table's own version."""
    ours: str
    """The key of ours, which an override may give."""
    needs_experts: bool = False
    """Whether it changes a model with experts alone."""
    when: Condition = Field(default={})


class Fixed(Spec):
    """Upstream's settings that rlplan's losses and optimizers stand for: an export writes them where upstream's default
    is another.
    """

    keys: dict[str, Any]
    """Their values; a key of ours in them stands for the plan's value."""
    says: tuple[str, ...] = ()
    """Keys of ours that these settings say."""
    when: Condition = Field(default={})


class Table(Spec):
    """All that is known of one stack's configuration."""

    title: str
    version: str
    framework_name: str = ""
    """The framework's profile (rlplan/frameworks), where its name is not the table's title."""
    repository: str
    commit: str
    """Of which these facts are."""
    files: tuple[str, ...]
    vllm: str = ""
    """The version of vLLM that it asks for."""
    syntax: Literal["overrides", "flags", "python", "document"]
    """Of its command lines: `key=value`, or `--key value`; `python` has a launcher's flags before the program's, and a
    `document` has no command line.
    """
    entries: tuple[str, ...]
    """Words of a command line by which it is known; several in a row where one has a space."""
    unread: dict[str, str] = Field(default={})
    """Programs of the stack that are not read, and parts of their documents, with the algorithm of ours that they run,
    and what else a job of ours says for them.
    """
    positional: str = ""
    """The key of a word that stands before all flags."""
    in_python: dict[str, str] = Field(default={})
    """Keys of a command line that a Python script says in other words, and these."""
    required: tuple[Required, ...] = ()
    """What has to be given where a condition holds."""
    fixed: tuple[Fixed, ...] = ()
    """Settings that change what is learned and that no key of ours names: dropout, a second clip, top-p."""
    stages: dict[str, str] = Field(default={})
    """Keys of the layers of Megatron's `first` and `last` pipeline stage, and of whole layouts (`layout`), in words."""
    trains: bool = False
    """Whether it says a whole experiment, so that an export is held to everything that changes what is learned."""
    model_files: tuple[str, ...] = ()
    """Files of upstream's with a model's shape each, which a command has to be given."""
    short: dict[str, str] = Field(default={})
    """Flags with one dash, and the keys that they stand for."""
    older: dict[str, str] = Field(default={})
    """Keys as earlier versions have them, and today's."""
    serves: bool = False
    """Whether it says an engine alone, which is then judged alone."""
    unsaid: tuple[Any, ...] = ()
    """Values that mean: not given."""
    has_suffixes: bool = False
    """Whether `16k` is 16,000 and `16K` 16,384."""
    appended: tuple[str, ...] = ()
    """Patterns of keys that upstream's configuration does not list, so that Hydra takes them with `++` alone."""
    of_roles: dict[Role, dict[str, str]] = Field(default={})
    """Beginnings of the policy's keys, and of another role's that say the same of it: it is laid out as the policy."""
    compared: dict[Role, dict[str, str]] = Field(default={})
    """The same of keys that are only read: another role's follow the policy's unless they are given."""
    roots: tuple[str, ...]
    """Keys by which it is known: of a file, and of a command line of flags beside its entry."""
    shared_roots: tuple[str, ...] = ()
    """Keys by which its stack is known, and not which of the stack's tables."""
    programs: tuple[str, ...] = ()
    """Programs of a stack with several: the first is this table's, the others are not read."""
    own_keys: dict[str, tuple[str, ...]] = Field(default={})
    """Keys by which one of the programs that share this table is known."""
    defaults: dict[str, Any]
    presets: dict[str, dict[str, Any]] = Field(default={})
    """Other defaults, by the name of a configuration or of a program, or by a part of a document."""
    rows: dict[str, tuple[Row, ...]]
    without_counterpart: dict[str, tuple[str, ...]]
    released_defaults: tuple[ReleasedDefault, ...] = ()
    remedies: tuple[Remedy, ...] = ()

    @property
    def framework(self) -> str:
        """The framework at the table's release, as a job names it."""
        return f"{table_name(self.framework_name or self.title)}@{self.version}"

    @property
    def keys(self) -> frozenset[str]:
        """Every foreign key that is known by name."""
        rows = (row for alternatives in self.rows.values() for row in alternatives)
        asked = (key for row in rows for key in row.keys)
        fixed = (key for each in self.fixed for key in each.keys)
        stages = (key for words in self.stages.values() for key in words.split())
        changed = (key for remedy in self.remedies for key in (remedy.key, *remedy.with_))
        known = frozenset((*(key for key in asked if key and key not in self.rows), *fixed, *stages))
        return known.union(self.defaults, changed)

    def asks_for(self, key: str, value: Any) -> bool:
        """Whether a row has this value of a key as its condition, so that it says something."""
        rows = (row for alternatives in self.rows.values() for row in alternatives)
        asked = [row.when[key] for row in rows if key in row.when]
        return any(value == one or (isinstance(one, list) and value in one) for one in asked)

    def knows(self, key: str) -> bool:
        """Whether a key is one of the stack's: by name, or by a pattern of those without a counterpart."""
        patterns = (pattern for patterns in self.without_counterpart.values() for pattern in patterns)
        return key in self.keys or key in self.in_python or any(fnmatchcase(key, pattern) for pattern in patterns)

    def why_without_counterpart(self, key: str) -> str:
        """Why a key without a row has none."""
        for why, patterns in self.without_counterpart.items():
            if any(fnmatchcase(key, pattern) for pattern in patterns):
                return why
        hint = did_you_mean(key, self.keys)
        return f"not known of {self.title} {self.version}{'.' * bool(hint)}{hint}"


def table_name(word: str) -> str:
    """A stack's name as its table is called.

    >>> table_name("NeMo-RL")
    'nemo_rl'
    """
    return word.lower().replace("-", "_")


@cache
def load_table(source: str) -> Table:
    """The table of a stack.

    >>> load_table("verl").rows["workload.max_response_len"][0].key
    'data.max_response_length'
    """
    read = read_facts(source)
    if base := read.pop("stands_on", ""):
        read = _on(read_facts(base), read)
    return validate(Table, read, file=str(FOLDER / f"{source}.yaml"))


def read_facts(name: str) -> dict[str, Any]:
    """A file of keys as it stands."""
    path = FOLDER / f"{name}.yaml"
    read: dict[str, Any] = parse_yaml(path.read_text("utf-8"), where=str(path), what="a mapping table")
    return read


def _on(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A table on what it shares with another: rows of hardware first, which the shared ones ask for; then its own."""
    rows = own["rows"]
    first = {ours: row for ours, row in rows.items() if ours.startswith("hardware.")}
    return own | {
        "defaults": base["defaults"] | own["defaults"],
        "rows": first | base["rows"] | rows,
        "without_counterpart": base["without_counterpart"] | own["without_counterpart"],
    }


@cache
def given_trainers() -> frozenset[str]:
    """TRL's trainers whose answers are given, by the names of its programs.

    >>> sorted(given_trainers())
    ['dpo', 'kto', 'reward', 'sft']
    """
    rows = load_table("trl_given").rows["algorithm.name"]
    return frozenset(name for row in rows if row.key == "trainer" for name in row.map or {})
