"""The host's memory and disk: pinned copies of offloaded tensors, rollouts of a step, checkpoints, and processes of the
driver's host that are no workers (rewards, environments, loggers).

    w   responses judged at the same time, limits.num_reward_workers
    m   memory limit of a reward's process, or of a sandbox with all its processes and files

In: bytes of tensors, rollouts, parameters, a job. Out: bytes of one host, or on disk. Left out: downloads from the hub;
the kernel's page cache, which it gives up first and which Ray does not count; pages of the interpreter that processes
share; imports of the job's own functions and MCP servers; chats that only the data contain.
"""

from collections.abc import Mapping

from rlplan.spec.model import ModelSpec
from rlplan.spec.parts.rewards import AnswerMatcherSpec, CodeExecutorSpec, FunctionSpec, RewardSpec
from rlplan.spec.resolved import ResolvedJob, SettledJob
from rlplan.units import GIB, MIB
from rlplan.vocabulary import Role

WORKER_HOST_BYTES = 4 * GIB
"""Bytes of a worker process with CUDA's and torch's libraries, before it allocates anything. Assumed: CPU builds of the
same workers measure 0.4 to 0.9 GiB (hardware_profiles/node/cpu-host.yaml); CUDA's libraries map some 3 GiB more."""
DRIVER_HOST_BYTES = 2 * GIB
"""Bytes of the driver and Ray's own processes. Measured without a GPU: about 1 GiB; assumed: twice that with more
workers."""
TOKEN_BYTES = 8 + 4 + 4 + 4 + 4
"""Bytes of a rollout's token: its id (int64), two log-probs, its advantage and its mask (fp32)."""
COPIES_OF_ROLLOUTS = 2
"""Copies of a step's rollouts: in Ray's object store, and as the driver's own tensors."""
OBJECT_STORE_SHARE, MAX_OBJECT_STORE_BYTES = 0.3, 200 * 10**9
"""Share of a host's memory that Ray's object store may fill, and its limit. Source: Ray 2, ray_constants.py
(DEFAULT_OBJECT_STORE_MEMORY_PROPORTION, DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES). Beside the actors of slime issue 1851
and vime issue 56, 181 and 200 GB were used on hosts of 1 TB."""
KILLED_ABOVE = 0.95
"""Share of a host's memory above which Ray ends workers. Source: Ray 2 documentation, "Out-Of-Memory Prevention"
(`RAY_memory_usage_threshold`); verl issue 4995 shows it."""
STATE_BYTES = 12
"""Bytes of an element's fp32 master weight and two moments, which a checkpoint stores in addition to the weights."""


def pinned_bytes(num_bytes: int) -> int:
    """Bytes that one pinned tensor takes: the next power of two.

    Source: torch 2.13, ATen/core/CachingHostAllocator.h (`c10::llvm::PowerOf2Ceil`): pages are locked in such sizes.
    Differs: up to twice the tensor's own bytes; the usual estimate is 1.5 times.

    >>> pinned_bytes(5 << 30) >> 30, pinned_bytes(4096), pinned_bytes(0)
    (8, 4096, 0)
    """
    return 0 if num_bytes <= 0 else 1 << (num_bytes - 1).bit_length()


def choices_bytes(job: SettledJob, model: ModelSpec) -> int:
    """Bytes on the driver's host of a teacher's distributions (`algorithm.teacher_top_k`) and of recorded experts
    (`rollout.replays_experts`) of a step; 0 without them.

    Counts: n x (response x k x (log-prob + id) + sequence x layers x experts of a token x 2), without ids for the whole
    vocabulary; in four copies: the worker's answer, Ray's object store, the driver, and the trainers' samples.
    Source: runtime/rollout/experience.py. Assumes: every layer has experts, every sequence the longest length.

    >>> from types import SimpleNamespace as Some
    >>> from rlplan.spec.parts.algorithm import AlgorithmSpec
    >>> work, rollout = Some(num_rollouts_per_step=2, max_response_len=5, max_seq_len=9), Some(replays_experts=False)
    >>> jobs = [Some(algorithm=AlgorithmSpec(teacher_top_k=k), workload=work, rollout=rollout) for k in (0, 64, "all")]
    >>> [choices_bytes(job, Some(vocab_size=1000, experts=None, num_layers=2)) for job in jobs]
    [0, 20480, 160000]
    """
    work, kept = job.workload, job.algorithm.count_teacher_tokens(model.vocab_size)
    teacher = kept * (4 if kept == model.vocab_size else 8)
    routing = 2 * model.num_layers * model.experts.num_active if job.rollout.replays_experts and model.experts else 0
    return 4 * work.num_rollouts_per_step * (work.max_response_len * teacher + work.max_seq_len * routing)


def rollout_buffer_bytes(num_rollouts: int, seq_len: int) -> int:
    """Bytes of the rollouts of a step on the host that runs the driver.

    Counts: tokens times TOKEN_BYTES, twice. Assumes: every sequence has this length.

    >>> rollout_buffer_bytes(1024, 4096)
    201326592
    """
    return COPIES_OF_ROLLOUTS * num_rollouts * seq_len * TOKEN_BYTES


def object_store_bytes(host_bytes: int) -> int:
    """Most bytes of Ray's object store on a host with `host_bytes` of memory.

    >>> object_store_bytes(100 * 10**9), object_store_bytes(2000 * 10**9)
    (30000000000, 200000000000)
    """
    return min(int(OBJECT_STORE_SHARE * host_bytes), MAX_OBJECT_STORE_BYTES)


def checkpoint_bytes(num_trained: int, weight_bytes: int) -> int:
    """Bytes on disk of one checkpoint to resume from: trained weights with their states. Frozen weights are not saved.

    >>> checkpoint_bytes(1000, 2)
    14000
    """
    return num_trained * (weight_bytes + STATE_BYTES)


def job_checkpoint_bytes(job: SettledJob, models: Mapping[Role, ModelSpec]) -> int:
    """Bytes on disk of one checkpoint of all trained roles. models: by role; the policy's for roles without one."""
    trained = 0
    for role in job.trained_roles:
        parameters, _ = job.trained_parameters(role, models.get(role, models[Role.POLICY]))
        trained += sum(parameter.numel for parameter in parameters)
    return checkpoint_bytes(trained, job.training.dtype.num_bytes)


MATH_PROCESS_BYTES = 64 * MIB
"""Bytes of a process that compares mathematics. Source: measured, math-verify 0.9.0, CPython 3.11: 62 MB resident."""
FUNCTION_PROCESS_BYTES = 16 * MIB
"""Bytes of an interpreter before it loads a user's function. Source: CPython 3.11, resident 14 MB."""
TOOLS_BYTES = 16 * MIB
"""Additional bytes of a worker with tools: pydantic, which parses arguments. Measured: 15.1 MiB, CPython 3.11."""
MCP_BYTES = 6 * MIB
"""Additional bytes of a worker with tools from MCP servers: jsonschema. Measured with pydantic: 20.8 MiB."""
MCP_SERVER_BYTES = 56 * MIB
"""Bytes of a stdio MCP server, one per worker and file. Measured: 54.3 MiB (proportional), mcp 2.3.0, one tool."""
URL_BYTES = 19 * MIB
"""Additional bytes of a worker that sends HTTP requests: urllib and TLS certificates. Measured: 17.8 MiB."""
GATEWAY_BYTES = 84 * MIB
"""Bytes of the gateway's process: aiohttp, pydantic, a tokenizer. Measured: 76 MiB with a small tokenizer."""
CHAT_BYTES = 72 * MIB
"""Bytes of the process that renders chats: transformers' templates, a tokenizer. Measured: 67.1 MiB with a small
tokenizer."""
PROCESS_BYTES_PER_BYTE = 8
"""Bytes that a function's process may take per byte of a request. Source: runtime/rewards/child.py."""
DRIVER_BYTES_PER_BYTE = 3
"""Bytes in the driver per byte of a request while it is sent: token lists (8 bytes per id), text, and bytes."""
TEXT_BYTES = 6
"""Bytes of a token's text as JSON. Assumed: 4 letters in English and code, and JSON's escapes."""
ID_BYTES = 9
"""Bytes of a token's id in a JSON list: at most 7 digits, a comma and a space."""
SINK_PROCESS_BYTES = {"tensorboard": 16 * MIB, "mlflow": 32 * MIB, "wandb": 256 * MIB, "trackio": 256 * MIB}
"""Bytes of a logger's process. tensorboard: a bare interpreter (CPython 3.11, 14 MB resident). The others are
assumed, not measured."""


def verifier_bytes(job: ResolvedJob) -> int:
    """Upper bound of the bytes of the rewards' own processes, on the driver's host.

    Counts: w x (process + m) of each reward that has processes; for mathematics without m, because answers are short. A
    function with TRL's signature has one process, which may take PROCESS_BYTES_PER_BYTE per byte of its batch beyond m;
    the driver holds the batch too. If the signature is not stated, the larger of the two.
    Source: limits that runtime/rewards and runtime/sandbox set. Assumes: every worker is at its limit at once.

    >>> from rlplan.spec.parts.rewards import FunctionSpec
    >>> reward_bytes(FunctionSpec(kind="function", path="a.py:f", memory=100 * MIB)) // MIB
    116
    """
    batch = (PROCESS_BYTES_PER_BYTE + DRIVER_BYTES_PER_BYTE) * batch_request_bytes(job)
    total = 0
    for reward in job.rewards:
        process = reward_bytes(reward)
        by_signature = {"verl": job.limits.num_reward_workers * process, "trl": process + batch}
        signature = reward.signature if isinstance(reward, FunctionSpec) else "verl"
        total += max(by_signature.values()) if signature == "auto" else by_signature[signature]
    return total


def batch_request_bytes(job: ResolvedJob) -> int:
    """Bytes of the request with all responses of a batch, as JSON: those of a step, or of all held-out prompts.

    Counts: n x (2 x prompt x text + response x (text + id)), the prompt once as text and once as a chat.
    Source: runtime/rewards/judge.py, `make_request`. Assumes: TEXT_BYTES a token. Differs: data columns do not count.

    >>> from types import SimpleNamespace as Some
    >>> work = Some(num_rollouts_per_step=1024, max_prompt_len=0, max_response_len=1000)
    >>> batch_request_bytes(Some(workload=work, num_evaluated_responses=16))
    15360000
    """
    work = job.workload
    response_bytes = 2 * work.max_prompt_len * TEXT_BYTES + work.max_response_len * (TEXT_BYTES + ID_BYTES)
    return max(work.num_rollouts_per_step, job.num_evaluated_responses) * response_bytes


def reward_bytes(reward: RewardSpec) -> int:
    """Bytes of one reward in one worker; 0 where the driver computes it.

    Counts: the process, and the reward's memory limit. Source: this module's constants; the job.
    Assumes: the same as verifier_bytes.

    >>> from rlplan.spec.parts.rewards import FormatCheckerSpec
    >>> reward_bytes(FormatCheckerSpec(kind="format_checker"))
    0
    """
    if isinstance(reward, CodeExecutorSpec):
        return reward.memory
    if isinstance(reward, FunctionSpec):
        return FUNCTION_PROCESS_BYTES + reward.memory
    return MATH_PROCESS_BYTES if isinstance(reward, AnswerMatcherSpec) and reward.compares == "math" else 0


def environment_bytes(job: ResolvedJob, worker_bytes: int) -> int:
    """Bytes of all environment processes. worker_bytes: bytes of a worker that answers with a function.

    Counts: rollout.environment.num_workers processes, each with its MCP servers over stdio, and one for chats; or the
    gateway and one for chats, without the agents, which are the user's programs.
    Source: the constants above.

    >>> from types import SimpleNamespace as Some
    >>> mcp = ("codes.py", "https://example.org/mcp")
    >>> environment = Some(num_workers=2, has_tools=True, mcp=mcp, url=None, agent=None)
    >>> environment_bytes(Some(rollout=Some(environment=environment), data=None), 15 * MIB) // MIB
    258
    """
    environment, has_tools = job.rollout.environment, job.rollout.environment.has_tools
    if environment.agent is not None:
        return GATEWAY_BYTES + CHAT_BYTES
    has_chats = has_tools or (job.data is not None and job.data.system_prompt is not None)
    asks, speaks_mcp = environment.url is not None, bool(environment.mcp)
    num_servers = sum("://" not in place for place in environment.mcp)
    worker_bytes += TOOLS_BYTES * has_tools + MCP_BYTES * speaks_mcp + URL_BYTES * asks
    worker_bytes += MCP_SERVER_BYTES * num_servers
    return environment.num_workers * worker_bytes + CHAT_BYTES * has_chats


def sink_bytes(job: ResolvedJob) -> int:
    """Bytes of all loggers of a job.

    Counts: a process each. Source: SINK_PROCESS_BYTES. Assumes: wandb and trackio take 256 MiB.

    >>> from types import SimpleNamespace as Some
    >>> sink_bytes(Some(metrics=Some(sinks=("tensorboard", "wandb")))) // MIB
    272
    """
    return sum(SINK_PROCESS_BYTES[sink] for sink in job.metrics.sinks)
