"""Everything that a person types about a job, read by one function: `qwen3 8b grpo on 2 h100 nodes, 16k responses`.

In: words of a command line, of a form or of a Python call. Out: keys of a job, overrides, assumptions. Left out: files
(sources.py), names of models (models/names.py) and of GPUs (hardware/typed.py).

A sentence is read part by part: ids, GPUs, adapters, numbers with units, the algorithm, the framework. Each part is
taken out of the sentence; what is left names the model. What the reader had to guess is in `assumed`, so that every
answer can say it; a job file is exact and has no such guesses.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlplan.errors import HostError, SpecError, did_you_mean
from rlplan.frameworks.profile import UnknownFrameworkError, split_label
from rlplan.spec.algorithms import ALGORITHMS
from rlplan.spec.base import shorten_value
from rlplan.spec.files.job_forms import expand_hardware
from rlplan.spec.hardware.catalogue import find_profile, get_gpu
from rlplan.spec.hardware.profile import NodeProfile
from rlplan.spec.hardware.typed import (
    USUAL,
    find_group,
    find_inexact_group,
    find_part,
    has_count,
    is_cpu_text,
    is_hardware,
    load_machines,
    normalize,
    parse_pools,
)
from rlplan.spec.models.catalogue import find_model, find_model_path
from rlplan.spec.models.names import load_catalogue
from rlplan.spec.parts.workload import WorkloadSpec
from rlplan.spec.typed_words import (
    CHEAPEST,
    COST,
    HOW_MANY,
    LONGEST,
    MONEY,
    POOLS,
    ROLES,
    SPLIT,
    VERSUS,
    WHICH_MODEL,
    compile_numbers,
    find_leaf,
    list_frameworks,
    list_keys,
    load_words,
    read_algorithm,
    search_names,
)
from rlplan.units import MIB, parse_tokens
from rlplan.vocabulary import Dtype

WHERE = "command line"
USUAL_MODEL = "Qwen/Qwen2.5-7B"
"""Model that an error suggests where none is named."""
LORA_RANK = 16
"""Rank of adapters where a question names none. Assumed; it is printed with the answer."""
ONE_CLUSTER = "a question is about one cluster, `rlplan compare` about several; + joins two groups to one"
QLORA = "adapters of rank 16 on a 4-bit base"
GIVEN_KEYS = ("workload.num_samples_per_prompt", "workload.max_response_len")
"""Sizes that algorithms on given answers set themselves (files/job_forms.py)."""
_GAP = " ; "
"""Replacement of a part that was read, so that the words around it are not joined."""
_LORA = re.compile(
    r"(?<![\w])(q?lora|4[\s-]?bit|nf4|peft|adapters?)(?:\s*(?:adapters?|training))?(?:\s*(?:\(|with\s)?\s*(?:of\s)?"
    r"(?:rank|r)?\s*[=:]?\s*(\d{1,4})(?!\w))?\)?|(?<!\w)(rank|lora[\s_-]?r)\s*[=:]?\s*(\d+)"
)
_OVERRIDE = re.compile(r"[\w.+-]+\s*=\s*(?:\S*|[{\[\"'].*)", re.DOTALL)
_URL = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|\bhf:(?://)?")
_ID = re.compile(r"(?<!\S)(?:[.~][\w.~-]*|[A-Za-z][\w.-]+)?/(?=[\w.-]{2})[\w./-]+(?!\S)")
RENTED = "8xh100-sxm,8xa100-sxm-80gb,8xl40s,8xrtx-4090"
"""Clusters that a question for the cheapest way compares."""
MOST_GPUS = 256
"""Most GPUs that a question for their number considers."""


@dataclass
class Reading:
    """The parts of a question that were read so far."""

    keys: dict[str, Any] = field(default_factory=dict)
    """Top-level keys of a job: policy, hardware, algorithm, framework."""
    overrides: list[str] = field(default_factory=list)
    """Overrides `KEY=VALUE` with dotted keys."""
    assumed: list[str] = field(default_factory=list)
    """Assumptions where the question is open, in words."""
    asks_cost: bool = False
    """Whether the question is also for dollars."""

    @property
    def command(self) -> str:
        """The question as a command line that says everything."""
        return shlex.join(self.words)

    @property
    def words(self) -> list[str]:
        """Words of that command line after the verb."""
        names = {"policy": "--model", "algorithm": "--algorithm", "hardware": "--gpus", "framework": "--for"}
        options = [word for key, option in names.items() if key in self.keys for word in (option, self.keys[key])]
        return [*options, *self.overrides]


def read_typed(words: Sequence[str], *, verb: str = "estimate", named: dict[str, str | None] | None = None) -> Reading:
    """Read words without a file. named: values of options, by job key. Raises: SpecError with a corrected command.

    >>> read_typed(["qwen3", "8b", "grpo", "on", "a", "4090"]).words
    ['--model', 'Qwen/Qwen3-8B', '--algorithm', 'grpo', '--gpus', '1xrtx-4090']
    """
    reading = Reading()
    # a quoted sentence may hold overrides, and an override may hold spaces
    words = [part for word in words for part in ([word] if _OVERRIDE.fullmatch(word) else word.split())]
    for place in [place for place, word in enumerate(words[:-1]) if re.fullmatch(r"[a-z_]+(?:\.[a-z_]+)+", word)]:
        if words[place] in list_keys():  # `rollout.tp 4`
            words[place : place + 2] = [f"{words[place]}={words[place + 1]}", ""]
    overrides = list(filter(_OVERRIDE.fullmatch, words))
    rest = " ".join(word for word in words if word not in overrides)
    typed = [(key, value) for key, value in (named or {}).items() if value is not None]
    try:
        for key, value in sorted(typed, key=lambda item: item[0] == "hardware"):
            set_named(reading, key, value)
        for word in overrides:
            add_override(reading, word)
    except SpecError as error:
        if error.where == "--gpus":
            raise _correct_gpus(reading, error, rest, verb) from None
        instead = {"--model": "policy", "--for": "framework"}.get(error.where)
        if instead is None:
            raise
        others = {key: value for key, value in (named or {}).items() if value and key != instead}
        near = re.search(r"(?:--model |framework=)([^\s,]+)", error.way_out)
        whole = Reading({instead: near[1] if near else USUAL_MODEL} | others, reading.overrides)
        _read_sentence(whole, rest, verb)
        whole.keys = {"policy": USUAL_MODEL, "hardware": USUAL} | whole.keys
        way_out = f"rlplan {verb} {whole.command}"
        raise SpecError(error.what, where=error.where, rule=error.rule, way_out=way_out) from None
    _read_sentence(reading, rest, verb)
    reading.asks_cost = bool(COST.search(rest.lower()))
    missing = {"hardware": USUAL, "policy": USUAL_MODEL}
    longest = LONGEST.search(normalize(rest)) if verb == "estimate" else None
    for key in missing if not longest else ():
        if key not in reading.keys and not any(word.startswith(f"{key}.") for word in reading.overrides):
            raise _refuse_open_question(key, Reading(missing | reading.keys, reading.overrides), normalize(rest), verb)
    if longest:
        whole = Reading(missing | reading.keys, reading.overrides)
        raise SpecError(
            f"{longest[0]}: a question for `rlplan solve`",
            where=WHERE,
            rule="an estimate has one value for each key; solve finds the largest one that fits",
            way_out=f"rlplan solve {longest[1]} {whole.command}",
        )
    return reading


def _refuse_open_question(key: str, whole: Reading, text: str, verb: str) -> SpecError:
    """The error that asks for missing GPUs or a missing model. whole: the question completed with the usual ones. text:
    the question as typed."""
    way_out = f"rlplan {verb} {whole.command}"
    if key == "hardware" and CHEAPEST.search(text) and verb == "estimate":
        sized = Reading({name: value for name, value in whole.keys.items() if name not in (key, "framework")})
        way_out = shlex.join(["rlplan", "compare", *sized.words, *whole.overrides, "--gpus", RENTED])
    elif key == "policy" and WHICH_MODEL.search(text):
        del whole.keys[key]
        way_out = f"rlplan solve model {whole.command}"
    return SpecError(
        "on which GPUs?" if key == "hardware" else "which model?",
        where=WHERE,
        rule="a question names a model and GPUs (or cpu), or a job file",
        way_out=way_out,
    )


def suggest_bundled(reading: Reading, error: HostError, verb: str) -> HostError:
    """The error of a model that cannot be downloaded, with the nearest bundled one as its way out."""
    from rlplan.spec.models.names import match_model

    near = match_model(str(reading.keys["policy"]).rpartition("/")[2])
    if not (chosen := near.id or next(iter(near.others), "")):
        return error
    whole = Reading({**reading.keys, "policy": chosen}, reading.overrides)
    way_out = f"`rlplan {verb} {whole.command}` has the nearest shape; {error.way_out}"
    return HostError(error.what, where=error.where, rule=error.rule, way_out=way_out)


def read_sentence(text: str) -> Reading:
    """Read a sentence that may name only a part of a job. Raises: SpecError.

    >>> read_sentence("on 4 A100s with lora").words
    ['--gpus', '4xa100-sxm-80gb', 'training.lora={rank: 16}']
    """
    reading = Reading()
    _read_sentence(reading, text, "estimate")
    return reading


def set_named(reading: Reading, key: str, value: str) -> None:
    """Set a top-level key from text. Raises: SpecError."""
    if key == "policy":
        _set_model(reading, value, "--model")
    elif key == "hardware":
        reading.keys[key] = read_hardware(value, "--gpus", reading.assumed)
    elif key == "algorithm":
        reading.keys[key] = read_algorithm(value)
    else:
        name, at, version = value.partition("@")
        label = list_frameworks().get(name.lower().strip(), name) + at + version
        try:
            _ = label == "auto" or split_label(label)
        except UnknownFrameworkError as error:
            way_out = f"write framework={error.instead}, or framework=auto"
            raise SpecError(f"framework is '{value}'", where="--for", rule=str(error), way_out=way_out) from None
        reading.keys[key] = label


def _set_model(reading: Reading, name: str, where: str) -> None:
    """Set the model; if its name says that it is in bitsandbytes' 4 bits, it is trained with adapters."""
    reading.keys["policy"] = read_model(name, where, reading.assumed)
    if reading.assumed and reading.assumed[-1].endswith(QLORA):
        add_override(reading, f"qlora={LORA_RANK}")


def read_model(name: str, where: str, assumed: list[str]) -> str:
    """The model of a name: a path, a bundled id, or another hub id unchanged. Raises: SpecError with candidates."""
    name = _URL.sub("", name.strip()).strip("/") if _URL.search(name) else name.strip()
    if find_model_path(name) is not None or name.endswith(".json") or name.startswith(("~", ".", "/")):
        return name
    if name in load_catalogue():
        return name
    from rlplan.spec.models.names import has_size, match_model

    match = match_model(name)
    if match.id and (match.is_exact or match.packed or "/" not in name):
        if match.packed:
            is_qlora = "bnb" in match.packed or match.packed in ("4bit", "4-bit", "nf4")
            words = QLORA if is_qlora else f"16-bit weights, for {match.packed} cannot be trained (qlora: a 4-bit base)"
            assumed.append(f"{match.id} with {words}")
        elif not match.is_exact or ("/" in name and name.lower() != match.id.lower()):
            others = f" (not {', '.join(other.rpartition('/')[2] for other in match.others[:2])})" * bool(match.others)
            assumed.append(f"'{name}' is {match.id}{others}")
        if match.ignored:
            assumed.append(f"ignored: {' '.join(match.ignored)}")
        return match.id
    if "/" in name:
        return name
    near = match.others or (USUAL_MODEL,)
    what = "could be" if has_size(name, near[0]) else "is not bundled; the nearest are"
    could_be = f" {what} {' or '.join(match.others)}" if match.others else " is not known"
    raise SpecError(
        f"model {shorten_value(name)}{could_be}",
        where=where,
        rule="a Hugging Face id, a folder, a config.json, or the name and size of a bundled model",
        way_out=f"--model {near[0]}",
    )


def read_hardware(text: str, where: str, assumed: list[str]) -> str:
    """Hardware in the short form of a job: `16xh100-sxm`. Raises: SpecError."""
    if "," in text and is_hardware(text):
        what = f"{text.count(',') + 1} clusters: {text}"
        raise SpecError(what, where=where, rule=ONE_CLUSTER, way_out=f"write {USUAL}")
    long = expand_hardware(text, where, assumed)
    if long["profile"].startswith("cpu"):
        return str(long["profile"])
    hosts = f" on {long['num_hosts']} nodes" if "num_hosts" in long else ""
    second = long.get("generation")
    pool = f" + {_format_pool(second)}" if second else ""
    return f"{_format_pool(long)}{hosts}{pool}"


def _format_pool(pool: dict[str, Any]) -> str:
    profile = find_profile(pool["profile"], where=WHERE)
    size = profile.num_gpus if isinstance(profile, NodeProfile) else 1
    return f"{pool['num_devices'] // size}x{profile.name}"


def default_overrides(keys: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Default sizes of a job that is named by its model and hardware, where a person names none.

    A CPU host gets a step of seconds; elsewhere WorkloadSpec's own defaults hold. Lengths end with the model's context.
    """
    hardware = str(keys.get("hardware", ""))
    sizes = load_words()["cpu_sizes"] if is_cpu_text(hardware) or hardware.startswith("cpu") else {}
    typed = {word.partition("=")[0] for word in overrides}
    reads_answers = keys.get("algorithm") in ALGORITHMS and ALGORITHMS[keys["algorithm"]].given
    own = {key: size for key, size in sizes.items() if "." in key and not (reads_answers and key in GIVEN_KEYS)}
    model = str(keys.get("policy"))
    context = find_model(model).max_position_embeddings if model in load_catalogue() else 0
    prompt, response = (f"workload.max_{part}_len" for part in ("prompt", "response"))
    usual = WorkloadSpec.create_default()
    if context and not typed & {prompt, response} and context < usual.max_seq_len and not sizes:
        own |= {prompt: context // 4, response: context - context // 4}
    return [f"{key}={size}" for key, size in own.items() if key not in typed]


def lacks_bfloat16(keys: Mapping[str, Any]) -> bool:
    """Whether the GPUs of a question have no rate in bfloat16, such as a T4 or V100."""
    hardware = str(keys.get("hardware", "cpu-host"))
    if hardware.startswith("cpu") or is_cpu_text(hardware):
        return False
    rates = get_gpu(expand_hardware(hardware, WHERE)["profile"], where=WHERE).dense_flops_per_s
    return bool(rates) and Dtype.BFLOAT16.value not in rates


def add_override(reading: Reading, word: str) -> None:
    """Add an override, whose key may be short or another stack's: `lora=16`, `batch_size=512`, `context=16k`."""
    typed, _, value = (part.strip() for part in word.lstrip("-").partition("="))
    short = typed.lower().lstrip("+-").replace("-", "_")
    key = load_words()["keys"].get(short, typed) if "." not in typed else typed
    if key == typed and "." not in typed and value[:1] not in ("{", "["):  # `placement={...}` is a part of a job
        key = find_leaf(short) or typed
    if key in ("policy", "hardware", "algorithm", "framework") and value[:1] not in "{[":
        set_named(reading, key, value.strip("\"'"))
    elif key in ("training.lora", "qlora"):
        packed = ", base_dtype: nf4" * (key == "qlora")
        rank = value if value.isdigit() else str(LORA_RANK)
        is_word = value.isdigit() or value.lower() in ("true", "yes", "on", "")
        is_off = value.lower() in ("false", "0", "no", "none", "null")
        whole = f"{{rank: {rank}{packed}}}" if is_word else value
        if not is_off:
            reading.overrides.append(f"training.lora={whole}")
        elif key != "qlora":
            reading.overrides.append("training.lora=null")  # a job file may have adapters
    elif key == "context":
        _set_context(reading, value)
    else:
        if key == "training.zero_stage":
            value = re.sub(r"^\D*([0-3])$", r"\1", value)  # deepspeed=zero3
        if key in ("placement.max_staleness", "rollout.quantization") and value.lower() in ("true", "1", "yes"):
            value = "1" if key == "placement.max_staleness" else "fp8"
        if key == "training.dtype" and typed != key and (instead := load_words()["quantized"].get(value.lower())):
            reading.assumed.append(f"{typed}={value} is the format of rollouts; training keeps 16 bits")
            key, value = "rollout.quantization", instead
        if key.endswith("dtype"):
            value = load_words()["dtypes"].get(value.lower(), value)
        if key == "workload.num_prompts_per_step" and "batch" in short:
            reading.assumed.append(f"{typed} counts prompts per step")
        reading.overrides.append(f"{key}={value}")


def _set_context(reading: Reading, value: str) -> None:
    """Split a context length: the prompt gets a quarter, at most 1,024 tokens, as in WorkloadSpec."""
    try:
        tokens = parse_tokens(value)
        typed = [parse_tokens(word.partition("=")[2]) for word in reading.overrides if "max_prompt_len=" in word]
    except ValueError as error:
        way_out = "workload.max_response_len=16k"
        raise SpecError(f"a context of '{value}'", where=WHERE, rule=str(error), way_out=way_out) from None
    prompt = typed[0] if typed else 0
    prompt = prompt or max(1, min(1024, tokens // 4))
    reading.overrides = [word for word in reading.overrides if "max_prompt_len=" not in word]
    reading.overrides += [f"workload.max_prompt_len={prompt}", f"workload.max_response_len={max(1, tokens - prompt)}"]


def _read_sentence(reading: Reading, text: str, verb: str) -> None:
    if not text.strip():
        return  # without compiling the expressions
    text = _URL.sub("", text)
    for match in _ID.finditer(text) if "policy" not in reading.keys else ():
        _set_model(reading, match[0], WHERE)
        text = text.replace(match[0], _GAP, 1)
        break
    text = _take_gpus(reading, normalize(text), verb)
    for pattern, role in ROLES:
        if beside := pattern.search(text):
            reading.overrides.append(f"roles.{role}.path={read_model(beside[1], WHERE, reading.assumed)}")
            text = f"{text[: beside.start()]}{_GAP}{text[beside.end() :]}"
    if split := SPLIT.search(text):
        _split_gpus(reading, int(split[1] or split[4]), int(split[2] or split[3]))
    text = LONGEST.sub(_GAP, MONEY.sub(_GAP, text.replace(split[0], _GAP) if split else text))
    text = _take_adapters(reading, text)
    for pattern, key in compile_numbers():
        text = _take_number(reading, text, pattern, key)
    text = _take_names(reading, text, verb)
    _take_model(reading, text, verb)


def _take_gpus(reading: Reading, text: str, verb: str) -> str:
    """Take GPUs or the CPU host out of a sentence. Raises: SpecError for several clusters or unknown hardware."""
    if "hardware" in reading.keys:
        return text
    clusters, divisor = list[tuple[str, bool]](), 1
    while match := find_group(text):
        part, divisor = ("", divisor) if clusters else find_part(text[: match.start()])
        joined = text[match.end() :].lstrip()[:1] == "+"
        clusters.append((match[0], joined))
        before = text[: match.start() - len(part)]
        text = f"{before}{_GAP}{text[match.end() :].lstrip().removeprefix('+')}"
    if clusters:
        text = _set_clusters(reading, clusters, text, verb)
        if divisor > 1:
            _limit_memory(reading, divisor)
        return text
    cpu = "|".join(sorted(map(re.escape, load_machines()["cpu"]), key=len, reverse=True))
    if match := re.search(rf"(?<![\w-])(?:cpu-host|(?:{cpu}))(?![\w-])", text):
        reading.keys["hardware"] = "cpu-host"
        return text.replace(match[0], _GAP, 1)
    match = find_inexact_group(text)
    rest = text.replace(match[0], _GAP, 1) if match else text
    if HOW_MANY.search(text) and (match is None or re.fullmatch(r"\D*gpus?", match[0])):
        reading.keys["hardware"] = read_hardware(USUAL, WHERE, [])
        reading.assumed.append("")
        _ask_for_fewest(reading)
        return rest
    if match is None:
        for name, gpus in load_machines()["notebooks"].items():
            if re.search(rf"\b{name}\b", text):
                reading.keys["hardware"] = read_hardware(gpus, WHERE, [])
                reading.assumed.append(f"{gpus}, the free GPU of {name}")
        return text
    try:
        reading.keys["hardware"] = read_hardware(match[0].strip(), WHERE, reading.assumed)
    except SpecError as error:
        raise _correct_gpus(reading, error, rest, verb) from None
    return rest


def _set_clusters(reading: Reading, clusters: Sequence[tuple[str, bool]], text: str, verb: str) -> str:
    """Set the hardware from the groups of GPUs in a sentence, of which `text` is left. Return what is then left."""
    parts, typed = [name for name, _ in clusters], " + ".join(name for name, _ in clusters)
    roles = [bool(match[1]) for match in POOLS.finditer(text)]
    if len(clusters) == 2 and {True, False} <= {*roles}:  # `train on 4 h100, rollouts on 4 l40s`
        typed, text = _join_pools(reading, parts if roles[0] else parts[::-1]), POOLS.sub(_GAP, text)
    elif len(clusters) > 1 and not clusters[0][1]:
        shown = ",".join(read_hardware(name, WHERE, []) for name in parts)
        raise SpecError(
            f"{len(clusters)} clusters: {', '.join(parts)}",
            where=WHERE,
            rule=ONE_CLUSTER,
            way_out=f"rlplan compare {shlex.quote(VERSUS.sub(' ', text).strip())} --gpus {shown}",
        )
    try:
        reading.keys["hardware"] = read_hardware(typed, WHERE, reading.assumed)
    except SpecError as error:
        raise _correct_gpus(reading, error, text, verb) from None
    if HOW_MANY.search(text) and not has_count(typed):
        _ask_for_fewest(reading)
    return text


def _limit_memory(reading: Reading, divisor: int) -> None:
    """Limit the memory of the GPUs to a part of it, as a slice of a shared GPU has it."""
    gpu = get_gpu(expand_hardware(reading.keys["hardware"], WHERE)["profile"], where=WHERE)
    limit = f"{gpu.memory.value // divisor // MIB}MiB"
    reading.overrides.append(f"hardware.memory={limit}")
    reading.assumed.append(f"1/{divisor} of {gpu.name}: {limit} of its memory, all of its compute")


def _split_gpus(reading: Reading, trains: int, generates: int) -> None:
    """Let some GPUs train and others generate; their sum is the job's number of GPUs, unless another number was
    typed."""
    reading.overrides += ["placement.placement=disaggregated", f"placement.num_generation_devices={generates}"]
    count, _, kind = reading.keys.get("hardware", "").partition("x")
    if count == "1" and reading.assumed and reading.assumed[-1].startswith("one "):
        reading.keys["hardware"] = f"{trains + generates}x{kind}"
        reading.assumed.pop()


def _join_pools(reading: Reading, parts: Sequence[str]) -> str:
    """The hardware of GPUs that train and others that generate; if all are of one kind, the job's placement is
    disaggregated."""
    trains, generates = (parse_pools(part, where=WHERE, may_assume=True)[0] for part in parts)
    if trains.profile != generates.profile:
        return " + ".join(parts)
    add_override(reading, "placement.placement=disaggregated")
    add_override(reading, f"placement.num_generation_devices={generates.num_gpus}")
    return f"{trains.num_gpus + generates.num_gpus}x{trains.profile}"


def _correct_gpus(reading: Reading, error: SpecError, rest: str, verb: str) -> SpecError:
    """The refusal of GPUs with the whole question, corrected. rest: the sentence without them."""
    near = re.search(r"(?:write|such as) (\w[\w.-]*)", error.way_out)
    whole = Reading({**reading.keys, "hardware": near[1] if near else USUAL}, [*reading.overrides])
    _read_sentence(whole, rest, verb)
    whole.keys.setdefault("policy", USUAL_MODEL)
    if error.rule == ONE_CLUSTER:
        verb, whole.keys["hardware"] = "compare", error.what.partition(": ")[2]
    return SpecError(error.what, where=error.where, rule=error.rule, way_out=f"rlplan {verb} {whole.command}")


def _ask_for_fewest(reading: Reading) -> None:
    """Ask for the fewest GPUs of a kind, because the question is how many there must be."""
    reading.keys["hardware"] = f"{MOST_GPUS}x{reading.keys['hardware'].partition('x')[2]}"
    reading.overrides.append("objective=gpus")
    kind = reading.keys["hardware"].partition("x")[2]
    reading.assumed[-1:] = [f"the fewest of at most {MOST_GPUS} {kind} (objective=gpus)"]


def _take_adapters(reading: Reading, text: str) -> str:
    packed, rank = False, 0
    while match := _LORA.search(text):
        packed |= (match[1] or "").startswith(("q", "4", "nf"))
        rank = int(match[2] or match[4] or 0) or rank or LORA_RANK
        text = f"{text[: match.start()]}{_GAP}{text[match.end() :]}"
    typed = [word for word in reading.overrides if word.startswith("training.lora=")]
    if rank and typed and packed:  # `qlora rank=32`
        rank = int(re.search(r"rank: (\d+)|$", typed[0])[1] or rank)  # type: ignore[index]
        reading.overrides = [word for word in reading.overrides if word not in typed]
    if rank and (packed or not typed):
        add_override(reading, f"{'qlora' if packed else 'lora'}={rank}")
    return text


def _take_number(reading: Reading, text: str, pattern: re.Pattern[str], key: str) -> str:
    match = pattern.search(text)
    if match is None:
        return text
    number = match[1].replace(" ", "")
    if key in ("lr", "kl", "temperature", "pp"):
        add_override(reading, f"{key}={number}")
        return f"{text[: match.start()]}{_GAP}{text[match.end() :]}"
    value = parse_tokens(number.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+", number) else number)
    if "k" in number and key == "response" and match[0].strip() == number:
        reading.assumed.append(f"{number} is the longest response")
    add_override(reading, f"{key}={value}")
    return f"{text[: match.start()]}{_GAP}{text[match.end() :]}"


def _take_names(reading: Reading, text: str, verb: str) -> str:
    """Take the framework, the algorithm, the placement and the format of rollouts out of a sentence."""
    tables, frameworks = load_words(), list_frameworks()
    if match := search_names(frameworks, text, r"(?:@v?[\d.]+)?"):
        name, _, version = match[0].partition("@")
        reading.keys.setdefault("framework", frameworks[name] + f"@{version}" * bool(version))
        text = text.replace(match[0], _GAP, 1)
    if match := search_names(tables["unplanned_algorithms"], text):
        near = tables["unplanned_algorithms"][match[0]]
        whole = Reading({**reading.keys}, [*reading.overrides])
        _read_sentence(whole, text.replace(match[0], near), verb)
        whole.keys = {"policy": USUAL_MODEL, "hardware": USUAL} | whole.keys
        raise SpecError(
            f"algorithm '{match[0]}' is not supported",
            where=WHERE,
            rule=f"one of {', '.join(ALGORITHMS)}",
            way_out=f"rlplan {verb} {whole.command}",
        )
    algorithms = tables["algorithms"] | {name: name for name in ALGORITHMS}
    algorithms |= {name.replace("_", sign): name for name in ALGORITHMS for sign in " -" if "_" in name}
    exact = {name: value for name, value in algorithms.items() if value == name.replace(" ", "_").replace("-", "_")}
    while match := search_names(exact, text) or search_names(algorithms, text):
        reading.keys.setdefault("algorithm", algorithms[match[0]])
        text = text.replace(match[0], _GAP, 1)
    while match := search_names(tables["settings"], text):
        for override in tables["settings"][match[0]].split():
            add_override(reading, override)
        text = text.replace(match[0], _GAP, 1)
    return text


def _take_model(reading: Reading, text: str, verb: str) -> None:
    """Read the model from the words that are left. Raises: SpecError with a corrected command."""
    stop = set(load_words()["stop"].split())
    words = [word.strip("?!,.;:()/\"'-") for word in text.split()]
    words = [word for word in words if word and word not in stop]
    if not words:
        return
    if "policy" in reading.keys:
        reading.assumed.append(f"ignored: {' '.join(words)}")
        return
    from rlplan.spec.models.names import find_inner_name, match_model

    name = " ".join(words)
    match = match_model(name)
    if not match.id and (inner := find_inner_name(words)):
        reading.assumed.append(f"ignored: {' '.join(word for word in words if word not in inner)}")
        name = " ".join(inner)
        match = match_model(name)
    for word in words if not match.id and not match.others else ():
        if near := re.search(r"'(.+)'", did_you_mean(word, ALGORITHMS)):
            reading.keys.setdefault("algorithm", near[1])
            reading.assumed.append(f"'{word}' is {near[1]}")
            _take_model(reading, text.replace(word, " "), verb)
            return
    try:
        _set_model(reading, name, WHERE)
    except SpecError as error:
        near_id = error.way_out.removeprefix("--model ")
        whole = Reading({"policy": near_id, "hardware": USUAL} | reading.keys, reading.overrides)
        raise SpecError(
            error.what, where=error.where, rule=error.rule, way_out=f"rlplan {verb} {whole.command}"
        ) from None
