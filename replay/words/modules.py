"""Modules renamed: (base name, new base name, packages). Tests `test_NAME.py` and `live_NAME.py` follow."""

MODULES = [
    # runtime
    ("crew", "worker_group", "rlplan/runtime"),
    ("calls", "action_dispatcher", "rlplan/runtime"),
    ("desk", "reward_pool", "rlplan/runtime"),
    ("orphans", "parent_death", "rlplan/runtime"),
    ("without_arrow", "ray_serializers", "rlplan/runtime"),
    ("guessed_tokens", "speculative_decoding", "rlplan/runtime"),
    ("parked_states", "offloaded_states", "rlplan/runtime"),
    ("request_book", "request_tracker", "rlplan/runtime"),
    ("own_path", "safe_path", "rlplan/runtime"),
    ("own_thread", "engine_thread", "rlplan/runtime"),
    ("own_device", "worker_device", "rlplan/runtime"),
    ("handed_over", "weight_verification", "rlplan/runtime"),
    ("handover", "weight_sync_driver", "rlplan/runtime"),
    ("revival", "recovery", "rlplan/runtime"),
    ("agreement", "logprob_mismatch", "rlplan/runtime"),
    ("claim", "run_lock", "rlplan/runtime"),
    # the rest
    ("crew", "engine_pool", "rlplan/simulate"),
    ("later", "timeout", "rlplan/simulate"),
    ("running_ahead", "async_rollouts", "rlplan/dataflow"),
    ("transitions", "sync_buckets", "rlplan/memory"),
    ("rated", "scored_candidates", "rlplan/planner"),
    ("ladder", "fallbacks", "rlplan/planner"),
    ("played", "simulated_plan", "rlplan/planner"),
    ("played_job", "simulated_job", "rlplan/planner"),
    ("frames", "dataframes", "rlplan/report"),
    ("turns", "time_shared_memory", "rlplan/memory"),
    ("training_held", "training_states", "rlplan/accuracy"),
    ("later_points", "unpredicted_points", "rlplan/accuracy"),
]
