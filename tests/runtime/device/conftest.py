"""Left out of collection: what prepares a worker process when it is imported."""

collect_ignore = ["stand_in_workers.py"]
