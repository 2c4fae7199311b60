"""Hardware as people type it: `8xH100`, `2 nodes of 8 h100`, `a 4090`, `p5.48xlarge`, `cpu`.

In: text. Out: groups of GPUs with their number and hosts, and what had to be assumed. Left out: the slow link between
groups (files/job_forms.py), names of GPUs (names.py).

One expression describes a group, so that it is recognised alone and inside a sentence (spec/typed.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlplan.errors import SpecError
from rlplan.spec.base import read_json, shorten_value
from rlplan.spec.hardware.catalogue import (
    SHORT_NAMES,
    find_profile,
    find_usual_node,
    get_gpu,
    list_gpu_names,
    profile_folder,
    profile_paths,
)
from rlplan.spec.hardware.profile import NodeProfile
from rlplan.units import GIB

MAX_POOLS = 2
"""Limit on groups of GPUs of different kinds: one that trains and one that generates."""
MAX_GPUS = 999_999
USUAL = "8xH100"
"""GPUs that an error suggests where none are named."""
NUMBERS = {"a": 1, "an": 1, "one": 1, "single": 1, "my": 1, "two": 2, "dual": 2, "three": 3, "four": 4, "quad": 4}
PARTS = {"half": 2, "1/2": 2, "0.5": 2, "third": 3, "1/3": 3, "quarter": 4, "1/4": 4, "0.25": 4}
"""Parts of a GPU, by their divisor."""
NUMBERS |= {"six": 6, "eight": 8, "sixteen": 16, "thirty-two": 32, "sixty-four": 64}
MOST_PER_HOST = 8
"""Most GPUs of a usual host. A larger number before a number of nodes is the total: `8xH100, 2 nodes` and `16xH100, 2
nodes` are both sixteen GPUs."""
_PLAIN = re.compile(r"(?P<first>\d{1,3})x(?P<name>[a-z][\w-]*)")
"""A number and a name, which need no other expression. A number has at most three digits, since four may name a GPU:
`4090xh100` is refused."""
_PARTS = ("hosts", "outer", "first", "word", "inner", "name", "last", "plural", "joint", "after")
"""Groups of the expression of one group of GPUs."""
_VARIANT = re.compile(r"[\s-]*(?:\b|(?<=\d))(ti|super)\b")
SIZED = re.compile(
    r"(?<![\w.])"
    r"(?:(?P<count>\d{1,4}|an?|one|two|four|eight)\s*x?\s+|(?P<times>\d{1,4})\s*x\s*)?"
    r"(?P<size>\d{1,3})\s*(?:gi?b?|gig\w*)\b"
    r"(?:\s*(?:of\s+)?(?:v?ram|memory|gpus?|cards?))*"
)
"""GPUs that are only named by their memory: `24 GB`, `4 x 24GB`, `an 80gb card`."""
_COUNT = r"(?<![\w.-])(?:\d+\s*x?\s*)?"
_NO_KIND = re.compile(
    r"(?<![\w.])\d+\s*x?\s*gpus?\b|(?<![\w.-])\d+\s?x(?!\w)|(?<!\w)\d+x[a-z]\w*|(?<![\w.-])(?:rtx|gtx)\s?\d+"
)
"""GPUs whose kind is missing or unknown."""
SAME_MEMORY = 0.15
"""Largest relative difference of a typed memory size and that of the profile: marketing GB against GiB."""


@dataclass(frozen=True)
class TypedGpus:
    """One group of GPUs."""

    num_gpus: int
    profile: str
    """Profile of the GPU, or of the node that was named."""
    num_hosts: int | None = None
    """Hosts that were named; None: full nodes."""
    assumed: str = ""
    """The part that the text leaves open; empty if it says everything."""

    @property
    def keys(self) -> dict[str, Any]:
        """The group as keys of `hardware:`."""
        hosts = {} if self.num_hosts is None else {"num_hosts": self.num_hosts}
        return {"profile": self.profile, "num_devices": self.num_gpus, **hosts}


@cache
def load_machines() -> dict[str, Any]:
    """Rented machines by name, words for a CPU host, and words for hardware without a profile."""
    data: dict[str, Any] = read_json(profile_folder() / "machines.json", "the machines")
    return data


@cache
def _compile_group(names: frozenset[str], gpus: frozenset[str]) -> re.Pattern[str]:
    """The expression of one group. names: of all profiles; gpus: of those that are no nodes."""
    from rlplan.spec.hardware.names import NO_CHOICE, VARIANTS, VENDORS, find_bases

    whole = sorted(
        {*names, *SHORT_NAMES, *load_machines()["machines"]} - {"cpu-host"}, key=lambda name: (-len(name), name)
    )
    exact = "|".join(re.escape(name).replace(r"\-", r"[\s_-]*") for name in whole)
    bases = "|".join(sorted((re.escape(base) for base in find_bases(gpus)), key=len, reverse=True))
    memory, extra = (
        r"(?:\d{2,3}\s*gi?b?(?!\w)|(?<=-)(?:16|32|40|48|80|96)(?!\w))",
        rf"(?!tensor\W+parallel)(?:{VARIANTS}|{NO_CHOICE})\b",
    )
    after = rf"(?:[\s_-]*\(?(?:{memory}|{extra})\)?)*"
    structured = rf"(?:{memory}\s+)?(?:(?:{VENDORS})[\s_-]*)*(?:{bases})s?(?=x\d|[^\w.]|$){after}"
    name = rf"(?:standard_)?(?:(?:nvidia|amd|geforce)[\s-]+)?(?:(?:{exact})s?{after}|{structured})"
    count = rf"(?:\d{{1,6}}|{'|'.join(NUMBERS)})"
    hosts = r"(?:nodes?|hosts?|machines?|servers?|box(?:es)?|instances?)"
    return re.compile(
        rf"(?<![\w.])(?:(?P<hosts>{count})\s*(?:x\s*)?{hosts}\s*(?:\b(?:of|with|x|each|having)\b|[x,:])?\s*)?"
        rf"(?:(?P<outer>{count})(?:\s*x\s*(?=\d+\s*x?\s*(?!gi?b)[a-z])|"
        rf"\s+(?=\d+\s*x?\s*[a-z][\w -]{{0,20}}\bnodes\b)))?"
        rf"(?:(?P<first>{count})(?:\s*x\s*|\s+(?:gpus?\s*\(?\s*(?:of\s+)?)?|(?<=\d)(?=[a-z])))?"
        rf"(?:(?P<word>node|host|machine|server)s?\s+(?:of|with)\s+(?:(?P<inner>{count})\s*x?\s*)?)?"
        rf"(?P<name>{name})(?=\s*x\s*\d|[^\w.-]|$)"
        rf"(?:(?:\s*(?:x|:|cluster\s+of)\s*|(?(first)(?!)|\s+(?=[1-9]$)))"
        rf"(?P<last>\d{{1,6}})(?![\w.]|\s*(?:x\s*)?{hosts}))?"
        rf"(?:\s*(?:gpus?|cards?))?\)?"
        rf"(?:\s*(?P<plural>{hosts}))?"
        rf"(?:\s*(?P<joint>on|over|across|in|,|\(|x|/)?\s*(?P<after>{count})\s*(?:x\s*)?{hosts}\)?)?(?:\s+each\b)?",
        re.IGNORECASE,
    )


def _get_expression() -> re.Pattern[str]:
    return _compile_group(frozenset(profile_paths()), frozenset(list_gpu_names()))


def normalize(text: str) -> str:
    """Lowercase text with plain signs: `8*H100` becomes `8xh100`."""
    text = text.lower().replace("\u00d7", "x").replace("*", "x").replace("\u2011", "-").replace("\u2013", "-")
    text = re.sub(r"\b\dg\.(?=\d+gb\b)", "", text)  # a slice of MIG, 3g.40gb, counts by its memory
    return re.sub(r"\s+", " ", text).strip()


def find_group(text: str) -> re.Match[str] | None:
    """The first group of GPUs in a normalized text; None if there is none."""
    return _get_expression().search(text)


def find_inexact_group(text: str) -> re.Match[str] | None:
    """GPUs that are not named by a profile: without one, by their memory, by a number alone, or misspelt."""
    match = _compile_unprofiled().search(text) or SIZED.search(text) or _NO_KIND.search(text)
    return match or next(
        filter(_is_misspelt_gpu, re.finditer(rf"{_COUNT}[a-z]{{1,2}}\d{{2,4}}[a-z]?(?!\w)", text)), None
    )


@cache
def _compile_unprofiled() -> re.Pattern[str]:
    """Hardware without a profile, with all its words: `mac studio m3 ultra`."""
    words = "|".join(re.escape(word) for names in load_machines()["unprofiled"].values() for word in names)
    name = rf"(?:{words})(?:\s(?:max|pro|ultra|air|ti|super|v\d\w?))?"
    return re.compile(rf"{_COUNT}{name}(?:\s{name})*(?![\w.-])")


def _is_misspelt_gpu(match: re.Match[str]) -> bool:
    """Whether a word is no GPU and no part of a model's name, but is similar to a GPU."""
    from rlplan.spec.hardware.names import find_near_names
    from rlplan.spec.models.names import list_words

    word = re.sub(r"^\d+\s*x?\s*", "", match[0])
    return word not in list_words() and bool(find_near_names(word, SHORT_NAMES))


def read_group(match: Mapping[str, str | None], text: str, *, where: str) -> TypedGpus:
    """The group whose parts were matched in `text`. Raises: SpecError for a count of 0 or more than MAX_GPUS."""
    name, numbers = (
        match["name"] or "",
        {key: _read_number(match[key]) for key in ("hosts", "outer", "first", "inner", "last", "after")},
    )
    profile, per_machine = _find_machine(name, where)
    hosts = numbers["hosts"] or numbers["outer"] or numbers["after"]
    count = numbers["inner"] or numbers["first"] or numbers["last"]
    if match["word"] and numbers["first"]:  # `2 nodes with 8 h100` without the plural
        hosts, count = numbers["first"], numbers["inner"]
    assumed = _note_variant(name, profile)
    is_plural = (match["plural"] or "").endswith("s")
    if match["plural"] and hosts is None and (is_plural or count in (None, 1)):
        hosts, count = count or 1, None
    if hosts is not None and count is None and per_machine is None:
        node = find_usual_node(get_gpu(profile, where=where))
        count = node.num_gpus if node else 8
        assumed = assumed or f"{count} GPUs per node"
    if count is None and hosts is None and per_machine is None:
        assumed = assumed or f"one {profile}; write 8x{name} for eight"
    elif count is None and hosts is None and per_machine:
        count, whole = _count_rack(profile, per_machine)
        assumed = assumed or whole
    total = (count if count is not None else 1) * (per_machine or 1)
    is_total = numbers["after"] is not None and count is not None and match["joint"] != "x"
    if hosts is not None and not (is_total and (match["joint"] != "," or total > MOST_PER_HOST)):
        total *= hosts
    if not 1 <= total <= MAX_GPUS or 0 in numbers.values():
        raise SpecError(
            f"'{shorten_value(text)[1:-1]}' names no GPUs, or too many",
            where=where,
            rule=f"from 1 to {MAX_GPUS} GPUs",
            way_out=f"write {USUAL}",
        )
    is_spread = hosts is not None and hosts > 1 and per_machine is None
    return TypedGpus(total, profile, hosts if is_spread else None, assumed)


def _count_rack(profile: str, per_machine: int) -> tuple[int, str]:
    """Machines of a rack that is named without a number, such as `gb200 nvl72`, and a note; (1, "") for other nodes."""
    node = find_profile(profile, where=profile)
    in_rack = node.num_gpus_in_link_domain if isinstance(node, NodeProfile) and "nvl" in profile else None
    if not in_rack or in_rack <= per_machine:
        return 1, ""
    return in_rack // per_machine, f"the whole rack of {in_rack} GPUs; write 1x{profile} for {per_machine} of them"


def _read_number(text: str | None) -> int | None:
    return None if text is None else NUMBERS[text] if text in NUMBERS else int(text)


def _find_machine(name: str, where: str) -> tuple[str, int | None]:
    """Profile of a name, and the GPUs of one machine; None for a GPU by itself."""
    typed = re.sub(r"[\s_]+", "-", name.removeprefix("standard_")).strip("-")
    machines = load_machines()["machines"]
    if typed not in profile_paths() and (machine := machines.get(typed) or machines.get(typed.removesuffix("s"))):
        count, _, inner = machine.partition("x")
        profile = find_profile(inner, where=where)
        return profile.name, int(count) * (profile.num_gpus if isinstance(profile, NodeProfile) else 1)
    profile = find_profile(typed if typed in profile_paths() else _VARIANT.sub("", name), where=where)
    return profile.name, profile.num_gpus if isinstance(profile, NodeProfile) else None


def _note_variant(name: str, profile: str) -> str:
    """The note on a typed variant or memory size that the profile does not have."""
    if (variant := _VARIANT.search(name)) and variant[1] not in profile:
        return f"{profile}, for there is no profile of its variant {variant[1]}"
    if _VARIANT.search(profile) and not variant:
        return f"{profile}, for there is no profile of {name.strip()}"
    sizes = re.findall(r"(\d{2,3})\s*gi?b?(?!\w)|-(40|80)$", name)
    sizes = [first or second for first, second in sizes]
    if not sizes or sizes[0] in profile:
        return ""
    gpu = get_gpu(profile, where=name)
    size = gpu.memory.value / GIB
    if abs(float(sizes[0]) / size - 1) <= SAME_MEMORY:
        return ""
    return f"{gpu.name} with {size:.0f} GiB, not {sizes[0]}; hardware.memory={sizes[0]}GiB limits it"


def parse_pools(text: str, *, where: str, may_assume: bool = False) -> tuple[TypedGpus, ...]:
    """The groups of GPUs in `8xH100`, or in `8xH100 + 8xL40S`, two groups that share no devices.

    may_assume: whether a number of GPUs may be missing. Raises: SpecError for more than MAX_POOLS groups, or an invalid
    one.
    """
    parts = text.split("+")
    if len(parts) > MAX_POOLS:
        raise SpecError(
            f"'{shorten_value(text)[1:-1]}' names {len(parts)} groups of GPUs",
            where=where,
            rule=f"at most {MAX_POOLS}: the first trains, the second generates",
            way_out="leave out all but two, as in 8xh100-sxm + 8xl40s",
        )
    return tuple(_parse_group(part.strip(), where=where, may_assume=may_assume) for part in parts)


def _parse_group(text: str, *, where: str, may_assume: bool) -> TypedGpus:
    words = re.sub(r"^(\D\S*?)[ ,;]\s*(\d{1,3})$", r"\2x\1", normalize(text))  # `h100 8`, `h100,8`
    words = re.sub(r"^(\d{1,3})[,;]\s*(?=[a-z])", r"\1x", words)
    match = _match_plain_group(words) or _match_group(words)
    if match is None:
        if may_assume and (sized := SIZED.fullmatch(words)) and (gpus := _choose_by_memory(sized)):
            return gpus
        raise _refuse_text(text, where)
    group = read_group(match, words, where=where)
    if group.assumed and not may_assume:
        raise SpecError(
            f"'{shorten_value(text)[1:-1]}' leaves open: {group.assumed}",
            where=where,
            rule="a file names the number of GPUs and their kind exactly",
            way_out=f"write {_write_group(group, match['name'] or '')}",
        )
    return group


def _write_group(group: TypedGpus, name: str) -> str:
    """A group as a file names it; one GPU keeps the name that was typed, unless a profile stands in for it."""
    node = find_profile(group.profile, where=name)
    size = node.num_gpus if isinstance(node, NodeProfile) else 1
    return f"{group.num_gpus // size}x{name if group.assumed.startswith('one ') else group.profile}"


def find_part(before: str) -> tuple[str, int]:
    """The words at the end of a text that mean a part of the GPU behind them, and its divisor; ("", 1) without.

    >>> find_part("qwen3 8b on half"), find_part("a quarter of "), find_part("a")
    (('half', 2), ('a quarter of ', 4), ('', 1))
    """
    match = re.search(rf"(?<![\w.])(?:an?\s+)?({'|'.join(map(re.escape, PARTS))})(?:\s+of)?(?:\s+an?)?\s*$", before)
    return (match[0], PARTS[match[1]]) if match else ("", 1)


def _choose_by_memory(match: re.Match[str]) -> TypedGpus | None:
    """The usual GPU of a memory size; None if none has about that size."""
    count, size = _read_number(match["count"] or match["times"]) or 1, int(match["size"])
    for name in load_machines()["usual"]:
        if size and abs(get_gpu(name, where=name).memory.value / GIB / size - 1) <= SAME_MEMORY:
            return TypedGpus(count, name, None, f"a GPU of {size} GB is taken as {name}")
    return None


def _match_plain_group(words: str) -> dict[str, str | None] | None:
    """The parts of a number and a profile, such as `8xh100`. It saves compiling the expression, which takes 20 ms."""
    match = _PLAIN.fullmatch(words)
    if match is None or match["name"] == "cpu-host" or match["name"] not in {*profile_paths(), *SHORT_NAMES}:
        return None
    return dict.fromkeys(_PARTS) | match.groupdict()


def _match_group(words: str) -> dict[str, str | None] | None:
    from rlplan.spec.hardware.names import find_bases

    match = _get_expression().fullmatch(words)
    if match is None or match["first"] in find_bases(list_gpu_names()):  # `4090x3090` could mean two things
        return None
    return match.groupdict()


def _refuse_text(text: str, where: str) -> SpecError:
    """The refusal of text that names no GPUs, with GPUs that can be typed instead."""
    cut, text = shorten_value(text)[1:-1], normalize(text)
    words, known = set(re.findall(r"(?:\d+x(?=[a-z]))?([a-z\d]+)", text)), [*profile_paths(), *SHORT_NAMES]
    for instead, unprofiled in load_machines()["unprofiled"].items():
        if words & set(unprofiled):
            return SpecError(
                f"no profile of '{cut}'",
                where=where,
                rule="rlplan plans for the GPUs of `rlplan profiles list` and for CPU hosts",
                way_out=f"write {instead} for a GPU that you could rent, or cpu for this machine's processor",
            )
    number = re.fullmatch(r"(\d{1,6})\s*(?:x|gpus?|cards?|x\s*gpus?)?", text)
    if number or not text:
        count = max(1, int(number[1])) if number else 8
        return SpecError(
            f"{count} of which GPU?" if number else "no GPUs are named",
            where=where,
            rule="a number, an x and a GPU or a node of GPUs; or cpu-host",
            way_out=f"such as {count}xH100",
        )
    leading = re.match(r"(\d{1,6})\s*x?\s+|(\d{1,6})x", text)
    count = max(1, int(leading[1] or leading[2])) if leading else 1
    name = text[leading.end() :] if leading else text
    from rlplan.spec.hardware.names import find_near_names

    near = [name for name in find_near_names(re.sub(r"\bx?\s*\d{1,2}$", "", name), known) if name != "cpu-host"]
    return SpecError(
        f"'{cut}' names no GPUs",
        where=where,
        rule="COUNTxPROFILE with a GPU or node profile, such as 8xH100; h100:8 and 2 nodes of 8 h100 also work"
        + (f". Did you mean {' or '.join(map(repr, near))}?" if near else ""),
        way_out=f"write {count}x{near[0]}" if near else f"such as {USUAL}; `rlplan profiles list` shows all profiles",
    )


def is_cpu_text(text: str) -> bool:
    """Whether text means a CPU host without a profile of its own: `cpu`, `no gpu`."""
    return normalize(text) in load_machines()["cpu"]


def is_hardware(text: str) -> bool:
    """Whether text names only hardware, one cluster or several with commas.

    >>> is_hardware("8xH100, 2 nodes of 8 a100"), is_hardware("qwen3 8b on 8xH100")
    (True, False)
    """
    parts = [part for cluster in normalize(text).split(",") for part in cluster.split("+")]
    return all(is_cpu_text(part) or _get_expression().fullmatch(part.strip()) for part in parts)


def has_count(text: str) -> bool:
    """Whether text names GPUs with their number.

    >>> has_count("8xH100"), has_count("4090:2"), has_count("H100")
    (True, True, False)
    """
    match = _get_expression().fullmatch(normalize(text))
    return match is not None and any(match[key] for key in ("hosts", "first", "inner", "last", "after"))
