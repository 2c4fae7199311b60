"""RolloutEngine: the policy on vLLM, in its own process.

In: token ids of prompts. Out: sampled tokens with their log-probs. New weights come through `weight_sync/`.
Left out: tensor parallelism, sleep (CUDA only), asynchronous generation.
"""

from collections.abc import Sequence
from typing import Any

from rlplan.memory.transitions import Bucket
from rlplan.runtime.engine_keys import check_vllm
from rlplan.runtime.experience import Completion
from rlplan.runtime.start_checkpoint import warm_up
from rlplan.runtime.workers.memory_meter import storage_bytes
from rlplan.runtime.workers.worker import Worker
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import MemoryKind, Role


class RolloutEngine(Worker):
    """See the module docstring. `dirty` means that a weight update failed half-way: only a full one makes it clean."""

    def __init__(self, process: str, job: JobSpec, arguments: dict[str, Any], num_threads: int) -> None:
        super().__init__(process)
        self.job, self.arguments, self.num_threads = job, arguments, num_threads
        self.llm: Any = None
        self.dirty = False
        self.just_started = False
        self.arena_bytes = 0

    def import_libraries(self) -> None:
        """Load the code that `start` needs, so that its memory alone can be measured."""
        import torch
        import vllm.v1.worker.cpu_worker  # noqa: F401
        from vllm import LLM  # noqa: F401
        from vllm.model_executor.models.registry import ModelRegistry

        import rlplan.runtime.weight_sync.vllm_extension  # noqa: F401

        torch.set_num_threads(self.num_threads)
        architecture = self.job.load_model().architecture
        ModelRegistry.models[architecture].load_model_cls()
        warm_up(architecture, backward=False)
        check_vllm(self.arguments, "vllm/policy.json")

    def start(self, model_folder: str) -> None:
        """Load the model and allocate the KV cache."""
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from rlplan.runtime.workers.weight_packing import watch_weight_packing

        arguments = dict(self.arguments)
        arguments["weight_transfer_config"] = WeightTransferConfig(**arguments["weight_transfer_config"])
        with watch_weight_packing() as packing:
            self.llm = LLM(model=model_folder, **arguments)
        self.packing, self.just_started = packing, True

    def generate(
        self, prompts: Sequence[tuple[int, ...]], num_samples: int, temperature: float, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """`num_samples` completions of each prompt. Temperature 0 is greedy. One seed a prompt."""
        from vllm import SamplingParams

        self.just_started = False
        assert not self.dirty, "the last weight update failed: the weights are mixed"
        parameters = [
            SamplingParams(
                n=num_samples,
                temperature=temperature,
                top_p=1.0,
                top_k=-1,
                seed=seed,
                logprobs=0,
                detokenize=False,
                max_tokens=self.job.workload.max_response_len,
                ignore_eos=self.job.workload.ignores_eos,
            )
            for seed in seeds
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(requests, parameters, use_tqdm=False)
        return [[_completion(candidate) for candidate in output.outputs] for output in outputs]

    def open_arena(self, path: str, num_bytes: int) -> None:
        """Map the shared memory through which weights come in."""
        self.just_started = False
        self.llm.init_weight_transfer_engine({"init_info": {"path": path, "num_bytes": num_bytes}})
        self.arena_bytes = num_bytes

    def begin_update(self) -> None:
        """Open an update; from here on the weights are mixed until `finish_update`."""
        self.dirty = True
        self.llm.start_weight_update()

    def load_bucket(self, bucket: Bucket) -> None:
        """Load the bucket that now lies in the arena."""
        self.llm.update_weights({"update_info": {"bucket": bucket}})

    def finish_update(self, version: int) -> None:
        """Close the update, stamp its version, and drop every cached prefix: vLLM does not, and it would be stale."""
        self.llm.finish_weight_update(weight_version=str(version))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")
        self.dirty = False

    def components(self) -> dict[tuple[str, str], int]:
        """Bytes of the parameters that are still tensors, of the packs, and of the KV cache."""
        if self.llm is None:
            return {}
        runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        held = {
            MemoryKind.WEIGHTS: self.packing.kept_bytes,
            MemoryKind.PACKED_WEIGHTS: self.packing.packed_bytes,
            MemoryKind.KV_CACHE: storage_bytes(runner.kv_caches),
            MemoryKind.SYNC_STAGING: self.arena_bytes,
        }
        return {(Role.POLICY.value, kind.value): size for kind, size in held.items()}

    def loaded_components(self) -> dict[tuple[str, str], int]:
        """While loading, every parameter was a tensor: the weights before packing."""
        return {(Role.POLICY.value, MemoryKind.WEIGHTS.value): self.packing.loaded_bytes} if self.just_started else {}


def _completion(candidate: Any) -> Completion:
    logprobs = tuple(
        position[token].logprob for position, token in zip(candidate.logprobs, candidate.token_ids, strict=True)
    )
    return Completion(tuple(candidate.token_ids), logprobs, str(candidate.finish_reason))
