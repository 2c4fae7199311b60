"""Short forms of a job, expanded to the keys that a job has.

In: a parsed job file. Out: the same in its long form, which is what JobSpec validates.

    policy: Qwen/Qwen2.5-7B     ->  policy: {path: Qwen/Qwen2.5-7B}
    algorithm: grpo             ->  algorithm: {name: grpo}
    hardware: 8xH100            ->  hardware: {profile: H100, num_devices: 8}; H100x8 and H100:8 are read too
    hardware: 8xH100 + 8xL40S   ->  the same with generation: {profile: L40S, num_devices: 8}
    hardware: cpu-host          ->  hardware: {profile: cpu-host, num_devices: 1}

Left out: whether the long form is right (job.py); paths (job_file.py).
"""

from collections.abc import Mapping
from typing import Any

from rlplan.spec.algorithms import ALGORITHMS
from rlplan.spec.declaration import NUM_GIVEN
from rlplan.spec.hardware.catalogue import is_cpu_host, profile_paths
from rlplan.spec.hardware.typed import is_cpu_text, parse_pools

GIVEN_LEN = 1024
"""Default max_response_len of algorithms that learn from answers in the data. Source: half of the 2,048 tokens that
Tulu 3 allows a prompt and its answer in DPO (arXiv:2411.15124, its table of hyperparameters)."""


def expand_job(data: Any) -> Any:
    """A job in its long form. Raises: SpecError where a short form does not describe hardware."""
    if not isinstance(data, Mapping):
        return data
    long = dict(data)
    for key, inner in (("policy", "path"), ("algorithm", "name")):
        if isinstance(long.get(key), str):
            long[key] = {inner: long[key]}
    if isinstance(long.get("hardware"), str):
        long["hardware"] = expand_hardware(long["hardware"])
    _give_answers(long)
    return long


def expand_hardware(text: str, where: str = "hardware", assumed: list[str] | None = None) -> dict[str, Any]:
    """The long form of a hardware description. Raises: SpecError.

    assumed: receives what the text leaves open, such as the number of GPUs; None: then it is refused, as in a file.

    >>> expand_hardware("2 nodes of 8 h100")
    {'profile': 'h100-sxm', 'num_devices': 16, 'num_hosts': 2}
    """
    name = "cpu-host" if is_cpu_text(text) else text.strip()
    if name.lower() in profile_paths() and is_cpu_host(name.lower(), where=where):
        return {"profile": name.lower(), "num_devices": 1}
    pools = parse_pools(text, where=where, may_assume=assumed is not None)
    if assumed is not None:
        assumed += [pool.assumed for pool in pools if pool.assumed]
    second = {"generation": {"profile": pools[1].profile, "num_devices": pools[1].num_gpus}} if len(pools) > 1 else {}
    return pools[0].keys | second


def _give_answers(data: dict[str, Any]) -> None:
    """Set defaults of an algorithm that learns from answers in the data: answers per prompt, and their maximum
    length.
    """
    algorithm, workload = data.get("algorithm"), data.get("workload", {})
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else None
    declared = ALGORITHMS.get(name) if isinstance(name, str) else None
    if declared is not None and declared.given and isinstance(workload, Mapping):
        data["workload"] = {
            "num_samples_per_prompt": NUM_GIVEN[declared.given],
            "max_response_len": GIVEN_LEN,
            **workload,
        }
