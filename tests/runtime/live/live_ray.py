"""A Ray of one run, started from the current folder: where it listens, and where its processes look for modules.

In: nothing. Out: JSON on the standard output; then it waits to be killed. Started by test_own_host.py.
"""

import http.client
import json
import os
import subprocess
import sys
import time
import urllib.request
from typing import Any

import psutil

from rlplan.emit.execution import execution_spec
from rlplan.runtime.cluster.ray_cluster import Cluster
from rlplan.runtime.workers.worker import WorkerProcess
from tests.factories import make_plan

AGENTS_S = 8.0
"""Ray's agents open their ports some seconds after the rest."""
WAITS_S = 120.0
"""Seconds at most until it is killed."""


class Looker:
    """A worker that says where it and a program that it starts look for modules."""

    def __init__(self, process: str) -> None:
        self.process = process

    def invoke(self, method: str) -> Any:
        """Whatever it is asked."""
        command = [sys.executable, "-m", "site"]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        return {"own": sys.path, "child": child.stdout, "pid": os.getpid()}


def gives_metrics(port: int) -> bool:
    """Whether a port of this host tells Prometheus what it asks for."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
            return answer.status == 200
    except (OSError, http.client.HTTPException):
        return False


def main(log_folder: str) -> None:
    cluster = Cluster()
    cluster.reserve(execution_spec(make_plan()).ray, 60.0)
    import ray

    worker = ray.remote(WorkerProcess).options(scheduling_strategy=cluster.strategy(0))
    actor = worker.remote("tests.runtime.live.live_ray:Looker", "looker", log_folder)
    paths = ray.get(actor.call.remote("look"), timeout=60)
    time.sleep(AGENTS_S)
    me = psutil.Process()
    listening = [
        (process.name(), connection.laddr.ip, connection.laddr.port)
        for process in [me, *me.children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    (node,) = ray.nodes()
    answer = {
        "paths": paths,
        "listening": listening,
        "metrics_port": node["MetricsExportPort"],
        "metrics_answered": [port for port in listening if gives_metrics(port[2])],
    }
    print(json.dumps(answer), flush=True)
    time.sleep(WAITS_S)


if __name__ == "__main__":
    main(sys.argv[1])
