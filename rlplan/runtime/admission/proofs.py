"""Proofs: records that the probe of an architecture succeeded, which a model needs before it may run.

In: the policy's config. Out: nothing, or a SpecError that states the difference. A proof's key is the small model's
config with the versions of vLLM, transformers and torch. Proofs are stored in the user's cache; those of the bundled
models ship with rlplan (`proved.json`). Left out: GPUs, where the log-probs of the first step are checked instead.
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
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.processes.safe_path import SAFE_PATH, make_module_command
from rlplan.spec.base import shorten_value
from rlplan.spec.models.config import read_config
from rlplan.spec.models.language_part import language_config
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Dtype

FORM = 1
"""Version of the probe. It is increased when the probe proves something else, which makes older proofs invalid."""

DEADLINE_S = 180
"""Time limit of the probe, scaled by the machine's speed."""

SHIPPED = Path(__file__).with_name("proved.json")


def check_admission(job: ResolvedJob) -> None:
    """Check that the policy's architecture is proved. Raises: SpecError, HostError; see `check_architecture`."""
    if job.has_rollouts and job.device_kind == "cpu":
        folder = Path(job.policy.path)
        config = read_config(folder / "config.json" if folder.is_dir() else folder)
        check_architecture(language_config(config), job.policy.path)


def check_architecture(config: dict[str, Any], where: str) -> None:
    """Probe a config's architecture, unless there is a proof; store the proof.

    Raises: SpecError where trainer and engine differ; HostError where the probe gives no result.
    """
    small = shrink_config(config)
    key = proof_key(small)
    if key in _read_shipped_proofs() or (_cache_folder() / f"{key}.json").is_file():
        return
    result = run_probe(small)
    limits = LIMITS[Dtype.FLOAT32]
    differs = result.get("differs")
    # The probe has too few tokens for a 99th percentile, so its limit holds for the maximum.
    if differs is None and not (result["mean"] <= limits.mean and result["max"] <= limits.p99):
        differs = (
            f"log-probs of trainer and engine differ by {result['mean']:.3g} on average, {result['max']:.3g} at most"
        )
    if differs is not None:
        raise SpecError(
            f"{config['architectures'][0]} cannot be run: {differs[:300]}",
            where=f"{where}: architectures, on a small model of the same shape",
            rule=f"trainer and engine have the same weights, and log-probs within {limits.mean:g} in fp32",
            way_out="run another model; docs/runtime.md lists architectures that run",
        )
    _store_proof(key, {"architecture": config["architectures"][0], **result})


def proof_key(small: dict[str, Any]) -> str:
    """Key of the proof for a small model's config.

    >>> proof_key({"a": 1, "b": 2}) == proof_key({"b": 2, "a": 1})
    True
    """
    text = json.dumps([FORM, small, _versions()], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def run_probe(small: dict[str, Any]) -> dict[str, Any]:
    """Run the probe on a small model and return its result. Raises: HostError where it gives none."""
    environment = os.environ | COMMON_ENVIRONMENT | WORKER_ENVIRONMENT["rollout_engine"] | SAFE_PATH
    threads = {"OMP_NUM_THREADS": str(min(4, len(os.sched_getaffinity(0)))), "VLLM_LOGGING_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory(prefix="rlplan-probe-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(small))
        command = make_module_command("rlplan.runtime.admission.probe", folder)
        try:
            done = subprocess.run(
                command, env=environment | threads, capture_output=True, text=True, timeout=scale_seconds(DEADLINE_S)
            )
        except subprocess.TimeoutExpired as error:
            raise _report_no_answer(f"it took more than {error.timeout:.0f} s") from None
    answers = [line for line in done.stdout.splitlines() if line.startswith(SAYS)]
    if not answers:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise _report_no_answer(f"exit status {done.returncode}: {shorten_value(last, 200)}")
    result: dict[str, Any] = json.loads(answers[-1].removeprefix(SAYS))
    return result


def _report_no_answer(why: str) -> HostError:
    return HostError(
        f"the probe of the policy's architecture gave no result: {why}",
        where="policy.path, before the run",
        rule="before the first run of an architecture, a small model of it is trained and served once",
        way_out="`rlplan doctor` shows what this machine lacks; then run again",
    )


@cache
def _versions() -> dict[str, str | None]:
    vllm = next(filter(None, map(installed_version, VLLM_PACKAGES)), None)
    return {"vllm": vllm, "transformers": installed_version("transformers"), "torch": installed_version("torch")}


@cache
def _read_shipped_proofs() -> frozenset[str]:
    return frozenset(json.loads(SHIPPED.read_text("utf-8")))


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlplan" / "proofs"


def _store_proof(key: str, proof: dict[str, Any]) -> None:
    """Store a proof. If the cache cannot be written, the next run probes again."""
    try:
        _cache_folder().mkdir(parents=True, exist_ok=True)
        partial = _cache_folder() / f"{key}.{os.getpid()}"
        partial.write_text(json.dumps(proof))
        partial.replace(_cache_folder() / f"{key}.json")
    except OSError:
        return
