"""Files of miles, SkyRL, prime-rl, AReaL and ROLL, and of programs on given answers, as jobs.

Facts of upstream's configuration classes at the tables' commits.
"""

from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.check import Asked, check
from rlplan.foreign.convert import Imported, convert
from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.source import read_source

MILES = (
    "python3 train.py --colocate --actor-num-nodes 1 --actor-num-gpus-per-node 8 --hf-checkpoint Qwen/Qwen3-8B "
    "--lora-rank 32 --lora-alpha 64 --target-modules all-linear --rollout-batch-size 32 --n-samples-per-prompt 8 "
    "--rollout-max-response-len 8192 "
    "--global-batch-size 256 --tensor-model-parallel-size 2 --use-dynamic-batch-size --max-tokens-per-gpu 9216 "
    "--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.6\n"
)
SKYRL = (
    "uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base "
    "trainer.policy.model.path=Qwen/Qwen2.5-7B-Instruct "
    "trainer.strategy=megatron trainer.policy.megatron_config.tensor_model_parallel_size=4 "
    "trainer.placement.colocate_all=false "
    "trainer.placement.policy_num_gpus_per_node=8 generator.inference_engine.num_engines=4 "
    "generator.inference_engine.tensor_parallel_size=2 trainer.fully_async.enabled=true "
    "trainer.fully_async.max_staleness_steps=2 "
    "trainer.policy_mini_batch_size=64 generator.sampling_params.max_generate_length=2048\n"
)
OLD_SKYRL = (
    "uv run -m skyrl_train.entrypoints.main_base trainer.policy.model.path=Qwen/Qwen2.5-7B-Instruct "
    "trainer.placement.policy_num_gpus_per_node=8 generator.num_inference_engines=4 "
    "generator.inference_engine_tensor_parallel_size=2 generator.gpu_memory_utilization=0.7\n"
)
PRIME_RL = """
seq_len = 4096
[model]
name = "Qwen/Qwen3-4B"
[deployment]
num_train_gpus = 2
num_infer_gpus = 6
[trainer.model]
optimization_dtype = "bfloat16"
[trainer.model.lora]
rank = 8
[orchestrator]
batch_size = 128
group_size = 16
[orchestrator.train.sampling]
max_completion_tokens = 1024
[inference.vllm]
tensor_parallel_size = 2
"""
PRIME_RL_SFT = """
[model]
name = "Qwen/Qwen3-4B"
ac = "None"
[data]
name = "org/data"
seq_len = 8192
batch_size = 64
micro_batch_size = 2
[deployment]
num_train_gpus = 8
"""
PRIME_RL_TRAINER = '[model]\nname = "Qwen/Qwen3-30B-A3B-Instruct-2507"\n[model.ac]\n[optim]\nlr = 1e-6\n'
AREAL = """
gconfig: {n_samples: 4, max_new_tokens: 1024}
rollout: {backend: "sglang:d4p1t2", max_head_offpolicyness: 2}
actor:
  backend: "megatron:(attn:d2p2t2|ffn:d1p2t1e4)"
  path: Qwen/Qwen3-30B-A3B
  mb_spec: {max_tokens_per_mb: 10240}
  ppo_n_minibatches: 2
  kl_ctl: 0.0
  use_decoupled_loss: true
train_dataset: {batch_size: 256, max_length: 1024}
"""
AREAL_SFT = """
actor: {backend: "fsdp:d8", path: Qwen/Qwen3-1.7B, gradient_checkpointing: true, mb_spec: {max_tokens_per_mb: 4096}}
train_dataset: {batch_size: 128, type: sft, max_length: 2048}
"""
ROLL = """
rollout_batch_size: 64
prompt_length: 2048
response_length: 4096
num_return_sequences_in_group: 8
adv_estimator: grpo
pretrain: Qwen/Qwen2.5-7B
actor_train:
  training_args: {per_device_train_batch_size: 1, gradient_accumulation_steps: 32}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 2, recompute_granularity: full}
  device_mapping: list(range(0,16))
actor_infer:
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8}}
  num_gpus_per_worker: 2
  device_mapping: list(range(16,24))
"""
VERL_SFT = (
    "torchrun --standalone --nnodes=1 --nproc_per_node=4 -m verl.trainer.sft_trainer data.train_files=a "
    "model.path=Qwen/Qwen3-8B model.lora_rank=32 engine=fsdp engine.ulysses_sequence_parallel_size=2 "
    "data.max_length=2048\n"
)
OLD_VERL_SFT = (
    "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer data.train_files=a "
    "model.partial_pretrain=Qwen/Qwen3-8B data.micro_batch_size_per_gpu=2\n"
)
VEOMNI = VERL_SFT.replace(
    "engine=fsdp engine.ulysses_sequence_parallel_size=2", "engine=veomni engine.ulysses_parallel_size=4"
)
OPENRLHF = (
    "deepspeed --module openrlhf.cli.train_{} --model.model_name_or_path Qwen/Qwen2.5-7B --train.batch_size 256 "
    "--train.micro_batch_size 1 --ds.zero_stage 3 --data.max_len 8192 --model.gradient_checkpointing_enable\n"
)
NEMO = (
    "{}: {{max_num_steps: 10}}\npolicy: {{model_name: Qwen/Qwen2.5-7B, train_micro_batch_size: 2}}\n"
    "cluster: {{gpus_per_node: 8}}\n"
)


def read(folder: Path, text: str, name: str = "train.sh", hardware: str = "H100") -> Imported:
    """The imported configuration of a file with this text."""
    path = folder / name
    path.write_text(text)
    return convert(read_source(path, None), hardware, None)


LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    (
        MILES,
        "m.sh",
        {
            "training.lora.rank": 32,
            "training.lora.alpha": 64,
            "training.tp": 2,
            "training.backend": "megatron",
            "workload.mini_batch_size": 256,
            "rollout.engine": "sglang",
            "placement.placement": "colocated",
        },
    ),
    (
        SKYRL,
        "s.sh",
        {
            "hardware.num_devices": 16,
            "placement.num_generation_devices": 8,
            "placement.max_staleness": 2,
            "training.tp": 4,
            "training.gradient_checkpointing": True,
            "workload.mini_batch_size": 320,
            "workload.num_prompts_per_step": 64,
            "algorithm.kl_coef": 0.001,
        },
    ),
    (OLD_SKYRL, "s.sh", {"hardware.num_devices": 8, "rollout.tp": 2, "placement.placement": "colocated"}),
    (
        PRIME_RL,
        "p.toml",
        {
            "hardware.num_devices": 8,
            "placement.num_generation_devices": 6,
            "placement.max_staleness": 8,
            "workload.num_prompts_per_step": 8,
            "workload.max_prompt_len": 3072,
            "workload.max_response_len": 1024,
            "training.lora.rank": 8,
            "training.lora.base_dtype": "bfloat16",
            "training.backend": "fsdp2",
            "rollout.tp": 2,
            "scoring.policy_log_probs": "never",
        },
    ),
    (
        PRIME_RL_SFT,
        "p.toml",
        {
            "algorithm.name": "sft",
            "hardware.num_devices": 8,
            "training.max_tokens_per_micro_batch": 16384,
            "training.gradient_checkpointing": False,
            "training.offloads_activations": False,
        },
    ),
    (
        AREAL,
        "a.yaml",
        {
            "hardware.num_devices": 16,
            "placement.num_generation_devices": 8,
            "placement.max_staleness": 2,
            "training.backend": "megatron",
            "training.tp": 2,
            "training.pp": 2,
            "training.ep": 4,
            "training.etp": 1,
            "rollout.engine": "sglang",
            "rollout.tp": 2,
            "workload.mini_batch_size": 512,
            "scoring.policy_log_probs": "always",
        },
    ),
    (
        AREAL_SFT,
        "a.yaml",
        {
            "hardware.num_devices": 8,
            "algorithm.name": "sft",
            "training.backend": "fsdp2",
            "training.max_tokens_per_micro_batch": 4096,
            "workload.max_response_len": 1024,
        },
    ),
    (
        ROLL,
        "r.yaml",
        {
            "hardware.num_devices": 24,
            "placement.num_generation_devices": 8,
            "placement.placement": "disaggregated",
            "workload.mini_batch_size": 256,
            "training.tp": 2,
            "training.gradient_checkpointing": True,
            "rollout.tp": 2,
        },
    ),
    (ROLL.replace("16,24", "0,12"), "r.yaml", {"hardware.num_devices": 16, "placement.placement": "colocated"}),
    (
        VERL_SFT,
        "v.sh",
        {
            "hardware.num_devices": 4,
            "algorithm.name": "sft",
            "training.lora.rank": 32,
            "training.ulysses": 2,
            "training.max_tokens_per_micro_batch": 16384,
            "training.zero_stage": 3,
        },
    ),
    (
        OLD_VERL_SFT,
        "v.sh",
        {
            "hardware.num_devices": 8,
            "workload.micro_batch_size_per_gpu": 2,
            "training.logits": "plain",
            "workload.max_prompt_len": 512,
        },
    ),
    (VEOMNI, "v.sh", {"training.backend": "fsdp2", "training.ulysses": 4}),
    (
        NEMO.format("sft"),
        "n.yaml",
        {
            "algorithm.name": "sft",
            "workload.num_prompts_per_step": 32,
            "workload.max_response_len": 512,
            "workload.micro_batch_size_per_gpu": 2,
        },
    ),
    (
        NEMO.format("dpo"),
        "n.yaml",
        {
            "algorithm.name": "dpo",
            "workload.mini_batch_size": 256,
            "algorithm.kl_coef": 0.05,
            "workload.micro_batch_size_per_gpu": 4,
        },
    ),
    (NEMO.format("rm"), "n.yaml", {"algorithm.name": "reward_modeling", "workload.max_response_len": 4096}),
]


@pytest.mark.parametrize(("text", "name", "expected"), LAYOUTS)
def test_a_file_is_read_with_its_method_layout_and_upstream_s_defaults(
    text: str, name: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    data = flatten_keys(read(tmp_path, text, name).data)
    assert {key: data.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("program", "name", "samples"), [("sft", "sft", 1), ("dpo", "dpo", 2), ("rm", "reward_modeling", 2)]
)
def test_openrlhf_s_programs_count_pairs_of_answers_as_two_sequences(
    program: str, name: str, samples: int, tmp_path: Path
) -> None:
    data = flatten_keys(read(tmp_path, OPENRLHF.format(program), hardware="8xH100").data)
    assert (data["algorithm.name"], data["workload.micro_batch_size_per_gpu"]) == (name, samples)
    assert data["workload.mini_batch_size"] == 256 * samples


def test_a_deprecated_allocation_mode_means_the_same_as_a_backend_of_each_role(tmp_path: Path) -> None:
    both = AREAL.replace('rollout: {backend: "sglang:d4p1t2", max', "rollout: {max")
    both = both.replace('  backend: "megatron:(attn:d2p2t2|ffn:d1p2t1e4)"\n', "")
    mode = 'allocation_mode: "sglang:d4p1t2+megatron:(attn:d2p2t2|ffn:d1p2t1e4)"\n'
    assert read(tmp_path, mode + both, "a.yaml").data == read(tmp_path, AREAL, "a.yaml").data


def test_files_after_an_at_sign_are_read_below_the_flag_before_it(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(PRIME_RL)
    (tmp_path / "t.toml").write_text("[model.lora]\nrank = 64\n")
    words = "uv run rl @ rl.toml --trainer @ t.toml --orchestrator.group-size 8\n"
    data = flatten_keys(read(tmp_path, words).data)
    assert (data["training.lora.rank"], data["workload.num_samples_per_prompt"]) == (64, 8)


def test_a_trainer_s_own_file_counts_one_engine_and_says_so(tmp_path: Path) -> None:
    imported = read(tmp_path, PRIME_RL_TRAINER, "t.toml", "6xH100")
    assert flatten_keys(imported.data)["placement.num_generation_devices"] == 1
    assert any("neither the engine's GPUs nor the batch" in note for note in imported.notes)


def test_a_mixture_s_fp32_states_do_not_fit_four_gpus_beside_two_engines(tmp_path: Path) -> None:
    # github.com/PrimeIntellect-ai/prime-rl/issues/1016: 30B-A3B on 4 training and 2 rollout H100 runs out of memory
    (tmp_path / "t.toml").write_text(PRIME_RL_TRAINER)
    settings = read_source(tmp_path / "t.toml", None, ["deployment.num_infer_gpus=2"])
    answer = check(settings, Asked("6xH100"))
    assert answer.plan is not None
    assert not answer.fits
    assert answer.plan.binding.num_bytes > 100 << 30


def test_ranks_of_prime_rl_may_have_different_numbers_of_rollouts(tmp_path: Path) -> None:
    # src/prime_rl/trainer/batch.py (prepare_batch): 128 rollouts on 7 GPUs
    (tmp_path / "p.toml").write_text(
        PRIME_RL.replace("num_infer_gpus = 6", "num_infer_gpus = 1").split("[inference")[0]
    )
    assert check(read_source(tmp_path / "p.toml", None), Asked("8xH100")).fits


COLOCATED = OLD_SKYRL.rstrip() + " generator.n_samples_per_prompt=5 trainer.policy_mini_batch_size=64"
OPENRLHF_COLOCATED = (
    "python3 -m openrlhf.cli.train_ppo_ray --actor.num_gpus_per_node 4 --vllm.num_engines 4 --train.colocate_all "
    "--vllm.enable_sleep --ds.enable_sleep --actor.model_name_or_path Qwen/Qwen3-4B --ds.zero_stage 3 "
    "--algo.kl.init_coef 0 --algo.advantage.estimator rloo --rollout.n_samples_per_prompt 8\n"
)
NO_LAYOUT = [
    (PRIME_RL, "p.toml", "6xH100", "num_generation_devices 6 leaves none of 6 GPUs for training"),
    (
        OPENRLHF_COLOCATED,
        "o.sh",
        "8xH100",
        "rollout.num_engines 4 of 1 GPUs each do not fill the 8 GPUs that generate",
    ),
    (
        COLOCATED + " trainer.micro_train_batch_size_per_gpu=16\n",
        "s.sh",
        "8xH100",
        "micro_batch_size_per_gpu 16 does not divide the 40 rollouts of a rank",
    ),
]


@pytest.mark.parametrize(("text", "name", "hardware", "reason"), NO_LAYOUT)
def test_sizes_that_exclude_each_other_are_the_reason_given(
    text: str, name: str, hardware: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    assert reason in str(check(read_source(tmp_path / name, None), Asked(hardware)).refusal)


def test_a_clip_of_zero_is_left_out(tmp_path: Path) -> None:
    # examples/math/gsm8k_m2po.yaml
    data = flatten_keys(read(tmp_path, AREAL + "actor.eps_clip: 0.0\n", "a.yaml").data)
    assert "algorithm.clip_low" not in data


@pytest.mark.parametrize("text", ["group_size = 8\n[train.source]\nname = 'a'\n", "[model]\nname = 'a/b'\n"])
def test_a_file_of_prime_rl_s_orchestrator_or_engine_is_not_read_as_the_trainer_s(text: str, tmp_path: Path) -> None:
    (tmp_path / "o.toml").write_text(text)
    with pytest.raises(SpecError, match=r"train of prime-rl is not read|none of its keys"):
        read_source(tmp_path / "o.toml", None)


def test_a_python_program_that_computes_a_stack_s_options_is_refused_by_the_stack_s_name(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text("import miles.utils as U\nU.train(lr=1)\n")
    with pytest.raises(SpecError, match="options of miles in Python") as refused:
        read_source(tmp_path / "run.py", None)
    assert "command line or configuration file of miles" in refused.value.rule


REFUSED = [
    (
        PRIME_RL.replace("[trainer.model]", "[trainer.model]\nfull_offload = true"),
        "p.toml",
        "on the host, beside bfloat16 weights",
    ),
    (PRIME_RL.replace("[orchestrator]", '[orchestrator]\nalgo = {type = "sft"}'), "p.toml", "answers of another model"),
    (MILES.replace("--lora-rank", "--multi-lora-n-adapters 4 --lora-rank"), "m.sh", "several adapters"),
    (
        SKYRL.replace(" trainer.f", " generator.inference_engine.run_engines_locally=false trainer.f", 1),
        "s.sh",
        "engines of another program",
    ),
    (ROLL.replace("list(range(16,24))", "'[16, 17]'"), "r.yaml", "cannot be told from their device mappings"),
    (VERL_SFT.replace("engine=fsdp", "engine=mindspeed"), "v.sh", "this engine cannot be predicted"),
]


@pytest.mark.parametrize(("text", "name", "reason"), REFUSED)
def test_what_no_job_can_say_is_refused_for_that_reason(text: str, name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        read(tmp_path, text, name)
    assert reason in refused.value.rule
    assert refused.value.way_out


@pytest.mark.parametrize(
    ("keys", "lengths"),
    [
        ("max_tokens_per_trajectory: 40000", (1024, 38976)),  # examples/terminal_bench/train.py
        ("tir: {max_length: 3000}", (1024, 1976)),  # examples/tir/tir_workflow.py
        ("max_turns: 32\nsglang: {context_length: 32768}", (1024, 31744)),
        ("agent_run_args: {max_turns: 2}", (1024, 2048)),
        ("max_turns: 1\nsglang: {context_length: 32768}", (1024, 1024)),
    ],
)
def test_all_turns_of_areal_s_trajectories_are_counted(keys: str, lengths: tuple[int, int], tmp_path: Path) -> None:
    work = read(tmp_path, AREAL + keys, "a.yaml").data["workload"]
    assert (work["max_prompt_len"], work["max_response_len"]) == lengths


def test_prime_rl_packs_sequences_of_the_orchestrator_s_length_into_the_trainer_s(tmp_path: Path) -> None:
    # orchestrator.py (seq_len): "Shorter samples are padded; longer samples are truncated"
    text = PRIME_RL.replace("[orchestrator]", "[orchestrator]\nseq_len = 2048")
    data = read(tmp_path, text, "p.toml").data
    assert (data["workload"]["max_prompt_len"], data["workload"]["max_response_len"]) == (1024, 1024)
    assert data["training"]["max_tokens_per_micro_batch"] == 4096


def test_the_teacher_of_miles_is_listed_as_not_counted(tmp_path: Path) -> None:
    assert read(tmp_path, MILES.rstrip() + " --use-opd --opd-teacher-load /t\n", "m.sh").not_counted == (
        "opd_teacher_load=/t",
    )


@pytest.mark.parametrize(("gpu", "num_tokens"), [("H100", 8192), ("A100", 2048), ("B200", 16384)])
def test_the_server_of_prime_rl_has_vllm_s_defaults_of_a_server(gpu: str, num_tokens: int, tmp_path: Path) -> None:
    """Source: src/prime_rl/inference/vllm/server.py calls vLLM's run_server.

    Source of the numbers: vllm/engine/arg_utils.py (get_batch_defaults).
    """
    (tmp_path / "p.toml").write_text(PRIME_RL)
    data = convert(read_source(tmp_path / "p.toml", None), gpu, None).data
    assert data["rollout"]["max_num_batched_tokens"] == num_tokens
