"""Driver: seconds in which the process that controls a step sends a batch to trainer ranks and reads their results.

Frameworks with one driver keep a step's rollouts there as tensors padded to the longest prompt and response. Each call
of the trainer writes them into messages, one after the other, while all GPUs wait.

In: numbers of rollouts and tokens. Out: a Cost. Left out: the batch that engines return, the network, advantages.
Symbols: N rollouts, P longest prompt, R longest response.
"""

from rlplan.timing.cost import Cost, Resource

POSITION_BYTES = 32
"""Bytes per token of a padded sequence: ids, mask, positions, and once more the ids of prompt and response, in int64.
Source: verl v0.6.1 workers/rollout/vllm_rollout/vllm_rollout_spmd.py:395."""
SCORED_BYTES, TRAINED_BYTES = 12, 28
"""Further bytes per response token. Log-prob passes are sent a mask (int64) and scores (fp32), updates also rewards,
old log-probs, advantages and returns (fp32). Source: verl v0.6.1 trainer/ppo/ray_trainer.py (fit)."""
RESULT_BYTES = 4
"""Bytes per response token of each result of a log-prob pass: log-probs, and entropies if they are computed."""
SENT_BYTES_PER_S, READ_BYTES_PER_S = 0.43e9, 0.6e9
"""Rates of one core: a copy, torch.save, pickle and a copy to shared memory; the same in reverse. Measured on an EPYC
core (docs/lab-notes.md): 0.40 to 0.46 and 0.57 to 0.62 GB/s. Not used in the fit: verl pull request 3425, about 0.55
GB/s for torch.save alone; verl's page on fully asynchronous training, 36 s of log-prob passes that no GPU shortens, 28
s here.
"""


def send_batch_cost(num_rollouts: float, prompt_len: int, response_len: int, *, num_results: int = 0) -> Cost:
    """Seconds to send padded rollouts and to read what a log-prob pass returns. num_results: 0 for an update.

    Counts: N (POSITION_BYTES (P + R) + SCORED_BYTES R), or TRAINED_BYTES, at the sending rate; N R RESULT_BYTES per
    result at the reading rate. Source: verl v0.6.1 protocol.py (`DataProto.__getstate__`), single_controller.
    Assumes: Python's lock lets one message be written at a time.

    >>> round(send_batch_cost(8192, 2048, 28672, num_results=2).seconds, 1)  # 10.87 GB / 0.43 + 1.88 GB / 0.6
    28.4
    """
    beside = SCORED_BYTES if num_results else TRAINED_BYTES
    sent = num_rollouts * (POSITION_BYTES * (prompt_len + response_len) + beside * response_len)
    read = num_rollouts * RESULT_BYTES * num_results * response_len
    return Cost({Resource.HOST: sent / SENT_BYTES_PER_S + read / READ_BYTES_PER_S})
