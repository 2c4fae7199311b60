"""RolloutEngine: the policy on vLLM, in its own process, stepped by a loop of ours.

In: token ids of prompts. Out: sampled tokens with their log-probs and the weights that each came from. New weights come
through `weight_sync/`; requests may arrive, and weights may change, between any two steps of the engine.
Left out: tensor parallelism, sleep (CUDA only).
"""

from collections.abc import Sequence
from typing import Any

from rlplan.memory.weight_sync import policy_packets
from rlplan.runtime.engine_keys import check_vllm
from rlplan.runtime.experience import Completion, FinishedRequest, RolloutRequest, WeightSpan
from rlplan.runtime.start_checkpoint import warm_up
from rlplan.runtime.weight_sync.adapter import slot_bytes, swap_adapter
from rlplan.runtime.weight_sync.channel import Endpoint, Update, sync_error
from rlplan.runtime.workers.memory_meter import give_memory_back, storage_bytes
from rlplan.runtime.workers.own_thread import OwnThread
from rlplan.runtime.workers.request_book import Outbox, RequestBook
from rlplan.runtime.workers.worker import Worker
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import MemoryKind, Role, SyncContent


class RolloutEngine(Worker):
    """See the module docstring. `dirty` means that a weight update failed half-way: only a full one makes it clean.

    Every method runs in the engine's own thread, between two steps, but for those that wait for completions.
    """

    WAITING = ("generate", "collect")

    def __init__(self, process: str, job: JobSpec, arguments: dict[str, Any], num_threads: int) -> None:
        super().__init__(process)
        self.job, self.arguments, self.num_threads = job, arguments, num_threads
        self.llm: Any = None
        self.adapter: Any = None
        self.dirty = False
        self.paused = False
        self.just_started = False
        self.book, self.outbox = RequestBook(), Outbox()
        self.thread = OwnThread(process, self._work)

    def invoke(self, method: str, *arguments: Any) -> Any:
        """Call a method where it belongs."""
        if method in self.WAITING:
            return super().invoke(method, *arguments)
        return self.thread.run(lambda: super(RolloutEngine, self).invoke(method, *arguments))

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

    def stop(self) -> None:
        """Destroy the engine and give its memory back; `start` makes a new one in the same process.

        Its weights are clean again whatever happened before: whoever starts it gives it whole ones.
        """
        import gc

        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        assert not self.book.num_open, "an engine is stopped when nothing is under way"
        self.llm.llm_engine.engine_core.shutdown()
        self.llm, self.adapter, self.dirty = None, None, False
        cleanup_dist_env_and_memory()
        gc.collect()
        give_memory_back()

    def sleep(self, level: int) -> None:
        """CUDA: give weights and KV cache back and keep the process. Level 2 drops the weights: they are sent again.

        Not yet run on a GPU; on a CPU vLLM only changes its state.
        """
        assert not self.book.num_open, "an engine sleeps when nothing is under way"
        self.llm.sleep(level=level)

    def wake(self, tags: list[str]) -> None:
        """CUDA: take back room for what is named, `weights` or `kv_cache`. Not yet run on a GPU."""
        self.llm.wake_up(tags=tags)
        if "kv_cache" in tags:
            self.forget_keys_and_values()

    def generate(self, requests: Sequence[RolloutRequest]) -> list[FinishedRequest]:
        """Complete the requests, and wait for it. Results stand in the requests' order."""
        outbox = Outbox()
        self.thread.run(lambda: self._enter(requests, outbox))
        finished = {request.id: request for request in outbox.take(len(requests), None)}
        return [finished[request.id] for request in requests]

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Begin to complete the requests, beside those that are under way; `collect` hands them out."""
        self._enter(requests, self.outbox)

    def collect(self, max_wait_s: float, at_least: int = 1) -> list[FinishedRequest]:
        """What was submitted and has been finished since the last time; waits so long for so many."""
        return self.outbox.take(at_least, max_wait_s)

    def pause(self) -> int:
        """Take no more steps until `resume`; what is under way is kept. Gives the number of open requests."""
        self.paused = True
        return self.book.num_open

    def resume(self) -> None:
        """Step again."""
        self.paused = False

    def open_channel(self, endpoint: Endpoint, reader: int) -> None:
        """Open the channel through which weights come in; an earlier one is closed."""
        self.just_started = False
        packets = policy_packets(self.job, self.job.load_model())
        takes_deltas = self.job.placement.sync_content is SyncContent.DELTA
        channel = {"endpoint": endpoint, "packets": packets, "reader": reader, "takes_deltas": takes_deltas}
        self.llm.init_weight_transfer_engine({"init_info": channel})

    def receive_weights(self, update: Update) -> dict[str, float]:
        """Take a whole update from the channel. A dirty engine needs a full one to be clean again."""
        self.begin_update(update)
        self.llm.update_weights({"update_info": {"update": update}})
        self.finish_update(update.version)
        report = self._transfer.receiver.report
        return {"waited_s": report.waited_s, "verified_s": report.verified_s, "applied_s": self._transfer.apply_s}

    def load_adapter(self, folder: str, version: int) -> None:
        """Take a version's adapters in place of those before. No request may be open: it would lose its own."""
        assert not self.book.num_open, "adapters are swapped when nothing is under way"
        self.just_started = False
        self.adapter = swap_adapter(self.llm, self.adapter, folder, version)
        self.forget_keys_and_values()

    def fed_checksums(self) -> list[int]:
        """Checksums of the packets as they were fed in by the last update that went well."""
        return list(self._transfer.receiver.checksums)

    def begin_update(self, update: Update) -> None:
        """Open an update; from here on the weights are mixed, and no step is taken, until `finish_update`."""
        if self.dirty and not update.is_full:
            raise sync_error("the last update failed: only a full one makes this engine clean")
        self.dirty = True
        self.llm.start_weight_update()

    def finish_update(self, version: int) -> None:
        """Close the update and stamp its version."""
        self.llm.finish_weight_update(weight_version=str(version))
        self.forget_keys_and_values()
        self.dirty = False

    def forget_keys_and_values(self) -> None:
        """Drop every cached prefix, also those of open requests, which are computed anew: vLLM does not by itself."""
        if not self.llm.llm_engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache")

    def components(self) -> dict[tuple[str, str], int]:
        """Bytes of the parameters that are still tensors, of the packs, and of the KV cache."""
        if self.llm is None:
            return {}
        runner = self._vllm_worker.model_runner
        held = {
            MemoryKind.WEIGHTS: self.packing.kept_bytes,
            MemoryKind.PACKED_WEIGHTS: self.packing.packed_bytes,
            MemoryKind.KV_CACHE: storage_bytes(runner.kv_caches),
            MemoryKind.SYNC_STAGING: self._transfer.num_bytes + slot_bytes(runner.model),
        }
        return {(Role.POLICY.value, kind.value): size for kind, size in held.items()}

    def loaded_components(self) -> dict[tuple[str, str], int]:
        """While loading, every parameter was a tensor: the weights before packing."""
        return {(Role.POLICY.value, MemoryKind.WEIGHTS.value): self.packing.loaded_bytes} if self.just_started else {}

    @property
    def _vllm_worker(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker

    @property
    def _transfer(self) -> Any:
        return self._vllm_worker.weight_transfer_engine

    def _enter(self, requests: Sequence[RolloutRequest], outbox: Outbox) -> None:
        """Hand the samples to vLLM, all before the next step, so that what is computed together does not vary."""
        if self.dirty:
            raise sync_error("the last update failed: the weights are mixed, and nothing is generated from them")
        self.just_started = False
        by_id = {request.id: request for request in requests}
        for name, index in self.book.enter(requests, outbox):
            request = by_id[name]
            prompt = {"prompt_token_ids": list(request.prompt)}
            self.llm.llm_engine.add_request(
                f"{name}/{index}", prompt, self._parameters(request, index), lora_request=self.adapter
            )

    def _parameters(self, request: RolloutRequest, index: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=request.temperature,
            top_p=1.0,
            top_k=-1,
            seed=request.seed + index,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            max_tokens=request.lengths[index] if request.lengths else request.max_tokens,
            ignore_eos=self.job.workload.ignores_eos or bool(request.lengths),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _work(self) -> bool:
        """One step of the engine; what has ended goes into the book. False when there is nothing to do."""
        if self.paused or self.dirty or not self.book.num_open:
            return False
        try:
            for output in self.llm.llm_engine.step():
                name, _, index = output.request_id.rpartition("/")
                self.book.finish(name, int(index), _completion(output.outputs[0]))
        except BaseException as error:
            self.book.fail(error)
            raise
        return True


def _completion(candidate: Any) -> Completion:
    """Of each position the first log-prob is the sampled token's."""
    flat = candidate.logprobs
    return Completion(
        tokens=tuple(candidate.token_ids),
        logprobs=tuple(flat.logprobs[start] for start in flat.start_indices),
        finish_reason=str(candidate.finish_reason),
        spans=tuple(WeightSpan(_version(s.version), s.start, s.end) for s in candidate.weight_versions or ()),
    )


def _version(label: str) -> int:
    """vLLM calls the weights that it has loaded itself `default`: version 0."""
    return int(label) if label.isdigit() else 0
