"""RolloutEngine: the policy on vLLM in a worker process, stepped by rlplan's own loop.

In: token ids of prompts. Out: sampled tokens with their log-probs and weight versions. New weights arrive through
`weight_sync/`; requests may arrive, and weights may change, between any two engine steps.
With tensor parallelism each rank is such a process; rank 0 takes requests and leads the others in lock step
(lock_step.py).
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

from rlplan.memory.weight_sync.packets import plan_policy_packets
from rlplan.runtime.host.engine_keys import check_vllm
from rlplan.runtime.images.in_vllm import ARCHITECTURE, make_engine_prompt, register_image_model
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
from rlplan.runtime.workers.engine.engine_thread import EngineThread
from rlplan.runtime.workers.engine.held_adapters import HeldAdapters
from rlplan.runtime.workers.engine.request_tracker import Outbox, RequestTracker
from rlplan.runtime.workers.engine.sampling import build_sampling_parameters, read_completion
from rlplan.runtime.workers.engine.vllm_on_cpu import (
    choose_cpu_arguments,
    fix_temperature_expansion,
    register_cpu_kernels,
    request_amx_tiles,
)
from rlplan.runtime.workers.worker import Worker, disable_garbage_collection
from rlplan.spec.model import read_model
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import MemoryKind, Role, SyncContent

if TYPE_CHECKING:
    import torch

    from rlplan.runtime.weight_sync.shared_base import OpenedBase
    from rlplan.runtime.workers.engine.lock_step import Follower, Leader
    from rlplan.runtime.workers.engine.routing_recorder import RoutingRecorder


class RolloutEngine(Worker):
    """See the module docstring. dirty: a weight update failed half-way; only a full update clears it.

    Every method runs in the engine thread, between two steps, except those in `WAITING`.
    """

    WAITING = ("generate", "collect", "finished_samples")
    """Methods that block until samples finish; the engine thread has to take steps meanwhile."""

    def __init__(self, process: str, job: ResolvedJob, arguments: dict[str, Any], num_threads: int) -> None:
        super().__init__(process)
        self.job, self.arguments, self.num_threads = job, arguments, num_threads
        self.llm: Any = None
        self.adapters = HeldAdapters(0, 0)
        self.base: OpenedBase | None = None
        self.recorder: RoutingRecorder | None = None
        self.dirty = False
        self.paused = False
        self.just_started = False
        self.tracker, self.outbox, self.samples = RequestTracker(), Outbox(), Outbox()
        self.tracker.samples = self.samples if job.has_reward_processes else None
        self.num_steps = 0
        self.leader: Leader | None = None
        self.follower: Follower | None = None
        self.thread = EngineThread(process, self._step_if_possible)

    def invoke(self, method: str, *arguments: Any) -> Any:
        """Call a method in the engine thread, or in the caller's thread if it waits for samples."""
        if method in self.WAITING:
            return super().invoke(method, *arguments)
        return self.thread.run(lambda: super(RolloutEngine, self).invoke(method, *arguments))

    def pulse(self) -> float:
        """The number of steps while the engine has work, so that an engine that hangs is noticed."""
        has_work = self.tracker.num_open and not self.paused and not self.dirty
        return float(self.num_steps) if has_work else super().pulse()

    @disable_garbage_collection()
    def import_libraries(self) -> None:
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
        """Load the model and allocate the KV cache. An engine that exists already is stopped first.

        address: the ranks' rendezvous, if there are several. version: version of the weights in the folder. base: the
        trainer's frozen base, if the engine shares it.
        """
        import torch
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from rlplan.runtime.weight_sync.shared_base import OpenedBase
        from rlplan.runtime.workers.engine.base_loading import load_from_base
        from rlplan.runtime.workers.engine.lock_step import name_memory_by_port
        from rlplan.runtime.workers.engine.weight_packing import watch_weight_packing
        from rlplan.runtime.workers.worker_device import worker_device

        worker_device(self.job)  # selects the GPU; raises an error where the process sees none
        if self.job.rollout.base_path is not None:
            request_amx_tiles()
        self.stop()
        arguments = self.arguments | (
            {} if self.job.is_on_gpus else choose_cpu_arguments(read_model(Path(model_folder)))
        )
        arguments["weight_transfer_config"] = WeightTransferConfig(**arguments["weight_transfer_config"])
        store = self._join_ranks(rank, address)
        self._close_base()  # an earlier start may have failed after opening it
        if base is not None:
            self.base = OpenedBase(base, self.job.load_model(), getattr(torch, self.job.rollout.dtype.value))
        shared_memory_name = name_memory_by_port(address[1]) if address else nullcontext()
        with watch_weight_packing(self.base) as packing, load_from_base(self.base), shared_memory_name:
            llm = LLM(model=model_folder, **arguments)
        self.packing, self.llm, self.just_started, self.dirty = packing, llm, True, False
        if "speculative_config" in arguments:  # after LLM(), which installs vLLM's own replacement
            fix_temperature_expansion()
        if self.job.rollout.replays_experts:
            from rlplan.runtime.workers.engine.routing_recorder import RoutingRecorder

            self.recorder = RoutingRecorder(self._vllm_worker.model_runner)
        # vLLM labels weights from files `default`, which `read_completion` takes for version 0.
        self.llm.update_weight_version(str(version))
        self.adapters = HeldAdapters(self.arguments.get("max_loras", 0), version)
        if address:
            self._run_in_lock_step(rank, address, store)

    def stop(self) -> None:
        """Destroy the engine, if there is one, and free its memory; `start` creates a new one in the same process.

        Also clears `dirty`, because a new engine starts with complete weights.
        """
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if self.llm is None:
            return
        assert not self.tracker.num_open, "an engine is stopped when no request is open"
        if self.follower is not None:
            self.follower.stop()
        self.llm.llm_engine.engine_core.shutdown()
        self.llm, self.leader, self.follower, self.dirty, self.recorder = None, None, None, False, None
        cleanup_dist_env_and_memory()
        self._close_base()
        gc.unfreeze()  # the engine's objects form cycles, and frozen objects are never collected
        gc.collect()
        gc.freeze()  # keep collections of the next start from visiting all modules again
        give_memory_back()

    def _close_base(self) -> None:
        if self.base is not None:
            gc.collect()  # an embedding in one of vLLM's reference cycles would keep the base mapped
            self.base.close()
            self.base = None

    def sleep(self, level: int) -> None:
        """Free the GPU memory of weights and KV cache. Level 2 drops the weights, which are then sent again.

        Not yet run on a GPU; on a CPU vLLM only changes its state.
        """
        assert not self.tracker.num_open, "an engine sleeps when no request is open"
        self.llm.sleep(level=level)

    def wake(self, tags: list[str]) -> None:
        """Allocate GPU memory again. tags: `weights` or `kv_cache`. Not yet run on a GPU."""
        self.llm.wake_up(tags=tags)
        if "kv_cache" in tags:
            self.reset_prefix_cache()

    def generate(self, requests: Sequence[RolloutRequest]) -> list[FinishedRequest]:
        """Complete the requests and return them in order. A follower waits for the same requests but returns none."""
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
        """Start the requests in addition to those that are open; `collect` returns them when finished."""
        self._admit_requests(requests, self.outbox)

    def collect(self, max_wait_s: float, at_least: int = 1) -> list[FinishedRequest]:
        """Return submitted requests that have finished; wait at most `max_wait_s` for `at_least` of them."""
        return self.outbox.take(at_least, max_wait_s)

    def finished_samples(self, max_wait_s: float) -> list[FinishedRequest]:
        """Return samples that have finished, also of open requests; wait at most `max_wait_s` for the first."""
        return self.samples.take(1, max_wait_s)

    def abandon(self, request_ids: Sequence[str]) -> None:
        """Drop these requests and their unfinished samples; the driver submits them again."""
        if self.leader is not None:
            self.leader.send_order({"abandon": list(request_ids)})
        self._drop_requests(request_ids)

    def pause(self) -> int:
        """Take no more steps until `resume`, but keep open requests; return their number."""
        self.paused = True
        return self.tracker.num_open

    def resume(self) -> None:
        self.paused = False
        self.adapters.switch(self.llm)

    def open_channel(self, endpoint: Endpoint, reader: int) -> None:
        """Open the weight-sync channel on this side and close an earlier one."""
        self.just_started = False
        packets = plan_policy_packets(self.job, self.job.load_model())
        takes_deltas = self.job.placement.sync_content is SyncContent.DELTA
        channel = {"endpoint": endpoint, "packets": packets, "reader": reader, "takes_deltas": takes_deltas}
        self.llm.init_weight_transfer_engine({"init_info": channel})

    def receive_weights(self, update: Update) -> ReceiveReport:
        """Receive and load one update. A dirty engine needs a full one."""
        if self.dirty and not update.is_full:
            raise sync_error("the last weight update failed half-way: this engine needs a full update")
        # Ranks receive an update independently, so they would change weights at different steps.
        is_stepping = bool(self.tracker.num_open) and not self.paused
        assert not (is_stepping and self.leader is not None), "an engine of several ranks is paused before an update"
        self.dirty = True  # versions are mixed until the update ends, so no step may be taken
        if self.job.placement.sync_content is SyncContent.ADAPTER:
            self._receive_adapter(update)  # cached prefixes stay, because vLLM keeps them apart by adapter name
        else:
            self.llm.start_weight_update()
            self.llm.update_weights({"update_info": {"update": update}})
            self.llm.finish_weight_update(weight_version=str(update.version))
            self.reset_prefix_cache()
        self.dirty = False
        return self.sync_report()

    def verify_weights(self, update: Update) -> VerificationReport:
        """Receive the same weights again and compare the engine's parameters before and after.

        Adapters are not loaded again: vLLM's adapter slots are compared with the received matrices.
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
        """Report of the last update: bytes, seconds and checksums, or the mismatch that ended it."""
        report: ReceiveReport = self._transfer.receiver.report
        return dataclasses.replace(report, applied_s=self._transfer.apply_s)

    def _receive_adapter(self, update: Update) -> None:
        """Receive and load a version's adapter.

        New samples may use it only once all ranks of the engine have it. So a paused engine switches when it resumes,
        and followers switch when rank 0 sends the next requests.
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
        """Checksums of the weights in a folder, as read by this process."""
        from rlplan.runtime.weight_sync.checksums import checksum_files

        return checksum_files(folder)

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes after a weight update, which vLLM does not; open requests recompute theirs."""
        if not self.llm.llm_engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache")

    def components(self) -> dict[tuple[str, str], int]:
        """Bytes of parameters, packed weights, KV cache and weight-sync buffers."""
        if self.llm is None:
            return {}
        runner = self._vllm_worker.model_runner
        sizes = {
            MemoryKind.WEIGHTS: self.packing.kept_bytes,
            MemoryKind.PACKED_WEIGHTS: self.packing.packed_bytes,
            MemoryKind.KV_CACHE: storage_bytes(runner.kv_caches),
            MemoryKind.SYNC_STAGING: self._transfer.num_bytes + adapter_bytes(runner.model),
        }
        return {(Role.POLICY.value, kind.value): size for kind, size in sizes.items()}

    def loaded_components(self) -> dict[tuple[str, str], int]:
        """Bytes of the weights while loading, before they were packed."""
        return {(Role.POLICY.value, MemoryKind.WEIGHTS.value): self.packing.loaded_bytes} if self.just_started else {}

    @property
    def _vllm_worker(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker

    @property
    def _transfer(self) -> Any:
        return self._vllm_worker.weight_transfer_engine

    def _join_ranks(self, rank: int, address: tuple[str, int] | None) -> Any:
        """Join the engine's other ranks, if any. vLLM uses the existing group and the ranks in the environment."""
        from rlplan.runtime.workers.engine.lock_step import join_ranks, join_single_rank

        if address is None:
            join_single_rank()
            return None
        world_size = int(self.arguments["tensor_parallel_size"])
        local_rank = rank if self.job.device_kind == "cpu" else 0  # a process sees only its own GPU
        names = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
        timeout = timedelta(seconds=self.job.limits.rank_timeout_s)
        return join_ranks(rank, world_size, address, timeout, self.take_listener())

    def _run_in_lock_step(self, rank: int, address: tuple[str, int], store: Any) -> None:
        from rlplan.runtime.workers.engine.lock_step import Follower, Leader

        if rank == 0:
            self.leader = Leader(store, int(self.arguments["tensor_parallel_size"]) - 1)
        else:
            self.tracker.samples = None  # the driver takes samples from rank 0 only, so this outbox would only grow
            self.follower = Follower(rank, address, lambda order: self.thread.run(lambda: self._obey(order)))

    def _obey(self, order: dict[str, Any]) -> None:
        """Execute an order of rank 0: admit requests, drop requests, or take a step."""
        if "enter" in order:
            requests = [RolloutRequest(**fields) for fields in order["enter"]]
            self.adapters.switch(self.llm, order["version"])
            self._add_requests(requests, self.outbox)
        elif "abandon" in order:
            self._drop_requests(order["abandon"])
        else:
            self._step()

    def _admit_requests(self, requests: Sequence[RolloutRequest], outbox: Outbox) -> None:
        assert self.follower is None, "only rank 0 of an engine takes requests"
        if self.leader is not None:
            fields = [dataclasses.asdict(request) for request in requests]
            self.leader.send_order({"enter": fields, "version": self.adapters.version})
        self._add_requests(requests, outbox)

    def _add_requests(self, requests: Sequence[RolloutRequest], outbox: Outbox) -> None:
        """Add all samples to vLLM before the next step, so that batches are reproducible."""
        if self.dirty:
            raise sync_error(
                "the last weight update failed half-way: versions are mixed, so this engine cannot generate"
            )
        self.just_started = False
        by_id = {request.id: request for request in requests}
        for name, index in self.tracker.enter(requests, outbox):
            request = by_id[name]
            stop, ignores_eos = (*self.job.rollout.stop, *request.stop), self.job.workload.ignores_eos
            parameters = build_sampling_parameters(request, index, stop, ignores_eos=ignores_eos)
            prompt, adapter = make_engine_prompt(request), self.adapters.begin(f"{name}/{index}")
            self.llm.llm_engine.add_request(f"{name}/{index}", prompt, parameters, lora_request=adapter)

    def _drop_requests(self, request_ids: Sequence[str]) -> None:
        if unfinished := [f"{name}/{index}" for name, index in self.tracker.drop(request_ids)]:
            self.llm.llm_engine.abort_request(unfinished)
            for sample in unfinished:
                self.adapters.end(self.llm, sample)
                if self.recorder is not None:
                    self.recorder.take(sample)

    def _step_if_possible(self) -> bool:
        """Take one engine step if there is work and this rank decides about steps; return whether it did."""
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
                experts = self.recorder.take(output.request_id) if self.recorder is not None else None
                self.tracker.finish(name, int(index), read_completion(output.outputs[0], version, experts))
        except BaseException as error:
            self.tracker.fail(error)
            raise
