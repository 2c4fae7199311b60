"""Files of points: JSON, CSV, start-up logs; broken ones get a message, hostile ones run nothing."""

import json
from pathlib import Path

import pytest

from rlplan.accuracy.compare import compare
from rlplan.accuracy.files.reading import read_points
from rlplan.errors import SpecError

V1_LOG = """\
INFO 08-05 10:00:00 [api_server.py:1787] vLLM API server version 0.10.0
INFO 08-05 10:00:00 [cli_args.py:244] non-default args: {'model': 'meta-llama/Llama-3.1-8B', 'tensor_parallel_size': 2}
INFO 08-05 10:00:10 [core.py:72] Initializing a V1 LLM engine (v0.10.0) with config: model='meta-llama/Llama-3.1-8B', \
dtype=torch.bfloat16, max_seq_len=32768, tensor_parallel_size=2, quantization=None, enforce_eager=False
(Worker pid=2) INFO 08-05 10:00:20 [gpu_model_runner.py:1937] Model loading took 7.5123 GiB and 3.2 seconds
(Worker pid=3) INFO 08-05 10:00:40 [gpu_worker.py:276] Available KV cache memory: 61.52 GiB
(Worker pid=2) INFO 08-05 10:00:40 [gpu_worker.py:276] Available KV cache memory: 61.39 GiB
INFO 08-05 10:00:40 [kv_cache_utils.py:849] GPU KV cache size: 1,005,776 tokens
INFO 08-05 10:00:40 [kv_cache_utils.py:853] Maximum concurrency for 32,768 tokens per request: 30.69x
(Worker pid=2) INFO 08-05 10:00:55 [gpu_model_runner.py:2537] Graph capturing finished in 15 secs, took 0.65 GiB
"""
V0_LOG = """\
INFO 11-20 10:00:00 llm_engine.py:249] Initializing an LLM engine (v0.6.5) with config: \
model='meta-llama/Meta-Llama-3-8B', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1
INFO 11-20 10:00:20 model_runner.py:1097] Loading model weights took 14.9595 GB
INFO 11-20 10:00:30 worker.py:241] the current vLLM instance can use total_gpu_memory (79.22GiB) x \
gpu_memory_utilization (0.90) = 71.29GiB
INFO 11-20 10:00:30 worker.py:241] model weights take 14.96GiB; non_torch_memory takes 1.79GiB; PyTorch activation \
peak memory takes 1.26GiB; the rest of the memory reserved for KV Cache is 53.29GiB.
INFO 11-20 10:00:31 gpu_executor.py:76] # GPU blocks: 27283, # CPU blocks: 2048
"""


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_log_of_the_new_engine_gives_its_start_up_measurements(tmp_path: Path) -> None:
    report = compare(read_points(write(tmp_path, "server.log", V1_LOG)))
    by_id = {point.id.partition(":")[2]: point for point in report.points}
    assert set(by_id) == {"weights", "kv_cache", "kv_tokens", "max_concurrency", "cuda_graphs"}
    assert by_id["kv_cache"].measured == 61.39, "the smallest of the ranks"
    for name in ("weights", "kv_tokens", "max_concurrency"):
        assert by_id[name].relative_error == pytest.approx(0, abs=0.002), name
    assert "memory of" in (by_id["kv_cache"].reason or ""), "the log does not name the GPU"


def test_a_log_of_the_old_engine_gives_its_profile_run(tmp_path: Path) -> None:
    report = compare(read_points(write(tmp_path, "server.txt", V0_LOG)))
    values = {point.id.partition(":")[2]: point.relative_error for point in report.points}
    assert set(values) == {"weights", "activation_peak", "kv_cache", "kv_blocks"}
    assert values["kv_cache"] == pytest.approx(0, abs=0.005)
    assert values["weights"] == pytest.approx(0, abs=0.001)


def test_each_row_of_a_csv_gives_two_points(tmp_path: Path) -> None:
    text = "id,model_path,system,tp_size,silicon_ttft_ms,silicon_tpot_ms\nrow,Qwen/Qwen3-32B,h100_sxm,2,91.5,7.9\n"
    points = read_points(write(tmp_path, "latency.csv", text))
    assert [(point.id, point.kind, point.measured.value) for point in points] == [
        ("row:ttft", "serving_ttft", 91.5),
        ("row:tpot", "serving_tpot", 7.9),
    ]
    assert points[0].settings["tp_size"] == 2


def test_points_may_be_a_list_or_stand_under_a_key(tmp_path: Path) -> None:
    point = {"id": "a", "kind": "k", "measured": {"value": [1, 2], "unit": "GiB"}, "something": "else"}
    for content in ([point], {"points": [point]}):
        assert read_points(write(tmp_path, "points.json", json.dumps(content)))[0].measured.bounds == (1, 2)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", "{"),
        ("a.json", "[" * 5000),
        ("a.json", '[{"id": "a"}]'),
        ("a.json", '[{"id": "a", "kind": "k", "measured": {"value": NaN, "unit": "GiB"}}]'),
        ("a.json", '[{"id": "a", "kind": "k", "measured": {"value": [1], "unit": "GiB"}}]'),
        ("a.json", '[{"id": 7, "kind": "k", "measured": {"value": 1, "unit": "GiB"}}]'),
        ("a.json", '"text"'),
        ("a.json", b"\xff\xfe"),
        ("a.csv", "id,model_path\nx,y\n"),
        ("a.csv", "id,model_path,system,silicon_ttft_ms,silicon_tpot_ms\nx,y\n"),
        ("a.csv", "id,model_path,system,silicon_ttft_ms,silicon_tpot_ms\nx,y,z,many,1\n"),
        ("a.csv", "id,model_path,system,silicon_ttft_ms,silicon_tpot_ms\nx,y,z,nan,1\n"),
        ("a.csv", 'id,model_path,system,silicon_ttft_ms,silicon_tpot_ms\n"x,y,z,1,1\n'),
        ("a.log", "nothing of vLLM\n"),
        ("a.log", ""),
        ("a.pickle", b"\x80\x04."),
    ],
)
def test_a_broken_file_gets_a_message_of_four_parts(tmp_path: Path, name: str, content: str | bytes) -> None:
    with pytest.raises(SpecError) as caught:
        read_points(write(tmp_path, name, content))
    error = caught.value
    assert error.what
    assert name in error.where
    assert error.rule
    assert error.way_out


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    for path, word in ((tmp_path / "none.json", "missing"), (tmp_path, "cannot be read")):
        with pytest.raises(SpecError, match=word):
            read_points(path)


def test_arguments_in_a_log_are_never_evaluated(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    line = f"non-default args: {{'model': __import__('os').system('touch {trap}')}}\n"
    nested = "non-default args: {'a': " + "[" * 4000 + "]" * 4000 + "}\n"
    points = read_points(write(tmp_path, "a.log", line + nested + "Model loading took 7.51 GiB\n"))
    assert points[0].model is None
    assert not trap.exists()
