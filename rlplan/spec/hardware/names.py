"""Names of GPUs as people type them, and the profile that each means.

In: text such as `NVIDIA A100-SXM4-80GB`, `rtx4090` or `6000 Ada`, and the known profiles. Out: a profile's name. Left
out: numbers of GPUs (typed.py), reading profiles (catalogue.py).

A name is split into words. A profile is meant if its name has all words that matter: `a100 pcie` is a100-pcie-80gb,
since words such as NVIDIA, HBM3 or Ampere choose nothing. Among several, the usual one is taken (short_names.json).
"""

import difflib
import re
from collections.abc import Collection, Mapping

VENDORS = r"nvidia|geforce|tesla|quadro|amd|instinct|radeon|rtx|pro|dgx|hgx"
"""Words before the name of a GPU."""
VARIANTS = r"sxm\d?|pro|pcie|nvl|ada|server|workstation|gcd|oam|ti|super|gpus?|cards?|accelerators?"
"""Words after it."""
NO_CHOICE = (
    r"hbm\d?e?|gddr\d\w?|ampere|hopper|lovelace|blackwell|volta|turing|generation|tensor|core|edition|graphics|mig|"
    + VENDORS.replace("|rtx|pro|dgx|hgx", "")
)
"""Words that tell no two profiles apart."""
_NOISE = re.compile(rf"(?:{NO_CHOICE}|gpus?|cards?|accelerators?|oam|workstation)")
_MEMORY = re.compile(r"(\d{2,3})gi?b?")
_BASE = re.compile(r"[a-z]{0,2}\d[a-z\d]*")
_WORDS = re.compile(r"(?:rtx|gtx|dgx|hgx|pro|tesla|geforce)(?=\d|a\d|[hb]\d)|[a-z\d]+")
NEAR = 0.6
"""Least similarity of names that an error suggests."""
MOST_NEAR = 12
"""Similar names among which the first letter decides."""


def split_name(text: str) -> list[str]:
    """Lowercase words of a name; `rtx4090` has two.

    >>> split_name("NVIDIA A100-SXM4-80GB"), split_name("RTX4090"), split_name("dgxH100")
    (['nvidia', 'a100', 'sxm4', '80gb'], ['rtx', '4090'], ['dgx', 'h100'])
    """
    joined = re.sub(r"(\d)\s+(gi?b)\b", r"\1\2", text.lower())
    joined = re.sub(r"-(16|32|40|48|80|96)\b", r"-\1gb", joined)  # A100-40
    return _WORDS.findall(joined)


def find_bases(known: Collection[str]) -> set[str]:
    """Words that name a GPU by themselves, such as `h100` or `4090`.

    >>> sorted(find_bases(["a100-sxm-80gb", "rtx-4070-ti"]))
    ['4070', 'a100']
    """
    return {word for name in known for word in name.split("-") if _BASE.fullmatch(word) and not _MEMORY.fullmatch(word)}


def match_name(text: str, known: Collection[str], usual: Mapping[str, str]) -> str | None:
    """The profile that a name means; None if there is none. usual: profiles by short name.

    >>> match_name("A100 PCIe 40 GB", ["a100-pcie-40gb", "a100-sxm-40gb"], {})
    'a100-pcie-40gb'
    >>> match_name("server", ["rtx-pro-6000-server"], {})
    """
    typed = text.strip().lower().replace("_", "-").replace(" ", "-")
    if typed in known:
        return typed
    words = [word for word in split_name(text) if not _NOISE.fullmatch(word)]
    words = [re.sub(r"^sxm\d$", "sxm", word) for word in words]
    memories = [match[1] for word in words if (match := _MEMORY.fullmatch(word))]
    words = [word for word in words if not _MEMORY.fullmatch(word)]
    words = [re.sub(r"(?<=\d)s$", "", word) if word not in _list_words(known) else word for word in words]
    name = "-".join([*words, *(f"{size}gb" for size in memories)])
    if (chosen := usual.get(name, name)) in known:
        return chosen
    if not find_bases(known) & {*words}:  # `server` or `pro` names no GPU by itself
        return None
    matching = [profile for profile in known if set(words) <= set(profile.split("-"))]
    if not matching and "pro" in words:  # `colab pro a100`
        return match_name(re.sub(r"\bpro\b", "", text.lower()), known, usual)
    sized = [profile for profile in matching if {f"{size}gb" for size in memories} <= set(profile.split("-"))]
    chosen = usual.get("-".join(words), "")
    # the memory of a GPU with one variant needs no word in its name: L40S 48GB
    if not sized and len(memories) == 1 and chosen in matching:
        return chosen
    matching = sized or matching
    # `a100-sxm` has two sizes of memory: the usual A100 decides
    for candidate in (chosen, *(usual.get(word, "") for word in words)):
        if candidate in matching:
            return candidate
    return min(matching, key=lambda profile: (len(profile.split("-")), "sxm" not in profile, profile), default=None)


def _list_words(known: Collection[str]) -> set[str]:
    return {word for name in known for word in name.split("-")}


def find_near_names(text: str, known: Collection[str]) -> list[str]:
    """Known names that are similar, at most three; those with the same first letter come first.

    >>> find_near_names("h1000", ["h100-sxm", "h100", "l4"])
    ['h100', 'h100-sxm']
    >>> find_near_names("b100", ["v100", "b200"])
    ['b200', 'v100']
    """
    typed = "-".join(split_name(text))
    near = difflib.get_close_matches(typed, list(known), n=MOST_NEAR, cutoff=NEAR)
    return sorted(near, key=lambda name: name[:1] != typed[:1])[:3]
