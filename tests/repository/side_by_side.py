"""How the processes of `make test` share the files: the slow ones begin first, and some stay together.

In: the tests that were collected. Out: their order, and which files one process takes as if they were one.
What is left for the end is short: otherwise one process would wait for the other's last run.
"""

from typing import Any

from xdist.scheduler import LoadFileScheduling

LIVE_RANKS = (
    "tests/runtime/models/test_sequence_parallel.py",
    "tests/runtime/models/test_tensor_parallel.py",
    "tests/runtime/workers/trainer/test_half_precision.py",
    "tests/runtime/workers/trainer/test_policy_trainer.py",
    "tests/runtime/workers/trainer/test_quantized_training.py",
    "tests/runtime/workers/trainer/test_resumed_states.py",
    "tests/runtime/workers/trainer/test_roles.py",
    "tests/runtime/models/test_sharded_loading.py",
    "tests/memory/trainers/test_training_states.py",
)
"""Files whose ranks are forks of one process (tests/runtime/live/live_forks.py), which imports DeepSpeed once."""
INSTALLED_VLLM = (
    "tests/emit/test_gpu_bundles.py",
    "tests/foreign/export/test_upstream.py",
    "tests/runtime/host/test_engine_api.py",
    "tests/runtime/host/test_engine_keys.py",
)
"""Files that import vLLM into the tests' own process: 14 s of CPU, once."""
LONGEST = (
    "tests/runtime/runs/test_resumed_runs.py",
    "tests/runtime/device/test_whole_runs.py",
    "tests/runtime/runs/test_runs.py",
    "tests/runtime/fault_tolerance/test_failures.py",
)
"""Files of whole runs that begin. The colocated run of the first is ready when the third asks for it."""
RUNS = (
    "tests/runtime/processes/test_own_host.py",
    "tests/runtime/cluster/test_ray_cluster.py",
    "tests/runtime/environments/test_environment_runs.py",
)
"""Files of a whole run each."""
PROGRAMS = ("tests/runtime/rewards/test_reward_runs.py", "tests/runtime/runs/test_placements.py")
"""Files that look at the asynchronous run; the first one makes it, and looks at what it leaves behind."""
ENGINES = ("tests/memory/serving/test_engine_rows.py", "tests/runtime/workers/engine/test_rollout_engine.py")
"""Files whose engines are forks of one process (tests/runtime/live/live_forks.py), which imports vLLM once."""
OTHERS = ("tests/runtime/weight_sync/test_engines.py", "tests/runtime/cluster/test_fake_gpus.py")
PREDICTED_POINTS = (
    "tests/accuracy/test_bounds.py",
    "tests/benchmarks/test_intervals.py",
    "tests/accuracy/test_serving_points.py",
    "tests/benchmarks/test_accuracy_evidence.py",
)
"""Files that look at the comparison of all bundled points: 6 s of CPU, once."""
OUR_SOURCES = (
    "tests/docs/test_names_in_prose.py",
    "tests/repository/test_structure.py",
    "tests/spec/test_declaration.py",
)
"""Files that look at the trees of our own Python files (tests/repository/sources.py): 4 s of CPU, once."""
LIVE_MODULES = (
    "tests/cli/test_estimate_gpus.py",
    "tests/memory/model/test_activations.py",
    "tests/memory/model/test_activations_traced.py",
    "tests/memory/model/test_block_families.py",
    "tests/runtime/environments/test_tools.py",
    "tests/runtime/measure/test_tracing.py",
    "tests/runtime/models/test_logprob_model.py",
    "tests/runtime/models/test_start_checkpoint.py",
    "tests/runtime/runs/test_learning.py",
    "tests/runtime/weight_sync/test_checkpoint_names.py",
    "tests/runtime/workers/trainer/test_learning_rates.py",
    "tests/spec/models/test_against_transformers.py",
    "tests/spec/models/test_catalogue.py",
    "tests/spec/models/test_families.py",
)
"""Files that import transformers' models into the tests' own process, when a test asks: 7 s of CPU, once."""
GROUPS = {
    "ranks": LIVE_RANKS,
    "engines": ENGINES,
    "programs": PROGRAMS,
    "vllm": INSTALLED_VLLM,
    "points": PREDICTED_POINTS,
    "sources": OUR_SOURCES,
    "modules": LIVE_MODULES,
}
TOGETHER = {file: name for name, files in GROUPS.items() for file in files}
WITH_ENGINES = (*LONGEST, *LIVE_RANKS, *RUNS, *ENGINES, *PROGRAMS, *OTHERS, *INSTALLED_VLLM)
WITHOUT = ("tests/trust/test_fuzz.py", "tests/trust/test_sizes.py")
"""A file without engines that takes long and would be the last by its name, and a short one, which is given to the
process that has the soak."""
NIGHTLY = ("tests/trust/faults/test_soak.py", "tests/trust/faults/test_fault_matrix.py")
"""The longest of `make nightly PART=trust`: a process each, while a third one takes the rest."""
FIRST = {file: at for at, file in enumerate((*NIGHTLY, *WITH_ENGINES, *WITHOUT))}


def find_place(node_id: str) -> int:
    """Where a test stands: those of the files above first, all others as they were collected."""
    return FIRST.get(node_id.partition("::")[0], len(FIRST))


class FilesTogether(LoadFileScheduling):
    """A file's tests stay in one process, and so do those of files that share what they start."""

    def _split_scope(self, node_id: str) -> str:
        file: Any = super()._split_scope(node_id)
        return TOGETHER.get(file, file)
