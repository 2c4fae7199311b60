"""Jobs that are given their answers, written for TRL and read back."""

from pathlib import Path

import pytest

from rlplan.foreign.check import Asked, import_job
from rlplan.foreign.export.folders import write_export
from rlplan.foreign.source import read_source
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.yaml import read_yaml

TEXT = (
    "model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n"
    "max_length: 2048\nmax_steps: 100\ndtype: bfloat16\n"
)


@pytest.mark.parametrize("accelerate", ["zero3", "multi_gpu"])
@pytest.mark.parametrize("trainer", ["sft", "dpo", "kto"])
def test_a_job_with_given_answers_is_written_for_its_trainer_and_read_back(
    trainer: str, accelerate: str, tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text(f"{TEXT}trainer: {trainer}\naccelerate_config: {accelerate}\n")
    _, job = import_job(read_source(tmp_path / "own.yaml", None), Asked("H100"))
    write_export(find_best_plan(job), "trl", tmp_path / "out")
    assert f"trl {trainer} --config" in (tmp_path / "out" / "train.sh").read_text()
    assert "trainer" not in read_yaml(tmp_path / "out" / "train.yaml", "the file")
    _, back = import_job(read_source(tmp_path / "out" / "train.sh", None), Asked("H100"))
    for part in ("algorithm", "workload", "training"):
        assert getattr(back, part) == getattr(job, part)
