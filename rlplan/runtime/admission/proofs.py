"""Proofs: which models may be trained and served here, by what a probe of their architecture said.

In: the policy's config. Out: nothing, or a SpecError with what differs. A proof is known by the small model's config
and the versions of vLLM, transformers and torch; it is kept in the user's cache, and those of the shipped models
come along (`proved.json`). Left out: GPUs, on which the first step's log-probs say the same later.
"""

import hashlib
import json
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from rlplan.emit.ray import COMMON_ENVIRONMENT, WORKER_ENVIRONMENT
from rlplan.errors import HostError, SpecError
from rlplan.runtime.admission.probe import SAYS
from rlplan.runtime.admission.shrinking import shrink_config
from rlplan.runtime.host.doctor import VLLM_PACKAGES
from rlplan.runtime.host.finding import installed_version
from rlplan.runtime.learning.logprob_mismatch import LIMITS
from rlplan.runtime.processes.machine_speed import scaled
from rlplan.runtime.processes.safe_path import SAFE_PATH, module_command
from rlplan.spec.base import shorten
from rlplan.spec.models.config import read_config
from rlplan.spec.models.language_part import language_config
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Dtype

FORM = 1
"""Raised when what a probe proves changes: older proofs then no longer count."""

DEADLINE_S = 180
SHIPPED = Path(__file__).with_name("proved.json")


def check_admission(job: ResolvedJob) -> None:
    """Raises: SpecError with what differs between trainer and engine; HostError where the probe does not end."""
    if job.has_rollouts and job.device_kind == "cpu":
        folder = Path(job.policy.path)
        config = read_config(folder / "config.json" if folder.is_dir() else folder)
        refuse_unproved(language_config(config), job.policy.path)


def refuse_unproved(config: dict[str, Any], where: str) -> None:
    """As `check_admission`, of a config. The proof of what is admitted is kept."""
    small = shrink_config(config)
    key = proof_key(small)
    if key in _read_shipped_proofs() or (_cache() / f"{key}.json").is_file():
        return
    found = run_probe(small)
    limits = LIMITS[Dtype.FLOAT32]
    differs = found.get("differs")
    if differs is None and not (found["mean"] <= limits.mean and found["max"] <= limits.p99):
        differs = (
            f"log-probs of trainer and engine differ by {found['mean']:.3g} on average, {found['max']:.3g} at most"
        )
    if differs is not None:
        raise SpecError(
            f"{config['architectures'][0]} cannot be run: {differs[:300]}",
            where=f"{where}: architectures, on a small model of the same shape",
            rule=f"trainer and engine have the same weights, and log-probs within {limits.mean:g} in fp32",
            way_out="run another model; docs/runtime.md lists architectures that run",
        )
    _keep(key, {"architecture": config["architectures"][0], **found})


def proof_key(small: dict[str, Any]) -> str:
    """What a proof is known by.

    >>> proof_key({"a": 1, "b": 2}) == proof_key({"b": 2, "a": 1})
    True
    """
    text = json.dumps([FORM, small, _versions()], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def run_probe(small: dict[str, Any]) -> dict[str, Any]:
    """What the probe says of a small model. Raises: HostError where it says nothing."""
    environment = os.environ | COMMON_ENVIRONMENT | WORKER_ENVIRONMENT["rollout_engine"] | SAFE_PATH
    threads = {"OMP_NUM_THREADS": str(min(4, len(os.sched_getaffinity(0)))), "VLLM_LOGGING_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory(prefix="rlplan-probe-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(small))
        command = module_command("rlplan.runtime.admission.probe", folder)
        try:
            done = subprocess.run(
                command, env=environment | threads, capture_output=True, text=True, timeout=scaled(DEADLINE_S)
            )
        except subprocess.TimeoutExpired as error:
            raise _report_no_answer(f"it took more than {error.timeout:.0f} s") from None
    said = [line for line in done.stdout.splitlines() if line.startswith(SAYS)]
    if not said:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise _report_no_answer(f"exit status {done.returncode}: {shorten(last, 200)}")
    found: dict[str, Any] = json.loads(said[-1].removeprefix(SAYS))
    return found


def _report_no_answer(why: str) -> HostError:
    return HostError(
        f"the probe of the policy's architecture gave no answer: {why}",
        where="policy.path, before the run",
        rule="a small model of the architecture is trained and served once before the first run of its kind",
        way_out="`rlplan doctor` says what this machine lacks; run again",
    )


@cache
def _versions() -> dict[str, str | None]:
    vllm = next(filter(None, map(installed_version, VLLM_PACKAGES)), None)
    return {"vllm": vllm, "transformers": installed_version("transformers"), "torch": installed_version("torch")}


@cache
def _read_shipped_proofs() -> frozenset[str]:
    return frozenset(json.loads(SHIPPED.read_text("utf-8")))


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlplan" / "proofs"


def _keep(key: str, proof: dict[str, Any]) -> None:
    """A cache that cannot be written is none: the next run proves again."""
    try:
        _cache().mkdir(parents=True, exist_ok=True)
        partial = _cache() / f"{key}.{os.getpid()}"
        partial.write_text(json.dumps(proof))
        partial.replace(_cache() / f"{key}.json")
    except OSError:
        return
