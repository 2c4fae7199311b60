"""verl, OpenRLHF, SkyPilot and SLURM accept what is written for them by their own parsers; slime and NeMo-RL by facts.

KubeRay's schema is recorded. Left out: vLLM, DeepSpeed and TRL (test_upstream.py).
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from rlplan.emit.launchers import write_launcher
from rlplan.errors import SpecError
from rlplan.foreign.documents import flat
from rlplan.foreign.export.experiment import list_learning_keys
from rlplan.foreign.export.folders import write_export
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import best_plan
from rlplan.runtime.processes.machine_speed import scaled
from rlplan.spec.files.job_file import job_from, load_job
from tests.factories import EXAMPLES
from tests.foreign.export import own_parsers
from tests.foreign.export.plans import ASKED, BATCHES, asked_of, plan_for, plan_of

ROOT = Path(__file__).resolve().parents[3]
RECORDED = YAML(typ="safe").load(Path(__file__).parent / "recorded.yaml")
PINNED = [line for line in (ROOT / "requirements" / "upstream.txt").read_text().splitlines() if line[:1] != "#"]
TRAINERS = ("verl", "openrlhf", "hydra-core", "omegaconf", "antlr4-python3-runtime", "packaging", "PyYAML")
SLURM_PACKAGES = ("slurm-client", "slurm-wlm-basic-plugins", "munge", "libmunge2")
PPO = {
    "verl": ("training.backend=fsdp2", "training.backend=megatron", "training.ulysses=2", "training.lora.rank=16"),
    "openrlhf": ("training.zero_stage=3",),
}
"""What plans with a value model are asked to have."""
CLUSTERS = ("2xH100", "4xH100", "8xH100", "16xH100", "8xA100")
LENGTHS = [(f"workload.max_response_len={size}",) for size in (1024, 2048, 4096)]


def exports(target: str, folder: Path, every: int = 1) -> list[Path]:
    """Folders of the thirty plans, or of each so many of them."""
    plans = [plan_of(*overrides) for overrides in asked_of(target, every)]
    folders = [folder / str(index) for index in range(len(plans))]
    for plan, one in zip(plans, folders, strict=True):
        write_export(plan, target, one)
    return folders


def launchers(target: str, folder: Path) -> list[Path]:
    """Folders of thirty plans on one host and on several."""
    found = []
    for index, (gpus, lengths, batches) in enumerate(product(CLUSTERS, LENGTHS, BATCHES)):
        keys = [f"hardware={gpus}", "policy=Qwen/Qwen2.5-1.5B-Instruct", *lengths, *batches]
        write_launcher(best_plan(load_job(EXAMPLES / "grpo-7b-8xh100.yaml", keys)), target, folder / str(index))
        found.append(folder / str(index))
    return found


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_slime_and_megatron_have_every_flag_with_a_value_of_its_type(every: int, tmp_path: Path) -> None:
    known = RECORDED["slime"]["keys"]
    for folder in exports("slime", tmp_path, every):
        words = own_parsers.arguments(str(folder))
        for word, after in zip(words, [*words[1:], "--"], strict=True):
            if word.startswith("--"):
                kind = known[word.removeprefix("--")]
                assert after.startswith("--") if kind == "none" else KINDS[kind](after) is not None, word


KINDS: dict[str, Any] = {"int": int, "float": float, "str": str}


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_nemo_rl_has_every_key_with_a_value_of_its_type(every: int, tmp_path: Path) -> None:
    known = RECORDED["nemo_rl"]["keys"] | {"defaults": "str"}
    for folder in exports("nemo_rl", tmp_path, every):
        for key, value in flat(YAML(typ="safe").load(folder / "train.yaml")).items():
            if not key.startswith("policy.generation.vllm_kwargs."):
                assert known[key] in (type(value).__name__, "any"), key


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the trainers' parsers, without what they train with."""
    return install(tmp_path_factory.mktemp("trainers"), TRAINERS, "--no-deps")


@pytest.fixture(scope="module")
def skypilot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with SkyPilot, whose hundred dependencies take longer than all parsers together."""
    return install(tmp_path_factory.mktemp("skypilot"), ("skypilot",))


def install(folder: Path, packages: Sequence[str], *options: str) -> Path:
    """The Python of a new environment with packages at their pinned versions."""
    pinned = [line for line in PINNED if line.partition("==")[0] in packages]
    assert len(pinned) == len(packages)
    within(60, "a new environment", [sys.executable, "-m", "venv", str(folder)])
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "--no-input", "--disable-pip-version-check", "--retries=1"]
    within(150, f"pip install {' '.join(pinned)}", [*pip, "--timeout=20", *options, *pinned])
    return python


def within(seconds: float, what: str, command: Sequence[str], **variables: str) -> str:
    """Run a command and return its output; fail with its last output where it fails or exceeds the deadline."""
    limit = scaled(seconds)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=limit, env=os.environ | variables
        )
    except subprocess.TimeoutExpired as error:
        said = b"".join(one for one in (error.stdout, error.stderr) if isinstance(one, bytes))
        pytest.fail(f"{what} did not end within {limit:.0f} s: {said.decode(errors='replace')[-800:] or 'no output'}")
    assert done.returncode == 0, f"{what} failed: {done.stderr[-800:]}"
    return done.stdout


def verdicts(python: Path, stack: str, folders: list[Path], **variables: str) -> list[str | None]:
    command = [str(python), own_parsers.__file__, stack, *map(str, folders)]
    text = within(150, f"{stack}'s own parser on {len(folders)} folders", command, **variables)
    found: list[str | None] = json.loads(text.splitlines()[-1])
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("stack", ["verl", "openrlhf"])
def test_a_trainer_s_own_parser_accepts_every_plan_and_no_unknown_key(
    stack: str, trainers: Path, tmp_path: Path
) -> None:
    folders = exports(stack, tmp_path)
    for more in PPO[stack]:
        job = job_from({"policy": "Qwen/Qwen2.5-7B", "algorithm": "ppo", "hardware": "8xH100"}, [more])
        plan = plan_for(job, stack)
        folders.append(tmp_path / more)
        write_export(plan, stack, folders[-1])
    assert verdicts(trainers, stack, folders) == [None] * len(folders)
    script = folders[0] / "train.sh"
    wrong = "trainer.no_such_key=1" if stack == "verl" else "--no.such_key 1"
    script.write_text(script.read_text().replace('"$@"', f'{wrong} "$@"'))
    assert verdicts(trainers, stack, folders[:1]) != [None]


@pytest.mark.nightly
def test_skypilot_s_own_task_accepts_every_plan(skypilot: Path, tmp_path: Path) -> None:
    folders = launchers("skypilot", tmp_path)
    assert verdicts(skypilot, "skypilot", folders) == [None] * 30
    task = folders[0] / "task.yaml"
    task.write_text(task.read_text() + "num_hosts: 1\n")
    assert verdicts(skypilot, "skypilot", folders[:1]) != [None]


@pytest.mark.nightly
def test_kuberay_s_schema_accepts_every_plan(tmp_path: Path) -> None:
    schema = json.loads((ROOT / "tests" / "emit" / "rayjob_schema.json").read_text("utf-8"))
    for folder in launchers("kuberay", tmp_path):
        jsonschema.validate(YAML(typ="safe").load(folder / "rayjob.yaml"), schema)


@cache
def slurm(folder: Path) -> dict[str, str]:
    """Debian's sbatch, unpacked, with a cluster that nobody answers for."""
    subprocess.run(["apt-get", "download", *SLURM_PACKAGES], cwd=folder, check=True, capture_output=True, timeout=120)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, folder], check=True)
    libraries = folder / "usr" / "lib" / f"{os.uname().machine}-linux-gnu"
    settings = ["ClusterName=x", "SlurmctldHost=localhost", "AuthType=auth/none", "CredType=cred/none", "GresTypes=gpu"]
    settings += [f"PluginDir={libraries / 'slurm-wlm'}", "MessageTimeout=2", "NodeName=localhost CPUs=2 Gres=gpu:8"]
    (folder / "slurm.conf").write_text("\n".join([*settings, "PartitionName=all Nodes=ALL Default=YES"]) + "\n")
    return {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "LD_LIBRARY_PATH": f"{libraries / 'slurm-wlm'}:{libraries}",
        "PATH": f"{folder / 'usr' / 'bin'}:{os.environ['PATH']}",
    }


@pytest.mark.nightly
def test_slurm_s_own_sbatch_reads_every_script(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = launchers("slurm", tmp_path)
    variables = slurm(tmp_path_factory.mktemp("slurm"))
    assert verdicts(Path(sys.executable), "slurm", folders, **variables) == [None] * 30
    script = folders[0] / "train.sbatch"
    script.write_text(script.read_text().replace("#SBATCH --nodes", "#SBATCH --hosts"))
    assert verdicts(Path(sys.executable), "slurm", folders[:1], **variables) != [None]


def learned_by_verl(found: dict[str, Any], *, is_megatron: bool) -> dict[str, Any]:
    """What verl learns with, of its own names."""
    actor, optim = "actor_rollout_ref.actor.", "actor_rollout_ref.actor.optim."
    has_loss, has_reward = found[f"{actor}use_kl_loss"], found["algorithm.use_kl_in_reward"]
    kind = found[f"{actor}kl_loss_type"] if has_loss else found["algorithm.kl_penalty"]
    coefficient = found[f"{actor}kl_loss_coef"] if has_loss else found["algorithm.kl_ctrl.kl_coef"]
    return {
        "learning_rate": found[f"{optim}lr"],
        "lr_scheduler_type": found[f"{optim}lr_decay_style" if is_megatron else f"{optim}lr_scheduler_type"],
        "lr_warmup_steps": max(0, found[f"{optim}lr_warmup_steps"] or 0),
        "lr_warmup_ratio": 0 if (found[f"{optim}lr_warmup_steps"] or 0) > 0 else found[f"{optim}lr_warmup_steps_ratio"],
        "lr_decay_steps": found.get(f"{optim}lr_decay_steps"),
        "min_lr_ratio": found.get(f"{optim}min_lr_ratio", 0) or 0,
        "weight_decay": found[f"{optim}weight_decay"],
        "adam_beta1": found[f"{optim}betas"][0],
        "adam_beta2": found[f"{optim}betas"][1],
        "gradient_clipping": found[f"{optim}clip_grad"],
        "clip_low": found[f"{actor}clip_ratio_low"],
        "clip_high": found[f"{actor}clip_ratio_high"],
        "entropy_coef": found[f"{actor}entropy_coeff"],
        "kl_coef": coefficient if has_loss or has_reward else 0,
        "kl_in": "loss" if has_loss else "reward" if has_reward else "",
        "importance": {"token": "truncate", None: "none"}[found["algorithm.rollout_correction.rollout_is"]],
        "importance_low": 0,
        "importance_high": found["algorithm.rollout_correction.rollout_is_threshold"],
        "overlong_buffer": found.get(f"{OVERLONG}len", 0) if found.get(f"{OVERLONG}enable") else 0,
        "overlong_penalty": found.get(f"{OVERLONG}penalty_factor", 1.0),
        "masks_truncated": False,
        "max_refills": 0,
        "kl_estimator": {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}[kind],
        "token_weights": "sequence"  # core_algos.py, compute_policy_loss_gspo
        if found[f"{actor}policy_loss.loss_mode"] == "gspo"
        else {
            "token-mean": "token",
            "seq-mean-token-mean": "sequence",
            "seq-mean-token-sum-norm": "constant",
        }[found[f"{actor}loss_agg_mode"]],
        "gae_lambda": found["algorithm.lam"],
        "gamma": found["algorithm.gamma"],
        "value_clip": found["critic.cliprange_value"],
        "value_learning_rate": found["critic.optim.lr"],
        "value_warmup_steps": found["trainer.critic_warmup"],
        "temperature": found["actor_rollout_ref.rollout.temperature"],
        "num_epochs_per_step": found[f"{actor}ppo_epochs"],
        "fixed": [
            [found["actor_rollout_ref.rollout.top_p"], found["actor_rollout_ref.rollout.top_k"]],
            found["algorithm.rollout_correction.rollout_rs"],
            found["algorithm.kl_ctrl.type"],
            found[f"{actor}clip_ratio_c"] > 1e6 or found[f"{actor}policy_loss.loss_mode"] != "vanilla",
        ],
    }


OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg."
FIXED = {"verl": [[1, -1], None, "fixed", True], "openrlhf": [1.0, None, None, False, True]}
"""Top-p and top-k that cut nothing, no second clip, no adaptive coefficient, no clipped or normalized rewards."""


CORRECTION = "algo.advantage.is_correction_"


def learned_by_openrlhf(found: dict[str, Any]) -> dict[str, Any]:
    """What OpenRLHF learns with, of the names of its arguments."""
    low, high = found["actor.eps_clip_low_high"] or [found["actor.eps_clip"]] * 2
    scheduler = found["actor.lr_scheduler"]
    importance = {"clip": "truncate", "mask": "mask"}[found[f"{CORRECTION}mode"]]
    importance = "none" if found[f"{CORRECTION}level"] == "off" else importance
    return {
        "learning_rate": found["actor.adam.lr"],
        "lr_scheduler_type": "cosine" if "cosine" in scheduler else scheduler.removesuffix("_with_warmup"),
        "lr_warmup_ratio": 0 if scheduler == "constant" else found["actor.lr_warmup_ratio"],
        "lr_warmup_steps": 0,
        "min_lr_ratio": 0 if scheduler == "cosine" else found["actor.min_lr_ratio"],
        "importance": importance,
        "importance_low": found[f"{CORRECTION}threshold"][0],
        "importance_high": found[f"{CORRECTION}threshold"][1],
        "overlong_buffer": found["reward.overlong_buffer_len"] or 0,
        "overlong_penalty": found["reward.overlong_penalty_factor"],
        "masks_truncated": False,
        "max_refills": 0,
        "weight_decay": found["actor.adam.weight_decay"],
        "adam_beta1": found["actor.adam.betas"][0],
        "adam_beta2": found["actor.adam.betas"][1],
        "gradient_clipping": found["actor.max_norm"],
        "clip_low": low,
        "clip_high": high,
        "entropy_coef": found["actor.entropy_coef"] or 0,
        "kl_coef": found["algo.kl.init_coef"],
        "kl_in": "loss" if found["algo.kl.use_loss"] else "reward",
        "kl_estimator": found["algo.kl.estimator"],
        "token_weights": {"token-mean": "token", "seq-mean-token-mean": "sequence"}[found["actor.loss_agg_mode"]],
        "gae_lambda": found["algo.advantage.lambd"],
        "gamma": found["algo.advantage.gamma"],
        "value_clip": found["critic.value_clip"],
        "value_learning_rate": found["critic.adam.lr"],
        "value_warmup_steps": max(0, found["critic.freezing_steps"]),
        "temperature": found["rollout.temperature"],
        "num_epochs_per_step": found["train.max_epochs"],
        "fixed": [
            found["rollout.top_p"],
            found["actor.dual_clip"],
            found["algo.kl.target"],
            found["reward.normalize_enable"],
            found["reward.clip_range"][1] > 1e6,
        ],
    }


def wanted_of(plan: Plan) -> dict[str, Any]:
    """The plan's values, by names of ours, of keys that have an effect."""
    spec, work = plan.job.algorithm, plan.job.workload
    names = [key.rpartition(".")[2] for key in list_learning_keys(plan.job)]
    values = {name: getattr(spec, name, getattr(work, name, None)) for name in names}
    if "value_learning_rate" in values:
        values["value_learning_rate"] = spec.value_learning_rate or spec.learning_rate
    return values


LEARNING = (
    (),
    ("algorithm.kl_in=reward", "algorithm.kl_estimator=k2", "algorithm.kl_coef=0.004"),
    ("algorithm.adam_beta1=0.8", "algorithm.adam_beta2=0.97", "algorithm.weight_decay=0.03", "algorithm.clip_low=0.11"),
    (
        "algorithm.clip_high=0.31",
        "algorithm.token_weights=token",
        "algorithm.entropy_coef=0.002",
        "workload.temperature=0.9",
    ),
    ("algorithm.gradient_clipping=0.4", "algorithm.learning_rate=2e-6", "algorithm.kl_estimator=k1"),
    ("algorithm.name=ppo", "algorithm.gae_lambda=0.9", "algorithm.value_clip=0.3", "algorithm.value_warmup_steps=3"),
    ("algorithm.name=ppo", "algorithm.kl_in=loss", "algorithm.value_learning_rate=4e-6"),
    ("algorithm.name=rloo",),
    ("algorithm.name=reinforce++", "algorithm.gamma=0.99"),
    ("algorithm.name=reinforce++_baseline",),
    ("algorithm.name=gspo", "algorithm.clip_low=0.0003", "algorithm.clip_high=0.0004"),
    ("algorithm.lr_scheduler_type=cosine", "algorithm.lr_warmup_ratio=0.1"),
    ("algorithm.overlong_buffer=256", "algorithm.overlong_penalty=0.7"),
    ("algorithm.importance=truncate", "algorithm.importance_high=3.5"),
    ("algorithm.importance=none",),
)
OWN_LEARNING = {
    "verl": (
        ("algorithm.name=remax",),
        ("algorithm.name=dr_grpo",),
        ("algorithm.name=cispo",),
        ("algorithm.lr_warmup_steps=5",),
        ("algorithm.lr_scheduler_type=cosine", "algorithm.min_lr_ratio=0.2", "training.backend=fsdp2"),
    ),
    "openrlhf": (
        ("algorithm.importance=mask", "algorithm.importance_low=0.4", "algorithm.importance_high=3.5"),
        ("algorithm.lr_scheduler_type=cosine", "algorithm.min_lr_ratio=0.2"),
        ("algorithm.lr_scheduler_type=linear",),
    ),
}
"""What one of the stacks has alone."""


def learning_plans(stack: str, backends: Sequence[tuple[str, ...]] = ((),)) -> list[Plan]:
    """Plans that differ in every key of the algorithm that a stack has."""
    plans: list[Plan] = []
    for words, backend in product((*LEARNING, *OWN_LEARNING.get(stack, ())), backends):
        try:
            plan = plan_of(*ASKED[stack], *words, *backend)
        except SpecError:  # which the stack lacks
            continue
        plans += [plan] * (plan.verdict is not Verdict.REFUSED)
    return plans


@pytest.mark.nightly
@pytest.mark.parametrize("stack", ["verl", "openrlhf"])
def test_what_a_stack_resolves_is_what_the_plan_learns_with(stack: str, trainers: Path, tmp_path: Path) -> None:
    """Upstream's own defaults are merged with the file by its own parser, for all that changes what is learned."""
    plans = learning_plans(stack, ((), ("training.backend=fsdp2",)) if stack == "verl" else ((),))
    folders = [tmp_path / str(index) for index in range(len(plans))]
    for plan, folder in zip(plans, folders, strict=True):
        write_export(plan, stack, folder)
    command = [str(trainers), own_parsers.__file__, "--resolve", stack, *map(str, folders)]
    text = within(150, f"{stack}'s own parser on {len(folders)} folders", command)
    for plan, found in zip(plans, json.loads(text.splitlines()[-1]), strict=True):
        learned = (
            learned_by_verl(found, is_megatron=plan.job.backend == "megatron")
            if stack == "verl"
            else learned_by_openrlhf(found)
        )
        assert learned.pop("fixed") == FIXED[stack]
        wanted = wanted_of(plan)
        assert {name: learned[name] for name in wanted} == wanted
