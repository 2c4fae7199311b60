"""Memory of processes on the driver's host that are no workers: rewards, environments, and loggers of metrics.

    w   responses judged at the same time, limits.num_reward_workers
    m   memory limit of a reward's process, or of a sandbox with all its processes and files

In: a job, the host's profile. Out: bytes. Left out: pages of the interpreter and its libraries that processes share;
imports of the job's own functions and MCP servers; chats that only the data contain (a plan reads no prompt rows).
"""

from rlplan.spec.parts.rewards import AnswerMatcherSpec, CodeExecutorSpec, FunctionSpec, RewardSpec
from rlplan.spec.resolved import ResolvedJob
from rlplan.units import MIB

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
