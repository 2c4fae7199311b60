"""RolloutEngine: the policy on vLLM, in its own process, stepped by a loop of ours.

In: token ids of prompts. Out: sampled tokens with their log-probs and the weights that each came from. New weights come
through `weight_sync/`; requests may arrive, and weights may change, between any two steps of the engine.
With tensor parallelism each rank is such a process; rank 0 is asked, and leads the others step by step (`lock_step`).
"""

import dataclasses
import gc
import importlib
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplan.memory.weight_sync.packets import policy_packets
from rlplan.runtime.host.engine_keys import check_vllm
from rlplan.runtime.images.in_vllm import ARCHITECTURE, engine_prompt, register_image_model
from rlplan.runtime.measure.memory_meter import give_memory_back, storage_bytes
from rlplan.runtime.models.start_checkpoint import warm_up
from rlplan.runtime.rollout.experience import FinishedRequest, RolloutRequest
from rlplan.runtime.weight_sync.channel import (
    BaseHandle,
    Endpoint,
    ReceiveReport,
    Update,
    VerificationReport,
    sync_error,
)
from rlplan.runtime.weight_sync.contents.adapter import adapter_bytes
from rlplan.runtime.workers.engine.cpu_attention import choose_cpu_arguments
from rlplan.runtime.workers.engine.cpu_kernels import register_cpu_kernels, request_amx_tiles
from rlplan.runtime.workers.engine.engine_thread import EngineThread
from rlplan.runtime.workers.engine.held_adapters import HeldAdapters
from rlplan.runtime.workers.engine.request_tracker import Outbox, RequestTracker
from rlplan.runtime.workers.engine.sampling import build_sampling_parameters, read_completion
from rlplan.runtime.workers.worker import Worker, no_collections
from rlplan.spec.model import read_model
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import MemoryKind, Role, SyncContent

if TYPE_CHECKING:
    import torch

    from rlplan.runtime.weight_sync.shared_base import OpenedBase


class RolloutEngine(Worker):
    """See the module docstring. `dirty` means that a weight update failed half-way: only a full one makes it clean.

    Every method runs in the engine's own thread, between two steps, but for those that wait for completions.
    """

    WAITING = ("generate", "collect", "finished_samples")

    def __init__(self, process: str, job: ResolvedJob, arguments: dict[str, Any], num_threads: int) -> None:
        super().__init__(process)
        self.job, self.arguments, self.num_threads = job, arguments, num_threads
        self.llm: Any = None
        self.adapters = HeldAdapters(0, 0)
        self.base: OpenedBase | None = None
        self.dirty = False
        self.paused = False
        self.just_started = False
        self.tracker, self.outbox, self.samples = RequestTracker(), Outbox(), Outbox()
        self.tracker.samples = self.samples if job.has_reward_processes else None
        self.num_steps = 0
        self.leader: Any = None
        self.follower: Any = None
        self.thread = EngineThread(process, self._step_if_possible)

    def invoke(self, method: str, *arguments: Any) -> Any:
        """Call a method where it belongs."""
        if method in self.WAITING:
            return super().invoke(method, *arguments)
        return self.thread.run(lambda: super(RolloutEngine, self).invoke(method, *arguments))

    def pulse(self) -> float:
        is_at_work = self.tracker.num_open and not self.paused and not self.dirty
        return float(self.num_steps) if is_at_work else super().pulse()

    @no_collections()
    def import_libraries(self) -> None:
        """Load the code that `start` needs, so that its memory alone can be measured."""
        import torch

        worker = "cpu_worker" if self.job.device_kind == "cpu" else "gpu_worker"
        importlib.import_module(f"vllm.v1.worker.{worker}")
        from vllm import LLM  # noqa: F401
        from vllm.model_executor.models.registry import ModelRegistry

        import rlplan.runtime.weight_sync.vllm_extension  # noqa: F401

        if not self.job.is_on_gpus:
            register_cpu_kernels()
        torch.set_num_threads(self.num_threads)
        architecture = self.job.load_model().architecture
        if self.job.takes_images:
            register_image_model()
        ModelRegistry.models[ARCHITECTURE if self.job.takes_images else architecture].load_model_cls()
        warm_up(architecture, backward=False)
        check_vllm(self.arguments, "vllm/policy.json")

    def start(
        self,
        model_folder: str,
        rank: int = 0,
        address: tuple[str, int] | None = None,
        version: int = 0,
        base: BaseHandle | None = None,
    ) -> None:
        """Load the model and allocate the KV cache; also again, after `stop`.

        address: where the ranks meet, when there are several. version: that of the weights in the folder. base: of the
        trainer, whose weights are these. An engine that is there already goes first: the caller does not know of it.
        """
        import torch
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from rlplan.runtime.weight_sync.shared_base import OpenedBase
        from rlplan.runtime.workers.engine.base_loading import load_from_base
        from rlplan.runtime.workers.engine.lock_step import named_by_port
        from rlplan.runtime.workers.engine.weight_packing import watch_weight_packing
        from rlplan.runtime.workers.worker_device import worker_device

        worker_device(self.job)
        if self.job.rollout.base_path is not None:
            request_amx_tiles()
        self.stop()
        arguments = self.arguments | (
            {} if self.job.is_on_gpus else choose_cpu_arguments(read_model(Path(model_folder)))
        )
        arguments["weight_transfer_config"] = WeightTransferConfig(**arguments["weight_transfer_config"])
        store = self._join_ranks(rank, address)
        self._close_base()  # of a start that failed
        if base is not None:
            self.base = OpenedBase(base, self.job.load_model(), getattr(torch, self.job.rollout.dtype.value))
        meeting = named_by_port(address[1]) if address else nullcontext()
        with watch_weight_packing(self.base) as packing, load_from_base(self.base), meeting:
            llm = LLM(model=model_folder, **arguments)
        self.packing, self.llm, self.just_started, self.dirty = packing, llm, True, False
        if "speculative_config" in arguments:
            from rlplan.runtime.workers.engine.speculative_decoding import fix_temperature_expansion

            fix_temperature_expansion()
        self.llm.update_weight_version(str(version))
        self.adapters = HeldAdapters(self.arguments.get("max_loras", 0), version)
        if address:
            self._run_in_lock_step(rank, address, store)

    def stop(self) -> None:
        """Destroy the engine, if there is one, and give its memory back; `start` makes a new one in the same process.

        Its weights are clean again whatever happened before: it is started with whole ones.
        """
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if self.llm is None:
            return
        assert not self.tracker.num_open, "an engine is stopped when nothing is under way"
        if self.follower is not None:
            self.follower.stop()
        self.llm.llm_engine.engine_core.shutdown()
        self.llm, self.leader, self.follower, self.dirty = None, None, None, False
        cleanup_dist_env_and_memory()  # which collects what the engine was
        self._close_base()
        gc.unfreeze()
        gc.collect()  # what the clean-up let go of lies in cycles, and what is frozen is never collected
        gc.freeze()  # modules, which vLLM has thawed, are not what the next start has to look for garbage in
        give_memory_back()

    def _close_base(self) -> None:
        if self.base is not None:
            gc.collect()  # a table in a cycle of vLLM's would keep all of it
            self.base.close()
            self.base = None

    def sleep(self, level: int) -> None:
        """CUDA: give weights and KV cache back and keep the process. Level 2 drops the weights: they are sent again.

        Not yet run on a GPU; on a CPU vLLM only changes its state.
        """
        assert not self.tracker.num_open, "an engine sleeps when nothing is under way"
        self.llm.sleep(level=level)

    def wake(self, tags: list[str]) -> None:
        """CUDA: take back room for what is named, `weights` or `kv_cache`. Not yet run on a GPU."""
        self.llm.wake_up(tags=tags)
        if "kv_cache" in tags:
            self.reset_prefix_cache()

    def generate(self, requests: Sequence[RolloutRequest]) -> list[FinishedRequest]:
        """Complete the requests, and wait for it. Results stand in the requests' order.

        A rank that is led waits until it has taken part in all of it, and gives nothing.
        """
        if self.follower is not None:
            missing = {request.id for request in requests}
            while missing:
                missing -= {finished.id for finished in self.outbox.take(1, None)}
            return []
        outbox = Outbox()
        self.thread.run(lambda: self._admit_requests(requests, outbox))
        finished = {request.id: request for request in outbox.take(len(requests), None)}
        return [finished[request.id] for request in requests]

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Begin to complete the requests, beside those that are under way; `collect` hands them out."""
        self._admit_requests(requests, self.outbox)

    def collect(self, max_wait_s: float, at_least: int = 1) -> list[FinishedRequest]:
        """What was submitted and has been finished since the last time; waits so long for so many."""
        return self.outbox.take(at_least, max_wait_s)

    def finished_samples(self, max_wait_s: float) -> list[FinishedRequest]:
        """Samples that have ended since the last time, before their requests have; waits so long for the first."""
        return self.samples.take(1, max_wait_s)

    def abandon(self, request_ids: Sequence[str]) -> None:
        """Drop what is under way of these requests: they will be asked for again, here or elsewhere."""
        if self.leader is not None:
            self.leader.send_order({"abandon": list(request_ids)})
        self._drop_requests(request_ids)

    def pause(self) -> int:
        """Take no more steps until `resume`; what is under way is kept. Gives the number of open requests."""
        self.paused = True
        return self.tracker.num_open

    def resume(self) -> None:
        self.paused = False
        self.adapters.switch(self.llm)

    def open_channel(self, endpoint: Endpoint, reader: int) -> None:
        """Open the channel through which weights come in; an earlier one is closed."""
        self.just_started = False
        packets = policy_packets(self.job, self.job.load_model())
        takes_deltas = self.job.placement.sync_content is SyncContent.DELTA
        channel = {"endpoint": endpoint, "packets": packets, "reader": reader, "takes_deltas": takes_deltas}
        self.llm.init_weight_transfer_engine({"init_info": channel})

    def receive_weights(self, update: Update) -> ReceiveReport:
        """Take a whole update from the channel. A dirty engine needs a full one to be clean again."""
        if self.dirty and not update.is_full:
            raise sync_error("the last update failed: only a full one makes this engine clean")
        is_stepping = bool(self.tracker.num_open) and not self.paused
        assert not (is_stepping and self.leader is not None), "an engine of several ranks is paused before an update"
        self.dirty = True  # from here on the weights are mixed, and no step is taken
        if self.job.placement.sync_content is SyncContent.ADAPTER:
            self._receive_adapter(update)
        else:
            self.llm.start_weight_update()
            self.llm.update_weights({"update_info": {"update": update}})
            self.llm.finish_weight_update(weight_version=str(update.version))
            self.reset_prefix_cache()
        self.dirty = False
        return self.sync_report()

    def verify_weights(self, update: Update) -> VerificationReport:
        """Take the same weights once more, and compare what the engine computes with, before and after.

        Adapters are not taken in again: vLLM's slots are compared with what comes.
        """
        if self.job.placement.sync_content is SyncContent.ADAPTER:
            from rlplan.runtime.weight_sync.adapter_state import compare_adapter

            tensors = self._received_adapter(update)
            return compare_adapter(self._vllm_worker.model_runner.model, self.job, tensors, update.version)
        state = self._transfer.state()
        self.receive_weights(update)
        report: VerificationReport = self._transfer.verification(state)
        return report

    def sync_report(self) -> ReceiveReport:
        """What the last update took here, or why it ended."""
        report: ReceiveReport = self._transfer.receiver.report
        return dataclasses.replace(report, applied_s=self._transfer.apply_s)

    def _receive_adapter(self, update: Update) -> None:
        """Take a version's adapters in.

        Samples begin with them when all ranks of the engine have them: what is paused says so when it resumes, and
        rank 0 says it to those that it leads.
        """
        transfer = self._transfer
        tensors = self._received_adapter(update)
        checksums = transfer.receiver.report.checksums
        start = time.perf_counter()
        self.adapters.take(self.llm, self.job, tensors, update.version, checksums)
        transfer.apply_s = time.perf_counter() - start
        if not self.paused and self.follower is None:
            self.adapters.switch(self.llm)

    def _received_adapter(self, update: Update) -> "dict[str, torch.Tensor]":
        return {name: tensor.cpu().clone() for name, tensor in self._transfer.receiver.tensors(update)}

    def file_checksums(self, folder: str) -> dict[str, int]:
        """Checksums of the weights in a folder, as this process reads them."""
        from rlplan.runtime.weight_sync.checksums import checksum_files

        return checksum_files(folder)

    def reset_prefix_cache(self) -> None:
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
            MemoryKind.SYNC_STAGING: self._transfer.num_bytes + adapter_bytes(runner.model),
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

    def _join_ranks(self, rank: int, address: tuple[str, int] | None) -> Any:
        """Meet the engine's other ranks, if any. vLLM takes the group that it finds, and the environment's ranks."""
        from rlplan.runtime.workers.engine.lock_step import join_ranks, join_single_rank

        if address is None:
            join_single_rank()
            return None
        world_size = int(self.arguments["tensor_parallel_size"])
        here = rank if self.job.device_kind == "cpu" else 0  # a process sees its own GPU alone
        names = {"RANK": rank, "LOCAL_RANK": here, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
        timeout = timedelta(seconds=self.job.limits.rank_timeout_s)
        return join_ranks(rank, world_size, address, timeout, self.take_listener())

    def _run_in_lock_step(self, rank: int, address: tuple[str, int], store: Any) -> None:
        from rlplan.runtime.workers.engine.lock_step import Follower, Leader

        if rank == 0:
            self.leader = Leader(store, int(self.arguments["tensor_parallel_size"]) - 1)
        else:
            self.tracker.samples = None
            self.follower = Follower(rank, address, lambda order: self.thread.run(lambda: self._obey(order)))

    def _obey(self, order: dict[str, Any]) -> None:
        """Do what rank 0 does: take requests in, drop them, or take a step."""
        if "enter" in order:
            requests = [RolloutRequest(**fields) for fields in order["enter"]]
            self.adapters.switch(self.llm, order["version"])
            self._add_requests(requests, self.outbox)
        elif "abandon" in order:
            self._drop_requests(order["abandon"])
        else:
            self._step()

    def _admit_requests(self, requests: Sequence[RolloutRequest], outbox: Outbox) -> None:
        assert self.follower is None, "rank 0 of an engine is asked, and leads the others"
        if self.leader is not None:
            fields = [dataclasses.asdict(request) for request in requests]
            self.leader.send_order({"enter": fields, "version": self.adapters.version})
        self._add_requests(requests, outbox)

    def _add_requests(self, requests: Sequence[RolloutRequest], outbox: Outbox) -> None:
        """Hand the samples to vLLM, all before the next step, so that what is computed together does not vary."""
        if self.dirty:
            raise sync_error("the last update failed: the weights are mixed, and nothing is generated from them")
        self.just_started = False
        by_id = {request.id: request for request in requests}
        for name, index in self.tracker.enter(requests, outbox):
            request = by_id[name]
            stop, ignores_eos = self.job.rollout.stop, self.job.workload.ignores_eos
            parameters = build_sampling_parameters(request, index, stop, ignores_eos=ignores_eos)
            prompt, adapter = engine_prompt(request), self.adapters.begin(f"{name}/{index}")
            self.llm.llm_engine.add_request(f"{name}/{index}", prompt, parameters, lora_request=adapter)

    def _drop_requests(self, request_ids: Sequence[str]) -> None:
        if left := [f"{name}/{index}" for name, index in self.tracker.drop(request_ids)]:
            self.llm.llm_engine.abort_request(left)
            for sample in left:
                self.adapters.end(self.llm, sample)

    def _step_if_possible(self) -> bool:
        """One step of the engine, where there is something to do and no other rank decides when."""
        if self.paused or self.dirty or not self.tracker.num_open or self.follower is not None:
            return False
        if self.leader is not None:
            self.leader.send_order({"step": True})
        self._step()
        return True

    def _step(self) -> None:
        try:
            self.num_steps += 1
            for output in self.llm.llm_engine.step():
                name, _, index = output.request_id.rpartition("/")
                version = self.adapters.end(self.llm, output.request_id)
                self.tracker.finish(name, int(index), read_completion(output.outputs[0], version))
        except BaseException as error:
            self.tracker.fail(error)
            raise
