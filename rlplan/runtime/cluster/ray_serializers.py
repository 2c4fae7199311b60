"""Keeps pyarrow out of Ray's workers.

Ray loads pyarrow into the driver and every worker to serialize tables, which a run never sends. It costs 25 to 44 MiB
per process (pyarrow 26, measured with and without numpy loaded before). rlplan itself uses pyarrow in the driver, which
writes the rollouts (run_folder/rollout_files.py), and in the process that reads tables (data/tables.py).
"""

WORKER_HOOK = {"worker_process_setup_hook": f"{__name__}.keep_arrow_out"}
"""Part of a job's runtime environment: every worker calls the hook before it receives anything."""


def keep_arrow_out() -> None:
    """Turn off Ray's serializers for tables. Call it before `ray.init`, and in a worker before its first object."""
    from ray._private import arrow_serialization

    arrow_serialization._register_custom_datasets_serializers = lambda context: None
