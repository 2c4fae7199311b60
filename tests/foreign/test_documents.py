"""YAML of other stacks: anchors, and the files that one stands on."""

from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.documents import read_document
from rlplan.foreign.source import read_source
from rlplan.spec.files.yaml import read_yaml

REPEATED = """
policy: &base
  model_name: Qwen/Qwen2.5-1.5B
  dtensor_cfg: &sharding {tensor_parallel_size: 2}
value:
  <<: *base
  model_name: Qwen/Qwen2.5-0.5B
grpo: *sharding
"""
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_what_an_anchor_marks_stands_wherever_another_stack_s_file_repeats_it(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(REPEATED)
    entries, _ = read_document(tmp_path / "job.yaml")
    assert entries["value.dtensor_cfg.tensor_parallel_size"].value == 2
    assert entries["value.model_name"].value == "Qwen/Qwen2.5-0.5B"
    assert entries["grpo.tensor_parallel_size"].value == 2


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (LAUGHS, "more than 21000 keys and values"),
        ("a: &a\n  b: *a\n", "'*a' has no anchor before it"),
        ("a: *b\n", "'*b' has no anchor before it"),
        ("a: !!python/object:os.system {}\n", "is a tag"),
    ],
)
def test_a_file_that_repeats_itself_is_as_large_as_what_it_stands_for(text: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(SpecError) as caught:
        read_document(tmp_path / "job.yaml")
    assert what in caught.value.what
    assert "aliases" not in caught.value.rule


def test_a_file_of_ours_has_no_anchors(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(REPEATED)
    with pytest.raises(SpecError, match="'base' is an anchor or an alias"):
        read_yaml(tmp_path / "job.yaml", "the job file")


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("sft: {max_num_steps: 60}\npolicy: {model_name: Qwen/Qwen2.5-1.5B}\n", "sft"),
        ("dpo: {max_num_steps: 60}\npolicy: {model_name: Qwen/Qwen2.5-1.5B}\n", "dpo"),
        ("rm: {max_num_steps: 60}\npolicy: {model_name: Qwen/Qwen2.5-1.5B}\n", "rm"),
        ("defaults: ../../sft_openmathinstruct2.yaml\npolicy: {train_micro_batch_size: 2}\n", "sft"),
        ("defaults: ../../dpo.yaml\npolicy: {train_micro_batch_size: 2}\n", "dpo"),
    ],
)
def test_a_configuration_of_nemo_rl_s_other_programs_is_read_as_theirs(text: str, program: str, tmp_path: Path) -> None:
    """A document's program is known by its parts, or by the name of a missing base configuration."""
    (tmp_path / "job.yaml").write_text(text)
    assert read_source(tmp_path / "job.yaml", None).value("program") == program


def test_distillation_of_nemo_rl_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("distillation: {topk_logits_k: 64}\npolicy: {train_global_batch_size: 64}\n")
    with pytest.raises(SpecError, match=r"^distillation of NeMo-RL is not read") as caught:
        read_source(tmp_path / "job.yaml", None)
    assert "rlplan estimate --model MODEL --algorithm grpo " in caught.value.way_out


def test_a_file_below_that_is_there_is_no_reason_to_refuse(tmp_path: Path) -> None:
    (tmp_path / "dpo_like.yaml").write_text("grpo: {num_prompts_per_step: 96}\n")
    (tmp_path / "job.yaml").write_text("defaults: dpo_like.yaml\npolicy: {train_micro_batch_size: 2}\n")
    settings = read_source(tmp_path / "job.yaml", None)
    assert settings.value("grpo.num_prompts_per_step") == 96
    assert "defaults" not in settings.entries


def test_json_with_comments_is_refused_by_its_comment(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{\n  // sizes\n  "train_batch_size": 8, /* b */ "bf16": {"enabled": true}\n}\n')
    with pytest.raises(SpecError, match="the file has a comment: // sizes") as caught:
        read_source(tmp_path / "ds.json", None)
    assert caught.value.way_out == "remove the comments"


def test_a_base_configuration_with_hydra_s_package_is_read(tmp_path: Path) -> None:
    """ROLL's examples begin with `defaults: [../config/traj_envs@_here_]`."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "envs.yaml").write_text("rollout_batch_size: 64\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.yaml").write_text("defaults: [../config/envs@_here_]\npretrain: Qwen/Qwen2.5-7B\n")
    entries, notes = read_document(tmp_path / "run" / "job.yaml")
    assert (entries["rollout_batch_size"].value, notes) == (64, [])
