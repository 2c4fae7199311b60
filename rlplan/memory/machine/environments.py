"""What the processes hold that answer the policy between its turns.

In: a job, the host's profile. Out: bytes. Left out: what the job's own functions import, its MCP servers; chats that
only the data have (a prompt file's rows are not read for a plan).
"""

from rlplan.spec.resolved import ResolvedJob
from rlplan.units import MIB

TOOLS_BYTES = 16 * MIB
"""Of a worker with tools beyond one without: pydantic, which reads arguments. Measured: 15.1 MiB, CPython 3.11."""
URL_BYTES = 5 * MIB
"""Of a worker that asks over HTTP beyond one that does not. Measured: 4.7 MiB, CPython 3.11."""
CHAT_BYTES = 72 * MIB
"""Of the process that renders chats: transformers' templates, a tokenizer. Measured: 67.1 MiB with a small one."""


def environment_bytes(job: ResolvedJob, worker_bytes: int) -> int:
    """Bytes of all of them. worker_bytes: of one that answers with a function.

    Counts: rollout.environment.num_workers processes, and one for chats. Source: the constants above.

    >>> from types import SimpleNamespace as Some
    >>> environment = Some(num_workers=2, has_tools=True, url=None)
    >>> environment_bytes(Some(rollout=Some(environment=environment), data=None), 15 * MIB) // MIB
    134
    """
    environment, has_tools = job.rollout.environment, job.rollout.environment.has_tools
    has_chats = has_tools or (job.data is not None and job.data.system_prompt is not None)
    each = worker_bytes + TOOLS_BYTES * has_tools + URL_BYTES * (environment.url is not None)
    return environment.num_workers * each + CHAT_BYTES * has_chats
