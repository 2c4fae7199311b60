"""CpuEngine: seconds of the rollout engine (vLLM) on a host without a GPU.

In: a model, the engine's settings, its share of the host, requests. Out: a Cost. Left out: prefix caching of prompts
(only whole blocks are shared), differences in length, preemption. Source: vLLM 0.32.0, v1/worker/cpu_model_runner.py.

Symbols: R sequences, c concurrent ones, p prompt and r response tokens, W bytes of the matrices and the head, h hidden,
q query width, k key width, I MLP width.
"""

from dataclasses import dataclass
from functools import cached_property

from rlplan.memory.model.engine_base import find_engine_quantization, list_packed_tensors
from rlplan.memory.serving.generation import build_host_pool, kv_bytes_per_token
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import ResolvedRollout
from rlplan.timing.cost import Cost
from rlplan.timing.cpu.eager import FLOAT_BYTES, PassCounts, fresh_bytes, matrix_numel
from rlplan.timing.cpu.host import CpuShare
from rlplan.units import ceil_div


@dataclass(frozen=True, slots=True)
class Requests:
    """Prompts with `num_samples` responses each. All prompts have one length, and so have all responses."""

    num_prompts: int
    num_samples: int
    prompt_len: int
    response_len: int

    @property
    def num_sequences(self) -> int:
        """R: sequences in total."""
        return self.num_prompts * self.num_samples


@dataclass(frozen=True)
class CpuEngine:
    """One engine with its share of the host."""

    model: ModelSpec
    rollout: ResolvedRollout
    share: CpuShare

    @cached_property
    def matrix_bytes(self) -> int:
        """Bytes of the matrices of all layers, in their stored format (4 bits where quantized)."""
        scheme = find_engine_quantization(self.rollout, None)
        packed = list_packed_tensors(self.model, scheme)
        whole = FLOAT_BYTES * matrix_numel(self.model)
        if scheme is None:
            return whole
        return whole + sum(scheme.form.num_bytes(tensor.shape) - FLOAT_BYTES * tensor.numel for tensor in packed)

    def count_concurrent(self, requests: Requests) -> int:
        """c: concurrent sequences, limited by the requests, max_num_seqs and the KV cache."""
        rollout = self.rollout
        # vLLM reserves one block as the null block
        blocks = build_host_pool(self.model, rollout).num_blocks(rollout.kv_cache_memory) - 1
        blocks_per_sequence = ceil_div(requests.prompt_len + requests.response_len, rollout.block_size)
        return max(1, min(requests.num_sequences, rollout.max_num_seqs, blocks // blocks_per_sequence))

    def cost(self, requests: Requests) -> Cost:
        """Seconds of all requests.

        Counts: R p prompt tokens in steps of at most max_num_batched_tokens, R rows of logits; then R (r - 1) tokens
        in steps of c. Each step reads the weights and its caches and has a fixed part; each prompt costs some Python.
        """
        c, count = self.count_concurrent(requests), requests.num_sequences
        prompts = count * requests.prompt_len
        num_prefills = ceil_div(prompts, self.rollout.max_num_batched_tokens)
        cost = self.step_cost(prompts / num_prefills, count / num_prefills, requests.prompt_len / 2).times(num_prefills)
        context = requests.prompt_len + requests.response_len / 2
        full_rounds, remainder = divmod(count, c)
        num_steps = requests.response_len - 1
        cost += self.step_cost(c, c, context).times(full_rounds * num_steps)
        if remainder:
            cost += self.step_cost(remainder, remainder, context).times(num_steps)
        latencies = self.share.host.latencies
        return cost + self.share.latency_cost(latencies.engine_request.value, requests.num_prompts)

    def step_cost(self, num_tokens: float, num_sequences: float, context_len: float) -> Cost:
        """Seconds of one step: `num_tokens` pass the layers, and each of `num_sequences` samples one token.

        Counts: FLOPs 2 matrices per token, 2 V h per sequence; W read once; keys and values of each sequence; fresh
        outputs q + 2k, q, h, 3I, h per layer.
        """
        model, latencies = self.model, self.share.host.latencies
        q, k = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        table = model.vocab_size * model.hidden_size
        flops = 2 * num_tokens * matrix_numel(model) + 2 * num_sequences * table
        cache = num_sequences * context_len * kv_bytes_per_token(model, FLOAT_BYTES)
        tokens = int(num_tokens)
        fresh = (
            fresh_bytes({q + 2 * k: 1}, tokens)
            + fresh_bytes({q: 1}, tokens)
            + fresh_bytes({model.hidden_size: 2}, tokens)
        )
        fresh += fresh_bytes({2 * model.intermediate_size: 1, model.intermediate_size: 1}, tokens)
        logits = fresh_bytes({model.vocab_size: 4}, int(num_sequences))
        counts = PassCounts(
            flops, model.num_layers * fresh + logits, self.matrix_bytes + FLOAT_BYTES * table + cache, 0
        )
        fixed = latencies.engine_step.value + model.num_layers * latencies.engine_layer.value
        fixed += num_sequences * latencies.engine_sequence.value
        return self.share.pass_cost(counts) + self.share.latency_cost(fixed)
