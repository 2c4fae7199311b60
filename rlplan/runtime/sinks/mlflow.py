"""MLflow through the REST API of a tracking server, without the package mlflow, which needs forty other packages.

Metrics that the server does not take wait for the next step, and after the run for `timeout_s`. A resumed run is found
by its id, which is a tag.

In: names and numbers of a step; MLFLOW_TRACKING_URI, and MLFLOW_TRACKING_TOKEN, or ..._USERNAME and ..._PASSWORD. Out:
metrics of a run on the server. Source: MLflow 3, REST API 2.0. Left out: artifacts and parameters.
"""

import base64
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from rlplan.runtime.sinks.follow import Destination

MAX_METRICS = 1000
"""Most metrics of one request. Source: MLflow, REST API, `runs/log-batch`."""
REQUEST_S = 10.0
RETRY_S = 1.0
TAG = "rlplan_run_id"


class MLflow:
    """See the module docstring. Raises: OSError when the server refuses the run, not when it is unreachable."""

    def __init__(self, destination: Destination) -> None:
        self._to, self._run = destination, ""
        self._waiting: list[dict[str, Any]] = []
        self._url = os.environ["MLFLOW_TRACKING_URI"].rstrip("/") + "/api/2.0/mlflow/"
        self._headers = {"Content-Type": "application/json", **_make_credentials()}
        self._send_waiting()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self._waiting += [{"key": key, "value": v, "timestamp": now, "step": step} for key, v in scalars.items()]
        self._send_waiting()

    def close(self) -> None:
        end = time.monotonic() + self._to.timeout_s
        while self._waiting and time.monotonic() < end:
            time.sleep(RETRY_S)
            self._send_waiting()
        if not self._waiting:
            self._ask("runs/update", run_id=self._run, status="FINISHED", end_time=int(1000 * time.time()))

    def _send_waiting(self) -> None:
        """Send what waits; if the server cannot be reached, report it and keep the rest."""
        try:
            self._run = self._run or self._find_run()
            while self._waiting:
                self._ask("runs/log-batch", run_id=self._run, metrics=self._waiting[:MAX_METRICS])
                del self._waiting[:MAX_METRICS]
        except urllib.error.HTTPError as error:
            if error.code < 500:  # a refusal, which a later attempt would get too
                raise
        except OSError as error:
            self._to.report_problem("mlflow", f"MLflow is not reached ({error}); metrics wait, and the run continues")

    def _find_run(self) -> str:
        """The id of the run on the server; a new one is created if no run has this run's tag."""
        try:
            answer = self._ask(f"experiments/get-by-name?experiment_name={quote(self._to.project)}")
            experiment = answer["experiment"]["experiment_id"]
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            experiment = self._ask("experiments/create", name=self._to.project)["experiment_id"]
        tagged = f"tags.`{TAG}` = '{self._to.run_id}'"
        known = self._ask("runs/search", experiment_ids=[experiment], filter=tagged, max_results=1).get("runs")
        if known:
            return str(known[0]["info"]["run_id"])
        about = {"run_name": self._to.name, "tags": [{"key": TAG, "value": self._to.run_id}]}
        run = self._ask("runs/create", experiment_id=experiment, start_time=int(1000 * time.time()), **about)["run"]
        return str(run["info"]["run_id"])

    def _ask(self, path: str, **body: Any) -> Any:
        """Call the server: GET without a body. Raises: HTTPError, OSError."""
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self._url + path, data, self._headers)  # the URL was checked before the run
        with urllib.request.urlopen(request, timeout=min(REQUEST_S, self._to.timeout_s)) as answer:
            return json.load(answer)


def _make_credentials() -> dict[str, str]:
    user, token = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_TOKEN")
    if user:
        pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
    return {"Authorization": f"Bearer {token}"} if token else {}
