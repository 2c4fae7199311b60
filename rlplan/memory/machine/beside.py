"""Processes beside the workers, on the driver's host: they judge responses, answer between the policy's turns, and hand
metrics to other people's loggers.

    w   responses judged at the same time, limits.num_reward_workers
    m   what a reward's process, or a sandbox with all its processes and files, may take before it is ended

In: a job, the host's profile. Out: bytes. Left out: pages of the interpreter and its libraries that processes share;
what the job's own functions and MCP servers import; chats that only the data have (a prompt file's rows are not
read for a plan).
"""

from rlplan.spec.parts.rewards import AnswerMatcherSpec, CodeExecutorSpec, FunctionSpec, RewardSpec
from rlplan.spec.resolved import ResolvedJob
from rlplan.units import MIB

MATH_PROCESS_BYTES = 64 * MIB
"""A process that has compared mathematics. Source: measured, math-verify 0.9.0, CPython 3.11: 62 MB resident."""
FUNCTION_PROCESS_BYTES = 16 * MIB
"""An interpreter before it has loaded a user's function. Source: CPython 3.11, resident 14 MB."""
TOOLS_BYTES = 16 * MIB
"""Of a worker with tools beyond one without: pydantic, which reads arguments. Measured: 15.1 MiB, CPython 3.11."""
MCP_BYTES = 6 * MIB
"""Of a worker with MCP servers beyond one with tools: jsonschema reads arguments. Measured, with both: 20.8 MiB."""
MCP_SERVER_BYTES = 56 * MIB
"""Of a server over stdio, one a worker and file. Measured: 54.3 MiB (proportional), mcp 2.3.0, one tool."""
URL_BYTES = 19 * MIB
"""Of a worker that asks over HTTP beyond one that does not: urllib and TLS's certificates. Measured: 17.8 MiB."""
CHAT_BYTES = 72 * MIB
"""Of the process that renders chats: transformers' templates, a tokenizer. Measured: 67.1 MiB with a small one."""
PROCESS_BYTES_PER_BYTE = 8
"""Bytes that a function's process may take for each byte of a request. Source: runtime/rewards/child.py."""
DRIVER_BYTES_PER_BYTE = 3
"""A request while the driver sends it: its tokens as lists (8 bytes for an id of 8), as text, and as bytes."""
TEXT_BYTES = 6
"""Bytes of a token's text as JSON. Assumed: 4 letters in English and code, and what JSON escapes."""
ID_BYTES = 9
"""Bytes of a token's id in a list as JSON: at most 7 digits, a comma and a space."""
SINK_PROCESS_BYTES = {"tensorboard": 16 * MIB, "wandb": 256 * MIB, "trackio": 256 * MIB}
"""tensorboard: an interpreter and nothing else (CPython 3.11, 14 MB resident). The other two: assumed, not measured."""


def verifier_bytes(job: ResolvedJob) -> int:
    """Bytes that the rewards' own processes may hold at any time, on the driver's host.

    Counts: w x (process + m) of each reward that has processes; of mathematics without m, for answers are short. A
    function of TRL's signature has one process, which may take PROCESS_BYTES_PER_BYTE for each byte of its batch beside
    m; the driver writes the batch as well. Of a function whose signature is open, the larger of the two.
    Source: limits that runtime/rewards and runtime/sandbox set. Assumes: every worker is at its limit at once.

    >>> from rlplan.spec.parts.rewards import FunctionSpec
    >>> reward_bytes(FunctionSpec(kind="function", path="a.py:f", memory=100 * MIB)) // MIB
    116
    """
    batch = (PROCESS_BYTES_PER_BYTE + DRIVER_BYTES_PER_BYTE) * batch_request_bytes(job)
    total = 0
    for reward in job.rewards:
        each = reward_bytes(reward)
        ways = [job.limits.num_reward_workers * each, each + batch]
        signature = reward.signature if isinstance(reward, FunctionSpec) else "verl"
        total += max(ways) if signature == "auto" else ways[signature == "trl"]
    return total


def batch_request_bytes(job: ResolvedJob) -> int:
    """Bytes of the one request with all responses of a batch, as JSON: of a step, or of all held-out prompts.

    Counts: n x (2 x prompt x text + response x (text + id)), the prompt once as text and once as a chat.
    Source: runtime/rewards/judge.py, `request_about`. Assumes: TEXT_BYTES a token. Differs: columns are not counted.

    >>> from types import SimpleNamespace as Some
    >>> work = Some(num_rollouts_per_step=1024, max_prompt_len=0, max_response_len=1000)
    >>> batch_request_bytes(Some(workload=work, num_evaluated_responses=16))
    15360000
    """
    work = job.workload
    each = 2 * work.max_prompt_len * TEXT_BYTES + work.max_response_len * (TEXT_BYTES + ID_BYTES)
    return max(work.num_rollouts_per_step, job.num_evaluated_responses) * each


def reward_bytes(reward: RewardSpec) -> int:
    """Bytes of one reward in one worker; 0 where the driver computes it.

    Counts: the process, and what the reward lets it take. Source: this module's constants; the job.
    Assumes: as verifier_bytes.

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
    """Bytes of all of them. worker_bytes: of one that answers with a function.

    Counts: rollout.environment.num_workers processes, each with its MCP servers over stdio, and one for chats.
    Source: the constants above.

    >>> from types import SimpleNamespace as Some
    >>> environment = Some(num_workers=2, has_tools=True, mcp=("codes.py", "https://example.org/mcp"), url=None)
    >>> environment_bytes(Some(rollout=Some(environment=environment), data=None), 15 * MIB) // MIB
    258
    """
    environment, has_tools = job.rollout.environment, job.rollout.environment.has_tools
    has_chats = has_tools or (job.data is not None and job.data.system_prompt is not None)
    asks, speaks_mcp = environment.url is not None, bool(environment.mcp)
    num_servers = sum("://" not in place for place in environment.mcp)
    each = worker_bytes + TOOLS_BYTES * has_tools + MCP_BYTES * speaks_mcp + URL_BYTES * asks
    each += MCP_SERVER_BYTES * num_servers
    return environment.num_workers * each + CHAT_BYTES * has_chats


def sink_bytes(job: ResolvedJob) -> int:
    """Bytes of all sinks of a job.

    Counts: a process each. Source: SINK_PROCESS_BYTES. Assumes: packages beside tensorboard's sink take 256 MiB.

    >>> from types import SimpleNamespace as Some
    >>> sink_bytes(Some(metrics=Some(sinks=("tensorboard", "wandb")))) // MIB
    272
    """
    return sum(SINK_PROCESS_BYTES[sink] for sink in job.metrics.sinks)
