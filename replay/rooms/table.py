"""The new house: for each room its docstring, and where its modules come from.

room(folder, docstring, source, "names ..."): a name alone keeps its name; `new=old` renames. The docstring becomes the
room's __init__.py where the folder is a package of rlplan/ or cli/; None for tests and benchmarks, which have none.
"""

ROWS: dict[str, str] = {}  # old path -> new path
DOCSTRINGS: dict[str, str] = {}  # package folder -> docstring, written where __init__.py is absent or empty


def room(folder: str, docstring: str | None, *moves: str) -> None:
    """moves: "source: name new=old ..."."""
    if docstring:
        assert len(docstring) <= 114, (len(docstring), docstring)
        DOCSTRINGS[folder] = docstring
    for move in moves:
        source, _, names = move.partition(":")
        for name in names.split():
            new, _, old = name.partition("=")
            old_path, new_path = f"{source}/{old or new}.py", f"{folder}/{new}.py"
            assert old_path not in ROWS, old_path
            assert new_path not in ROWS.values(), new_path
            ROWS[old_path] = new_path


# ------------------------------------------------------------------------------------------------ packages as they are

DOCSTRINGS |= {
    "rlplan/dataflow": "What one RL step consists of, and where each action of it is done: the schedule.",
    "rlplan/memory": "Memory: from a schedule and what its processes are to bytes after and inside each action.",
    "rlplan/timing": "Timing: from a schedule and a machine's rates to seconds of each action.",
    "rlplan/simulate": "A schedule played step after step in simulated time, with sampled lengths.",
    "rlplan/planner": "From a job to a plan: what can run, what is tried, what is chosen, and what is said when nothing fits.",
    "rlplan/planner/gpu": "The search on GPUs: candidates, their bytes and seconds, the fastest that fits.",
    "rlplan/planner/answers": "What is answered of a plan: explanations, what changes would bring, simulated steps, files.",
    "rlplan/emit": "From a plan to the files that run it: DeepSpeed's, vLLM's and Ray's. Decides nothing.",
    "rlplan/runtime/weight_sync": "The trainer's weights on their way to the engines: who sends, who receives, what is checked.",
    "rlplan/runtime/sandbox": "Where programs of a model are run, and what they may do there.",
    "rlplan/runtime/sinks": "A run's numbers in other people's loggers.",
    "rlplan/runtime/rewards": "Rewards that follow rules: judged in processes of their own.",
    "rlplan/runtime/rewards/assertions": "Assertions about a program, evaluated outside of its sandbox.",
    "rlplan/runtime/checkpoints": "Checkpoints: what is saved, when it counts, how it is found and read again.",
    "rlplan/runtime/data": "Data sets, chat templates and tokenizers: from rows to prompts.",
    "rlplan/runtime/workers": "What runs in processes of its own: trainers, engines and scorers, on one base.",
    "rlplan/runtime/environments": "Environments: what answers the policy between the turns of a rollout.",
}

# ------------------------------------------------------------------------------------------------------------- memory

M = "rlplan/memory"
room(
    f"{M}/model",
    "What a model itself weighs: parameters, quantised weights, activations and logits of a pass.",
    f"{M}: params block block_families activations frozen logits quantization quantized_checkpoints",
)
room(
    f"{M}/trainers",
    "What a training rank keeps and reaches: ZeRO and other trainers, optimizers, peaks, checkpoints, offload.",
    f"{M}: zero sharding optimizers step_peak backward training checkpoints nvme",
)
room(
    f"{M}/serving",
    "What an engine keeps and reaches: weights, KV cache and peaks, by vLLM's arithmetic and by other engines'.",
    f"{M}: engine=serving kv=serving_kv peaks=serving_peaks versions=serving_versions weights=serving_weights",
    f"{M}: tensors=engine_tensors generation trtllm eager",
    f"{M}/gpu: kv_demand",
)
room(
    f"{M}/weight_sync",
    "What weight sync takes: how the weights are cut, and the staging of both sides.",
    f"{M}: buckets=transitions packets=weight_sync",
)
room(f"{M}/roles", "What each role's processes hold, action by action: on a CPU host and on GPUs.")
room(
    f"{M}/roles/cpu",
    "What the processes of each role hold on a CPU host, action by action.",
    f"{M}: engine=forecast_engine scorer=forecast_scorer trainer=forecast_trainer value=forecast_value",
)
room(
    f"{M}/roles/gpu",
    "What one rank of each role holds on its GPU and on its host, action by action.",
    f"{M}/gpu: engine exported process rank scorer states trainer checkpoint_copies=checkpoints",
)
room(
    f"{M}/machine",
    "What belongs to no model: allocator, libraries, the host's memory and processes beside the roles', spreads.",
    f"{M}: allocator overheads host sinks verifiers",
    f"{M}/gpu: spread",
)
room(M, None, f"{M}: predict_cpu=predict", f"{M}/gpu: predict_gpu=predict")

# ------------------------------------------------------------------------------------------------------------- timing

T = "rlplan/timing"
room(
    f"{T}/training",
    "Seconds of training and scoring on GPUs: passes, ZeRO's traffic, the optimizer's step.",
    f"{T}: passes flops elementwise kernels adapters mini_batch=training optimizer shards scoring",
)
room(
    f"{T}/serving",
    "Seconds of a rollout engine on GPUs: one step of it, a whole generation, latency under load.",
    f"{T}: counts=engine_counts step=engine_step generation occupancy load=serving_load",
)
room(
    f"{T}/transfer",
    "Seconds until bytes are somewhere else: weight sync, sleep and offload, checkpoints.",
    f"{T}: weight_sync wires switches checkpoints",
)
room(f"{T}/network", "The cluster and its links: seconds of collectives between ranks.", f"{T}: cluster links collectives")
room(
    f"{T}/cpu",
    "Seconds of every action on a CPU host.",
    f"{T}: actions=cpu engine=cpu_engine host=cpu_host eager",
)

# --------------------------------------------------------------------------------------------------------------- spec

S = "rlplan/spec"
room(
    f"{S}/files",
    "How a file or a command line becomes a job: YAML as data, short forms, keys of older versions.",
    f"{S}: job_file job_forms old_budget renamed yaml",
)
room(
    f"{S}/parts",
    "The parts of a job, each a frozen model of its own.",
    f"{S}: algorithm conduct environment lengths placement rewards roles rollout training workload",
)
room(
    f"{S}/hardware",
    "What machines offer: profiles as data, by name, each value with its source.",
    f"{S}: profile=hardware catalogue=profiles rates",
)

# ----------------------------------------------------------------------------------------------------------- accuracy

A = "rlplan/accuracy"
room(
    f"{A}/files",
    "Files of measured points: JSON, CSV, start-up logs of vLLM, memory snapshots of torch.",
    f"{A}: reading logs snapshots plain_pickle",
)
room(
    f"{A}/serving",
    "Points about engines: what they hold, and how fast they answer.",
    f"{A}: engine=engine_points other_engines=other_engine_points latency=serving_points",
)
room(
    f"{A}/training",
    "Points about training: peaks, steady states, throughput, the largest model that trains.",
    f"{A}: adapters=training_adapters states=training_held limits=training_limits methods=training_methods",
    f"{A}: points=training_points run=training_run scores=training_scores settings=training_settings",
    f"{A}: trainers=training_trainers zero=training_zero throughput=throughput_points",
)
room(
    f"{A}/rl_steps",
    "Points about whole RL steps, and about weight sync between two of them.",
    f"{A}: points=rl_step_points settings=rl_step_settings weight_sync=sync_points",
)

# ------------------------------------------------------------------------------------------------------------ planner

P = "rlplan/planner"
room(
    f"{P}/checks",
    "Jobs that are refused before anything is counted: by target, by model and by GPU.",
    f"{P}: targets=target_checks gpus=gpu_checks",
)
room(f"{P}/cpu", "The search on a CPU host: every choice that it can run is built and timed.", f"{P}: candidates search=host_search")
room(f"{P}/answers", None, f"{P}: played_job")

# ------------------------------------------------------------------------------------------------------------ runtime

R = "rlplan/runtime"
W = f"{R}/workers"
room(
    f"{R}/driver",
    "One run from its first process to its last: checks, start, each action when the schedule says so.",
    f"{R}: launch preflight rehearsal starter controller player steps calls switches events",
)
room(
    f"{R}/fault_tolerance",
    "What is lost while a run goes on and how it comes back; runs that go on where another stopped.",
    f"{R}: supervision revival resuming",
)
room(
    f"{R}/cluster",
    "Processes on hosts: Ray, the devices reserved on it, the workers' actors and their addresses.",
    f"{R}: ray_cluster=cluster crew islands",
    f"{W}: network without_arrow",
)
room(
    f"{R}/rollout",
    "Rollouts on the driver's side: what is asked of which engine, and what becomes of the answers.",
    f"{R}: requests collector fleet groups buffer rollout_stream sample_watch experience",
)
room(
    f"{R}/learning",
    "What a step makes of its rollouts, on the driver's side: mini-batches, packs, optimizer steps.",
    f"{R}: learner mini_batch packing agreement",
)
room(
    f"{R}/models",
    "The models themselves: where they come from, their heads and adapters, ranks that share one.",
    f"{R}: logprob_model value_model adapters quantized_base packed_attention sequence_parallel tensor_parallel",
    f"{R}: sharded_loading start_checkpoint hub",
)
room(f"{R}/data", None, f"{R}: end_tokens role_tokenizers")
room(
    f"{R}/measure",
    "What is measured: memory of processes, a step's numbers, leaks, traces of models, rates of this machine.",
    f"{R}: step_metrics leaks tracing trace_estimate trace_kernels microbench microbench_ranks measured_profile",
    f"{W}: memory_meter device_memory",
)
room(
    f"{R}/run_folder",
    "The run folder: whose it is, what is written into it, and what a disk that fails does to a run.",
    f"{R}: recorder run_files claim disk_errors",
)
room(
    f"{R}/host",
    "What this machine has and lacks: GPUs, packages, the keys that installed engines know.",
    f"{R}: detect devices doctor engine_keys",
)
room(
    f"{R}/processes",
    "Rules that every process of a run keeps: its path, its end, signals, waits that scale.",
    f"{R}: child_processes orphans own_path interrupts machine_speed",
)
room(f"{R}/weight_sync", None, f"{R}: handover handed_over")
room(
    f"{R}/weight_sync/transports",
    "How packets travel: one file a transport, found by name.",
    f"{R}/weight_sync: arena cuda_ipc disk gloo nccl shared_memory registry=transports",
)
room(
    f"{R}/weight_sync/contents",
    "What packets hold: every weight, what has changed, or an adapter.",
    f"{R}/weight_sync: full=full_content delta=delta_content adapter",
)
room(
    f"{W}/trainer",
    "Trainer ranks on DeepSpeed: the policy's and the value model's.",
    f"{W}: deepspeed_engine policy_trainer value_trainer pass_summary parked_states state_saver trained_states",
)
room(
    f"{W}/engine",
    "The rollout engine on vLLM, stepped by a loop of ours.",
    f"{W}: rollout_engine lock_step request_book sampling guessed_tokens weight_packing own_thread",
)

# ---------------------------------------------------------------------------------------------------------------- cli

C = "cli/rlplan_cli"
room(
    f"{C}/commands",
    "The commands, a file for each verb: parse, call the library, render. Imported when called.",
    f"{C}: accuracy doctor emit estimate explain plan profiles report run simulate",
)
room(
    f"{C}/render",
    "Everything that is drawn in a terminal.",
    f"{C}: terminal=render estimate=render_estimate explain=render_explain gpu=render_gpu plan=render_plan",
    f"{C}: simulation=render_simulation progress run_summary waiting",
)

# --------------------------------------------------------------------------------------------------------- benchmarks

B = "benchmarks"
room(
    f"{B}/learning",
    None,
    f"{B}: against_trl=learning_against_trl charts=learning_charts curves=learning_curves",
    f"{B}: curves_in_process=learning_in_process page=learning_page record=learning_record in_process",
)
room(f"{B}/trl", None, f"{B}: comparison=trl_comparison")
room(f"{B}/runs", None, f"{B}: async_against_sync maturity_levels reward_overlap timed_runs")
room(f"{B}/simulated", None, f"{B}: staleness_sweep plain_schedule")

# -------------------------------------------------------------------------------------------------------------- tests

X = "tests"
room(
    f"{X}/docs",
    None,
    f"{X}: test_pages=test_docs test_algorithms=test_docs_algorithms test_estimates=test_docs_estimates",
    f"{X}: test_exercises=test_docs_exercises test_job=test_docs_job test_memory_model=test_docs_memory_model",
    f"{X}: test_planning=test_docs_planning test_runtime=test_docs_runtime test_names_in_prose documentation",
)
room(f"{X}/spec/hardware", None, f"{X}: test_hardware_profiles", f"{X}/spec: test_profile=test_hardware test_cpu_profile")
room(f"{X}/spec/files", None, f"{X}/spec: test_yaml")
room(f"{X}/spec/parts", None, f"{X}/spec: test_algorithm test_lengths")
room(
    f"{X}/spec/models",
    None,
    f"{X}/spec: test_against_transformers=test_model_against_transformers test_bad_configs=test_model_bad_configs",
    f"{X}/spec: test_catalogue=test_model_catalogue test_families=test_model_families test_headers=test_model_headers",
    f"{X}/spec: test_shards=test_model_shards",
)
room(f"{X}/repository", None, f"{X}: test_makefile test_packaging test_security")
XM = f"{X}/memory"
room(
    f"{XM}/model",
    None,
    f"{XM}: test_activations test_activations_traced test_block_families test_frozen test_logits test_params",
    f"{XM}: test_quantization traced_layers",
)
room(
    f"{XM}/trainers",
    None,
    f"{XM}: test_backward test_checkpoints test_sharding test_step_peak test_training test_training_states live_zero",
)
room(
    f"{XM}/serving",
    None,
    f"{XM}: test_engine=test_serving test_engine_rows test_generation engine_cases live_vllm",
    f"{XM}/gpu: test_kv_demand",
)
room(f"{XM}/weight_sync", None, f"{XM}: test_buckets=test_transitions test_packets=test_weight_sync")
room(f"{XM}/roles/gpu", None, f"{XM}/gpu: conftest test_cut_trainers test_forecasts")
room(f"{XM}/machine", None, f"{XM}: test_overheads")
room(XM, None, f"{XM}: test_predict_cpu=test_predict")
XT = f"{X}/timing"
room(f"{XT}/training", None, f"{XT}: test_flops test_mini_batch=test_training")
room(f"{XT}/serving", None, f"{XT}: test_step=test_engine_step test_generation test_load=test_serving_load")
room(f"{XT}/transfer", None, f"{XT}: test_switches test_weight_sync")
room(f"{XT}/network", None, f"{XT}: test_collectives")
room(f"{XT}/cpu", None, f"{XT}: test_actions=test_cpu test_eager")
XA = f"{X}/accuracy"
room(f"{XA}/files", None, f"{XA}: test_reading")
room(f"{XA}/serving", None, f"{XA}: test_latency=test_serving_points")
room(f"{XA}/training", None, f"{XA}: test_points=test_training_points test_throughput=test_throughput_points")
room(f"{XA}/rl_steps", None, f"{XA}: test_points=test_rl_step_points test_weight_sync=test_sync_points")
XP = f"{X}/planner"
room(f"{XP}/checks", None, f"{XP}: test_targets=test_target_checks")
room(f"{XP}/cpu", None, f"{XP}: test_candidates")
room(f"{XP}/answers", None, f"{XP}: test_played_job")
XR = f"{X}/runtime"
room(
    f"{XR}/live",
    None,
    f"{XR}: live_checkpoints live_cut live_engine live_ranks live_ray live_roles live_trainer live_workers",
)
room(
    f"{XR}/runs",
    None,
    f"{XR}: test_algorithm_runs test_role_runs test_training_runs test_runs test_resumed_runs test_placements",
    f"{XR}: test_gpu_shapes gpu_shapes test_learning beside_the_plan",
)
room(f"{XR}/driver", None, f"{XR}: test_controller test_preflight test_rehearsal test_placement_names")
room(f"{XR}/fault_tolerance", None, f"{XR}: test_supervision test_resuming test_failures")
room(f"{XR}/cluster", None, f"{XR}: test_ray_cluster=test_cluster test_islands test_fake_gpus hosts")
room(
    f"{XR}/rollout",
    None,
    f"{XR}: test_buffer test_fleet test_groups test_requests test_rollout_stream test_empty_completions",
)
room(f"{XR}/learning", None, f"{XR}: test_learner test_packing test_agreement")
room(f"{XR}/losses", None, f"{XR}: test_losses test_losses_against_trl trl_code")
room(
    f"{XR}/models",
    None,
    f"{XR}: test_logprob_model test_sequence_parallel test_tensor_parallel test_sharded_loading test_start_checkpoint",
    f"{XR}: test_hub",
)
room(f"{XR}/data", None, f"{XR}: test_role_tokenizers")
room(f"{XR}/rewards", None, f"{XR}: test_verifiers")
room(f"{XR}/measure", None, f"{XR}: test_leaks test_microbench test_tracing")
room(f"{XR}/run_folder", None, f"{XR}: test_claim test_disk_errors small_disk")
room(f"{XR}/host", None, f"{XR}: test_detect test_devices=test_gpu_devices test_engine_keys")
room(
    f"{XR}/processes",
    None,
    f"{XR}: test_child_processes test_interrupts test_machine_speed test_own_host test_driver_imports",
)
room(f"{XR}/weight_sync", None, f"{XR}: test_handover test_transports=test_weight_sync test_engines=test_weight_sync_engines")
room(
    f"{XR}/workers/trainer",
    None,
    f"{XR}: test_policy_trainer test_policy_metrics test_parked_states test_trained_states test_trainer_memory",
    f"{XR}: test_resumed_states test_quantized_training test_half_precision test_roles agreement",
)
room(f"{XR}/workers/engine", None, f"{XR}: test_rollout_engine test_request_book test_own_thread")
room(f"{XR}/workers", None, f"{XR}: test_shared_scorers")

FOLDERS = {"rlplan/memory/gpu": "rlplan/memory/roles/gpu", "tests/memory/gpu": "tests/memory/roles/gpu"}
"""Folders that moved as a whole, for prose that names a folder."""
