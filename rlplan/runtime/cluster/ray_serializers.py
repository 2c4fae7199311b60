"""Ray's serializers without pyarrow: where it is installed, Ray loads it into the driver and every worker, to send
tables.

Nothing here sends tables, and it is 25 to 44 MiB a process (pyarrow 26, measured with and without numpy loaded before).
In: nothing. Out: a Ray that registers no serializers for them. pyarrow itself is read in a process of its own
(data/tables.py).
"""

WORKER_HOOK = {"worker_process_setup_hook": f"{__name__}.keep_arrow_out"}
"""Part of a job's runtime environment: every worker calls it before it is sent anything."""


def keep_arrow_out() -> None:
    """Before `ray.init` in the driver, before the first object in a worker."""
    from ray._private import arrow_serialization

    arrow_serialization._register_custom_datasets_serializers = lambda context: None
