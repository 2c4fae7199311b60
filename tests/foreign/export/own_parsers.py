"""Check of exported folders by a stack's own parser. Runs in the stack's environment, without rlplan.

    python own_parsers.py [--resolve] STACK FOLDER...

Out: a JSON list on the last line, an entry for each folder: null where it is accepted, else why not; with --resolve the
whole configuration that upstream then has, its defaults included, as dotted keys. No training code
is imported: what parsers import beside is replaced by empty modules.
"""

import importlib.util
import json
import os
import runpy
import shlex
import subprocess
import sys
import typing
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock


def arguments(folder: str) -> list[str]:
    """The words of train.sh behind the program."""
    text = Path(folder, "train.sh").read_text("utf-8").replace("\\\n", " ")
    line = next(line for line in text.splitlines() if "python3" in line).replace('"$@"', "")
    words = shlex.split(line)
    return words[words.index("-m") + 2 :] if "-m" in words else words[2:]


def find_root(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def composed_verl(folder: str) -> Any:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    words, root = arguments(folder), find_root("verl")
    names = [word.partition("=")[2] for word in words if word.startswith("--config-name=")]
    configs, usual = root / "trainer" / "config", "ppo_trainer"
    if "one_step_off_policy" in Path(folder, "train.sh").read_text("utf-8"):
        configs, usual = root / "experimental" / "one_step_off_policy" / "config", "one_step_off_ppo_trainer"
    os.chdir(root.parent)  # from where that configuration looks for verl's own
    with initialize_config_dir(str(configs), version_base=None):
        config = compose(names[0] if names else usual, [word for word in words if not word.startswith("--")])
    OmegaConf.to_container(config, resolve=True)
    return config


def resolve_verl(folder: str) -> dict[str, Any]:
    """Hydra's composition of verl's defaults and these overrides."""
    from omegaconf import OmegaConf

    return flat(OmegaConf.to_container(composed_verl(folder), resolve=True))


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    flattened: dict[str, Any] = {}
    for key, value in data.items():
        flattened |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flattened


def resolve_openrlhf(folder: str) -> dict[str, Any]:
    """OpenRLHF's arguments from its own parser, with its defaults and these flags, as they reach the strategy."""
    parsed = openrlhf(folder)
    return flat(nested_vars(parsed))


def nested_vars(value: Any) -> Any:
    """Namespaces of arguments as mappings."""
    if not isinstance(value, Namespace | SimpleNamespace):
        return value
    return {key: nested_vars(inner) for key, inner in vars(value).items()}


def verl(folder: str) -> None:
    """Hydra composes verl's own configuration with these overrides; a key that verl lacks is an error. Then verl's own
    checks before a run, but for those of its classes, which import what trains.
    """
    config = composed_verl(folder)
    checks = importlib.util.spec_from_file_location("checks", find_root("verl") / "utils" / "config.py")
    assert checks is not None
    assert checks.loader is not None
    module = importlib.util.module_from_spec(checks)
    checks.loader.exec_module(module)
    module.omega_conf_to_dataclass = MagicMock()
    sys.modules["verl.workers.rollout.vllm_rollout.utils"] = MagicMock()
    has_reference = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    module.validate_config(
        config, use_reference_policy=has_reference, use_critic=config.algorithm.adv_estimator == "gae"
    )


def resolve_nemo_rl(folder: str) -> dict[str, Any]:
    """NeMo-RL's configuration from its own loader: the base of train.yaml, and train.yaml."""
    from omegaconf import OmegaConf

    root = Path(os.environ["CHECKOUTS"], "nemo_rl")
    loader = load_nemo_rl(root / "nemo_rl" / "utils" / "config.py")
    OmegaConf.register_new_resolver("mul", lambda first, second: first * second, replace=True)
    config = loader.load_config_with_inheritance(Path(folder, "train.yaml"), root / "examples" / "configs")
    return flat(OmegaConf.to_container(config, resolve=True))


def load_nemo_rl(file: Path) -> Any:
    """A module of upstream's by its file alone."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STUBBED = ("triton", "sglang", "sglang_router", "slime.backends.sglang_utils", "slime.observability")
"""Packages that slime's and Megatron's argument modules import, with their submodules."""


class _Stub(ModuleType):
    """A module whose every name is a class that takes any arguments."""

    __version__ = "3.5.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        methods = {"__init__": lambda *_, **__: None, "__call__": lambda self, *_, **__: self}
        return type(name, (), {**methods, "__getattr__": lambda *_: None})


class _Stubs(MetaPathFinder, Loader):
    """Modules that parsers import and do not call."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        is_stubbed = any(fullname == name or fullname.startswith(f"{name}.") for name in STUBBED)
        return ModuleSpec(fullname, self, is_package=True) if is_stubbed else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return _Stub(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def resolve_slime(folder: str) -> dict[str, Any]:
    """Megatron's arguments from its parser for train.sh, with slime's arguments added."""
    root = Path(os.environ["CHECKOUTS"])
    for name in ("torch._inductor.runtime.hints", "torch._inductor.runtime.triton_compat"):
        importlib.import_module(name)  # which look for the real Triton
    sys.meta_path.insert(0, _Stubs())
    typing.override = getattr(typing, "override", lambda method: method)  # type: ignore[attr-defined]  # of Python 3.12
    sys.path[:0] = [str(root / "megatron"), str(root / "slime")]
    from megatron.training.arguments import add_megatron_arguments
    from slime.utils.arguments import get_slime_extra_args_provider

    parser = ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    get_slime_extra_args_provider()(parser)
    parsed, rest = parser.parse_known_args([word for word in arguments(folder) if word != "${MODEL_ARGS[@]}"])
    assert all(word.startswith("--sglang-") for word in rest if word.startswith("--")), rest
    return vars(parsed)


class _ParsedError(Exception):
    pass


def openrlhf(folder: str) -> Any:
    """OpenRLHF's own program as far as it looks at its arguments, its assertions about them among it."""
    stubbed = ("ray", "ray.util", "ray.util.placement_group", "openrlhf.trainer", "openrlhf.trainer.ray")
    stubbed += tuple(f"openrlhf.trainer.ray.{name}" for name in ("launcher", "ppo_actor", "ppo_critic"))
    root = find_root("openrlhf")
    sys.modules.update({name: MagicMock(__spec__=None) for name in stubbed})
    parsed = MagicMock(side_effect=_ParsedError)
    sys.modules["openrlhf.utils"] = MagicMock(__spec__=None, __path__=[str(root / "utils")], get_strategy=parsed)
    sys.argv = ["train_ppo_ray.py", *arguments(folder)]
    try:
        runpy.run_path(str(root / "cli" / "train_ppo_ray.py"), run_name="__main__")
    except _ParsedError:
        return parsed.call_args.args[0]
    return None


def skypilot(folder: str) -> None:
    """SkyPilot's own task, which holds the file to its schema."""
    from sky import Task

    task = Task.from_yaml(str(Path(folder, "task.yaml")))
    assert task.run


def slurm(folder: str) -> None:
    """sbatch reads the script's options before it asks for a controller, which is not there."""
    command = ["sbatch", "--test-only", str(Path(folder, "train.sbatch"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "allocation failure" in done.stderr.lower() or "contact" in done.stderr, done.stderr


STACKS: dict[str, Callable[[str], None]] = {
    "verl": verl,
    "openrlhf": openrlhf,
    "skypilot": skypilot,
    "slurm": slurm,
}


def verdict(accept: Callable[[str], None], folder: str) -> str | None:
    try:
        accept(folder)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return None


RESOLVED: dict[str, Callable[[str], dict[str, Any]]] = {
    "verl": resolve_verl,
    "openrlhf": resolve_openrlhf,
    "nemo_rl": resolve_nemo_rl,
    "slime": resolve_slime,
}
"""Those of slime and NeMo-RL read checkouts of theirs and of Megatron-LM in the folder $CHECKOUTS."""


if __name__ == "__main__":
    _, *words = sys.argv
    if words[0] == "--resolve":
        answers: list[Any] = [RESOLVED[words[1]](folder) for folder in words[2:]]
    else:
        answers = [verdict(STACKS[words[0]], folder) for folder in words[1:]]
    print("\n" + json.dumps(answers, default=str))
