"""Settings of TRL's trainers in Python scripts, which are followed as far as their text decides, and never run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.check import Asked, check, import_job
from rlplan.foreign.convert import convert
from rlplan.foreign.engine_share import add_kv_cache
from rlplan.foreign.settings import Settings
from rlplan.foreign.source import read_source
from rlplan.memory.serving.generation import engine_parameter_bytes
from rlplan.spec.resolved import settle

HEAD = """
import argparse, os
import torch
from dataclasses import dataclass, field
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer, ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config
"""
END = "GRPOTrainer(model='Qwen/Qwen2.5-7B', reward_funcs=len, args=config).train()\n"


def read(folder: Path, text: str, *outside: str) -> Settings:
    (folder / "train.py").write_text(HEAD + text)
    return read_source(folder / "train.py", None, outside)


@pytest.mark.parametrize(
    "text",
    [
        "words = dict(beta=0.5, num_generations=4)\nconfig = GRPOConfig('out', **words)\n",
        "words = {'beta': 0.1} | {'beta': 0.5}\nwords['num_generations'] = 4\nconfig = GRPOConfig(**words)\n",
        (
            "@dataclass\nclass Own(GRPOConfig):\n    beta: float = 0.5\n    num_generations: int = field(default=4)\n"
            "config = Own(output_dir='x')\n"
        ),
        "config = GRPOConfig()\nconfig.beta = 0.5\nsetattr(config, 'num_generations', 4)\n",
        "A, B = 0.5, 4\nconfig = GRPOConfig(beta=A, num_generations=B)\n",
        "size: int = 2\nconfig = GRPOConfig(beta=1 / size, num_generations=size ** 2 if size > 1 else 8)\n",
        "config = GRPOConfig(beta=float(os.environ.get('BETA', '0.5')), num_generations=int(os.getenv('N', 4)))\n",
        (
            "p = argparse.ArgumentParser()\np.add_argument('--beta', type=float, default=0.5)\n"
            "p.add_argument('-n', '--num-samples', default=4)\na = p.parse_args()\n"
            "config = GRPOConfig(beta=a.beta, num_generations=a.num_samples)\n"
        ),
        "def make(beta, num=8):\n    return GRPOConfig(beta=beta, num_generations=num)\nconfig = make(0.5, num=4)\n",
        (
            "if os.path.exists('x') and False:\n    pass\nSMALL = True\nif SMALL:\n"
            "    config = GRPOConfig(beta=0.5, num_generations=4)\nelse:\n    config = GRPOConfig(beta=0.1)\n"
        ),
        "for beta in sweep():\n    pass\nwith torch.no_grad():\n    config = GRPOConfig(beta=0.5, num_generations=4)\n",
        "n = 1\nwhile n < 4:\n    n *= 2\nconfig = GRPOConfig(beta=0.5, num_generations=n)\n",
        (
            "size = 'b'\nmatch size:\n    case 'a':\n        n = 1\n    case 'b' | 'c':\n        n = 4\n"
            "config = GRPOConfig(beta=0.5, num_generations=n)\n"
        ),
        "b = {'beta': 0.1}\nb.update(beta=0.5)\nb.update({'num_generations': 4})\nconfig = GRPOConfig(**b)\n",
        "from dataclasses import replace\nconfig = replace(GRPOConfig(beta=0.1, num_generations=4), beta=0.5)\n",
        (
            "class Runner:\n    def __init__(self, beta=0.1):\n        self.beta = beta\n    def make(self, n=8):\n"
            "        return GRPOConfig(beta=self.beta, num_generations=n)\nconfig = Runner(beta=0.5).make(4)\n"
        ),
        (
            "@dataclass\nclass Own(GRPOConfig):\n    def __post_init__(self):\n        self.beta = 0.5\n"
            "config = Own(num_generations=4)\n"
        ),
        (
            "@dataclass\nclass Sizes:\n    beta: float\n    n: int = 8\ns = Sizes(0.5, n=4)\n"
            "config = GRPOConfig(beta=s.beta, num_generations=s.n)\n"
        ),
        (
            "config = GRPOConfig()\nfor key, value in {'beta': 0.5, 'num_generations': 4}.items():\n"
            "    setattr(config, key, value)\n"
        ),
        (
            "def make(**words):\n    return GRPOConfig(**words)\nPRESETS = {'a': {'beta': 0.5, 'num_generations': 4}}\n"
            "config = make(**PRESETS['a'])\n"
        ),
        "N = 1\ndef grow():\n    global N\n    N = 4\ngrow()\nconfig = GRPOConfig(beta=0.5, num_generations=N)\n",
        (
            "p = argparse.ArgumentParser()\np.add_argument('--beta', type=float, default='0.1')\np.set_defaults(n=4)\n"
            "a = p.parse_args(['--beta', '0.5'])\nconfig = GRPOConfig(beta=a.beta, num_generations=a.n)\n"
        ),
        "from trl import GRPOConfig as Own\nmake = lambda n: Own(beta=0.5, num_generations=n)\nconfig = make(4)\n",
        "def smoke():\n    config.beta = 9\nconfig = GRPOConfig(beta=0.5, num_generations=4)\n",
        "for n in (1, 4, 8):\n    if n == 4:\n        break\nconfig = GRPOConfig(beta=0.5, num_generations=n)\n",
        (
            "class CFG:\n    n = 1\nCFG.n = 4\nd = {}\ne = d\ne |= {'beta': 0.5}\nx = [1]\nx[0] = CFG.n\n"
            "config = GRPOConfig(num_generations=x[0], **d)\n"
        ),
        (
            "n = 4\ndef inner():\n    return n\ndef outer():\n    n = 1\n    return inner()\n"
            "config = GRPOConfig(beta=0.5, num_generations=outer())\n"
        ),
        (
            "@dataclass\nclass OwnConfig:\n    beta: float\n    n: int\ns = OwnConfig(0.5, 4)\n"
            "config = GRPOConfig(beta=s.beta, num_generations=s.n)\n"
        ),
        (
            "both = (GRPOConfig, ModelConfig)\n"
            "config, _ = TrlParser(both).parse_args_and_config(['--beta', '0.5', '--num_generations', '4'])\n"
        ),
    ],
)
def test_a_configuration_is_read_however_it_is_put_together(text: str, tmp_path: Path) -> None:
    settings = read(tmp_path, text + END)
    assert (settings.value("beta"), settings.value("num_generations")) == (0.5, 4)
    assert settings.value("model_name_or_path") == "Qwen/Qwen2.5-7B"


@pytest.mark.parametrize(
    ("adapters", "rank"),
    [
        ("LoraConfig(r=8)", 8),
        ("None", None),
        ("LoraConfig(r=8) if os.environ.get('LORA', '') else None", None),
        ("{'r': LoraConfig(r=8)}['r']", 8),
    ],
)
def test_adapters_are_those_that_the_trainer_is_given(adapters: str, rank: int | None, tmp_path: Path) -> None:
    settings = read(tmp_path, f"x = LoraConfig(r=99)\nGRPOTrainer('a/b', len, GRPOConfig(), peft_config={adapters})\n")
    assert settings.value("use_peft") is (rank is not None)
    assert settings.raw("lora_r") == (rank or 16)


def test_adapters_and_a_quantised_base_are_read_of_a_model_that_is_loaded_first(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        "four = BitsAndBytesConfig(load_in_4bit=True)\n"
        "model = AutoModelForCausalLM.from_pretrained('a/b', torch_dtype=torch.bfloat16, quantization_config=four)\n"
        "model = get_peft_model(model, LoraConfig(r=8))\nGRPOTrainer(model=model, args=GRPOConfig())\n",
    )
    values = {key: settings.value(key) for key in ("model_name_or_path", "use_peft", "lora_r", "load_in_4bit")}
    assert values == {"model_name_or_path": "a/b", "use_peft": True, "lora_r": 8, "load_in_4bit": True}
    assert settings.value("model_init_kwargs.dtype") == "bfloat16"


def test_of_several_trainers_the_last_of_grpo_is_read_with_its_own_configuration_and_a_note(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        "SFTTrainer('a/b', args=SFTConfig(per_device_train_batch_size=2, max_length=99)).train()\n"
        "GRPOTrainer('c/d', len, GRPOConfig(beta=0.5)).train()\n",
    )
    assert "loss_type" in [row.key for row in settings.table.rows["algorithm.name"]]
    assert "per_device_train_batch_size" not in settings.entries
    assert settings.notes == ("train.py makes 2 trainers; GRPOTrainer at line 9 is read",)


def test_a_branch_that_only_running_would_choose_is_noted(tmp_path: Path) -> None:
    text = "if is_main():\n    config = GRPOConfig(beta=0.5)\nelse:\n    config = GRPOConfig(beta=0.1)\n"
    settings = read(tmp_path, text + END)
    assert settings.value("beta") == 0.5
    assert settings.notes == (
        "train.py:8: whether is_main() holds is known only at run time; its first branch is read",
    )


@pytest.mark.parametrize(
    "text",
    [
        "beta = 0.1\nif is_main():\n    beta = 0.5\n",
        "words = {'beta': 0.1}\nif is_main():\n    words['beta'] = 0.5\nbeta = words['beta']\n",
        "base = GRPOConfig(beta=0.1)\nif is_main():\n    base.beta = 0.5\nbeta = base.beta\n",
        "beta = 0.1\nmatch [1]:\n    case [1, *rest]:\n        beta = 0.5\n",
        "beta = 0.1\nfor one in load():\n    beta *= 2\n",
        "beta = 0.1\nwhile not done():\n    beta *= 2\n",
        "match load():\n    case 1:\n        beta = 0.1\n    case _:\n        beta = 0.5\n",
        "def make():\n    if is_main():\n        return 0.5\n    return 0.1\nbeta = make()\n",
        "beta = 0.04 * int(os.environ.get('WORLD_SIZE', 1))\n",
    ],
)
def test_a_value_that_only_running_would_choose_is_refused(text: str, tmp_path: Path) -> None:
    settings = read(tmp_path, text + "config = GRPOConfig(beta=beta)\n" + END)
    with pytest.raises(SpecError, match="which is known only at run time"):
        settings.value("beta")


def test_a_loop_that_only_running_would_count_is_noted(tmp_path: Path) -> None:
    settings = read(tmp_path, "for one in load():\n    config = GRPOConfig(beta=0.5)\n" + END)
    assert settings.notes == ("train.py:8: what load() holds is known only at run time; its body is read once",)


def test_a_trainer_without_a_table_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="RLOOTrainer is not read"):
        read(tmp_path, "from trl import RLOOConfig, RLOOTrainer\nRLOOTrainer('a/b', args=RLOOConfig())\n")


def test_models_beside_the_policy_that_are_not_counted_are_named(tmp_path: Path) -> None:
    settings = read(tmp_path, "GRPOTrainer('a/b', reward_funcs=['c/d', len], args=GRPOConfig())\n")
    assert settings.notes == ("1 reward model of reward_funcs, whole on each GPU, not counted",)


def test_keywords_that_are_not_known_are_noted(tmp_path: Path) -> None:
    settings = read(tmp_path, "config = GRPOConfig(beta=0.5, **load())\n" + END)
    assert settings.notes == ("train.py:8: what **load() gives GRPOConfig is known only at run time",)


def test_names_and_options_of_a_script_are_said_outside(tmp_path: Path) -> None:
    text = (
        "MODEL = load()\np = argparse.ArgumentParser()\np.add_argument('--beta', required=True)\na = p.parse_args()\n"
        "config = GRPOConfig(beta=a.beta)\nGRPOTrainer(model=MODEL, args=config)\n"
    )
    settings = read(tmp_path, text, "MODEL=a/b", "a.beta=0.5")
    assert (settings.value("model_name_or_path"), settings.value("beta")) == ("a/b", 0.5)
    with pytest.raises(SpecError, match=r"a\.beta, which is known only at run time") as refused:
        read(tmp_path, text).value("beta")
    assert "--set a.beta=VALUE" in refused.value.way_out
    with pytest.raises(SpecError, match=r"--set MODLE matches nothing in train\.py"):
        read(tmp_path, text, "MODLE=a/b")
    with pytest.raises(SpecError, match=r"Did you mean 'accelerate\.deepspeed_config\.zero_stage'"):
        read(tmp_path, text, "accelerate.deepspeed_config.zero_stag=3")


def test_flags_of_a_script_s_own_parser_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        HEAD + "p = argparse.ArgumentParser()\np.add_argument('--model')\np.add_argument('--max_steps', default=1)\n"
        "a = p.parse_args()\nGRPOTrainer(a.model, len, GRPOConfig(num_generations=a.max_steps))\n"
    )
    (tmp_path / "train.sh").write_text("accelerate launch train.py --model a/b --max_steps 16\n")
    settings = read_source(tmp_path / "train.sh", None)
    assert settings.value("model_name_or_path") == "a/b"
    assert settings.value("num_generations") == 16
    assert settings.raw("max_steps") is None


def test_flags_of_trl_s_parser_are_the_trainer_s(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        HEAD + "def main(training, model):\n"
        "    GRPOTrainer(model=model.model_name_or_path, args=training, peft_config=get_peft_config(model))\n"
        "if __name__ == '__main__':\n    main(*TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config())\n"
    )
    (tmp_path / "train.sh").write_text("accelerate launch train.py --model_name_or_path a/b --use_peft --lora_r 8\n")
    settings = read_source(tmp_path / "train.sh", None)
    values = {key: settings.value(key) for key in ("model_name_or_path", "use_peft", "lora_r")}
    assert values == {"model_name_or_path": "a/b", "use_peft": True, "lora_r": 8}


@pytest.mark.parametrize(
    "text",
    [
        "def f(n):\n    return f(n + 1)\nconfig = GRPOConfig(beta=f(0))\n",
        "x = 'a' * 10 ** 9\nconfig = GRPOConfig(beta=2 ** 2 ** 40, run_name=x)\n",
        "def f():\n    return [g() for g in f()]\nfor _ in range(10):\n    f()\nconfig = GRPOConfig(beta=open('/x'))\n",
        "config = GRPOConfig(beta=" + "(" * 90 + "a" + ")" * 90 + ")\n",
        "x = 1\nfor _ in range(40):\n    x = [x, x]\nconfig = GRPOConfig(beta=f'{x}')\n",
        "x = [1]\nfor _ in range(40):\n    x = x + x\nconfig = GRPOConfig(beta=x[0])\n",
        (
            "d = {}\nd['d'] = d\nm = AutoModelForCausalLM.from_pretrained('a')\nm.path = m\n"
            "config = GRPOConfig(model_init_kwargs=d, beta=float('inf'))\n"
        ),
        "if " + "a." * 2000 + "a:\n    pass\nb" + ".b" * 900 + " += 3\nconfig = GRPOConfig(beta=b)\n",
        "while True:\n    pass\nconfig = GRPOConfig(beta=a)\n",
        "x = [1]\nfor _ in range(60):\n    x.extend(x)\nconfig = GRPOConfig(beta=x[0])\n",
    ],
)
def test_nothing_is_run_and_nothing_runs_away(text: str, tmp_path: Path) -> None:
    settings = read(tmp_path, text + END)
    with pytest.raises(SpecError, match="which is known only at run time"):
        settings.value("beta")


@pytest.mark.parametrize(
    "text",
    [
        "d = {}\n" + "".join(f"d['k{i}'] = {i}\n" for i in range(20_000)) + "config = GRPOConfig(beta=a)\n",
        "".join(f"a{i} = 1\nif b():\n    a{i} = 2\n" for i in range(10_000)) + "config = GRPOConfig(beta=a9)\n",
    ],
)
def test_a_script_that_is_too_long_to_be_followed_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="too long to be followed"):
        read(tmp_path, text + END)


def test_a_script_without_a_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="creates neither a trainer of TRL"):
        read(tmp_path, "print('nothing is trained here')\n")


@pytest.mark.parametrize("bits", [4, 8])
def test_a_base_is_packed_as_the_trainer_is_told(bits: int, tmp_path: Path) -> None:
    """TRL 1.16.0, sft_trainer.py: `quantization_config` of the trainer, where the model is a name."""
    packed = f"BitsAndBytesConfig(load_in_{bits}bit=True)"
    trainer = f"SFTTrainer({{}}, args=SFTConfig(), peft_config=LoraConfig(r=8), quantization_config={packed})\n"
    assert read(tmp_path, trainer.format("'a/b'")).value(f"load_in_{bits}bit") is True
    loaded = read(tmp_path, trainer.format("AutoModelForCausalLM.from_pretrained('a/b')"))
    assert loaded.value(f"load_in_{bits}bit") is False


def test_a_model_that_is_loaded_first_has_the_type_of_its_configuration(tmp_path: Path) -> None:
    """transformers 5.19, modeling_utils.py: `if dtype is None: dtype = "auto"`; a name is loaded in float32 by TRL."""
    trainer = "SFTTrainer({}, args=SFTConfig())\n"
    loaded = read(tmp_path, trainer.format("AutoModelForCausalLM.from_pretrained('a/b')"))
    assert loaded.value("model_init_kwargs.dtype") == "auto"
    assert read(tmp_path, trainer.format("'a/b'")).value("model_init_kwargs.dtype") is None


def test_fields_of_trl_s_own_classes_have_their_defaults(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        "parser = TrlParser((SFTConfig, ModelConfig))\n"
        "config, model, _ = parser.parse_args_and_config(return_remaining_strings=True)\n"
        "dtype = model.dtype if model.dtype in ['auto', None] else getattr(torch, model.dtype)\n"
        "config.model_init_kwargs = dict(dtype=dtype, attn_implementation=model.attn_implementation)\n"
        "SFTTrainer('a/b', args=config)\n",
    )
    assert settings.value("model_init_kwargs.dtype") == "float32"


def test_parallelism_of_a_script_s_own_is_accelerate_s(tmp_path: Path) -> None:
    settings = read(tmp_path, "SFTTrainer('a/b', args=SFTConfig(parallelism_config=ParallelismConfig(cp_size=2)))\n")
    assert settings.value("accelerate.parallelism_config.parallelism_config_cp_size") == 2


def test_what_a_long_script_does_behind_its_trainer_is_not_followed(tmp_path: Path) -> None:
    long = (
        "def play():\n    for x in range(1000):\n        for y in range(1000):\n            z = [x, y, x + y]\nplay()\n"
    )
    settings = read(tmp_path, "config = GRPOConfig(beta=0.5)\n" + END + long * 30)
    assert settings.value("beta") == 0.5
    assert any("nothing after the trainer at line 9 is read" in note for note in settings.notes)


MODEL = "Qwen/Qwen2.5-3B-Instruct"
UNSLOTH = (
    "model, tokenizer = FastLanguageModel.from_pretrained(model_name='a/b', max_seq_length=2048{})\n"
    "model = FastLanguageModel.get_peft_model(model, r=8)\n"
)


def test_unsloth_s_model_has_a_base_in_4_bits_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    trainer = "SFTTrainer(model=model, args=SFTConfig())\n"
    usual = read(tmp_path, UNSLOTH.format("") + trainer)
    assert (usual.value("load_in_4bit"), usual.value("lora_r"), usual.value("max_seq_length")) == (True, 8, 2048)
    assert read(tmp_path, UNSLOTH.format(", load_in_16bit=True") + trainer).value("load_in_4bit") is False


def test_unsloth_s_trainer_is_sft_s_and_layers_that_it_trains_in_full_are_not_counted(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        "from unsloth import FastLanguageModel, UnslothTrainer, UnslothTrainingArguments\n"
        "model = FastLanguageModel.from_pretrained('unsloth/mistral-7b-v0.3', max_seq_length=2048)\n"
        "model = FastLanguageModel.get_peft_model(model, r=128, target_modules=['q_proj', 'embed_tokens', 'lm_head'])\n"
        "UnslothTrainer(model, UnslothTrainingArguments(per_device_train_batch_size=2)).train()\n",
    )
    assert (settings.value("trainer"), settings.value("per_device_train_batch_size")) == ("sft", 2)
    assert convert(settings, "1xH100", None).not_counted == ("lora.modules_to_save=['embed_tokens', 'lm_head']",)


def test_a_notebook_with_pictures_is_read_and_a_larger_script_is_not(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": HEAD + f"config = GRPOConfig(beta=0.5)\n{END}"}]
    notebook = {"cells": [*cells, {"cell_type": "markdown", "source": "p" * (2 << 20)}]}
    (tmp_path / "train.ipynb").write_text(json.dumps(notebook))
    assert read_source(tmp_path / "train.ipynb", None).value("beta") == 0.5
    with pytest.raises(SpecError, match="more than 1048576 bytes"):
        read(tmp_path, "#" * (2 << 20))


def test_unsloth_s_own_engine_is_a_colocated_one_whose_weights_are_counted_once(tmp_path: Path) -> None:
    fast = UNSLOTH.format(", load_in_4bit=False, fast_inference=True, gpu_memory_utilization=0.6")
    settings = read(tmp_path, fast + "GRPOTrainer(model=model, args=GRPOConfig(bf16=True))\n")
    assert (settings.value("use_vllm"), settings.value("vllm_gpu_memory_utilization")) == (True, 0.6)
    imported, job = import_job(settings, Asked("1xA100", MODEL))
    assert imported.share is not None
    apart = add_kv_cache(job, replace(imported.share, is_of_shared_weights=False), settings.table.vllm)
    weights = engine_parameter_bytes(job.load_model(), 2)
    assert 0 <= apart.rollout.kv_cache_memory - job.rollout.kv_cache_memory - weights < weights // 50


@pytest.mark.parametrize(("gpu", "dtype"), [("1xT4", "float16"), ("1xL4", "bfloat16")])
def test_unsloth_trains_and_generates_in_float16_where_a_gpu_has_no_bfloat16(
    gpu: str, dtype: str, tmp_path: Path
) -> None:
    fast = UNSLOTH.format(", fast_inference=True, gpu_memory_utilization=0.6")
    _, job = import_job(read(tmp_path, fast + "GRPOTrainer(model=model, args=GRPOConfig())\n"), Asked(gpu, MODEL))
    assert (job.training.dtype, settle(job).rollout.dtype) == (dtype, dtype)


def test_unsloth_replaces_defaults_and_raises_the_micro_batch_to_a_group(tmp_path: Path) -> None:
    """Source: unsloth/models/rl.py, `replacements` and `check_num_generations`."""
    words = "GRPOConfig(per_device_train_batch_size=1, gradient_accumulation_steps=1, num_generations=6)"
    settings = read(tmp_path, UNSLOTH.format("") + f"GRPOTrainer(model=model, args={words})\n")
    keys = {"per_device_train_batch_size": 6, "optim": "adamw_8bit", "beta": 0.001, "loss_type": "bnpo"}
    assert {key: settings.value(key) for key in keys} == keys
    assert any("is raised to num_generations = 6" in note for note in settings.notes)
    whole = read(tmp_path, UNSLOTH.format("") + f"GRPOTrainer(model=model, args={words.replace('=6', '=1')})\n")
    assert whole.value("per_device_train_batch_size") == 1


@pytest.mark.parametrize(
    "cell",
    [
        "%%bash\ncase $T in\n  rocm6.*) T=rocm6.4 ;;\nesac\npip install 'a==08'\n",
        "%%capture\nif a:\n    !uv pip install -qqq \\\n        torch {_numpy} \\\n        unsloth\nelse:\n    pass\n",
        "!curl http://localhost:1/api -d '{ \\\n    \"model\": 1 \\\n    }'\nfiles = !ls\n",
        "%%writefile ds.json\n{true: 1}\n",
        "%env A=1\nx = %pwd\n",
    ],
)
def test_a_cell_of_another_language_and_a_continued_command_leave_the_rest_as_it_is(cell: str, tmp_path: Path) -> None:
    """unslothai/notebooks: 37 of 64 of its notebooks have such a cell."""
    notebook = tmp_path / "colab.ipynb"
    cells = [cell, f"{HEAD}config = GRPOConfig(beta=0.5)\n", END]
    notebook.write_text(json.dumps({"cells": [{"cell_type": "code", "source": text} for text in cells]}))
    settings = read_source(notebook, None)
    assert settings.value("beta") == 0.5
    assert settings.notes == ()


def test_quotes_within_an_f_string_are_read_on_every_python(tmp_path: Path) -> None:
    """Gemma3_(4B)-Vision-GRPO.ipynb has them: Python 3.11 refuses what PEP 701 allows."""
    text = 'd = {\'a\': 1}\nname = (\n    f"{d["a"]} and {d["b"]} "\n    f\'x\'\n)\nconfig = GRPOConfig(beta=0.5)\n'
    assert read(tmp_path, text + END).value("beta") == 0.5


def test_a_game_that_is_played_before_the_training_is_not_followed(tmp_path: Path) -> None:
    """The Sudoku notebooks of unslothai/notebooks try every move before they train."""
    game = "moves = 0\nfor i in range(1900):\n" + "".join(f"    m{i} = [i, i + 1, i + 2]\n" for i in range(60))
    settings = read(tmp_path, f"{game}config = GRPOConfig(beta=0.5, top_k=m3)\n{END}")
    assert settings.value("beta") == 0.5
    assert any("takes too long to be followed; what it sets is unknown" in note for note in settings.notes)
    with pytest.raises(SpecError, match="which is known only at run time"):
        settings.value("top_k")


def test_what_ipython_alone_knows_is_left_out_and_a_notebook_is_read_by_its_cells(tmp_path: Path) -> None:
    cells = ["%%time\n!pip install trl\n", f"{HEAD}config = GRPOConfig(beta=0.5)\n", END]
    script = tmp_path / "colab.py"
    script.write_text("".join(cells))
    assert read_source(script, None).value("beta") == 0.5
    parts = [{"cell_type": "markdown", "source": ["# x"]}]
    parts += [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    notebook = tmp_path / "colab.ipynb"
    notebook.write_text(json.dumps({"cells": parts}))
    assert read_source(notebook, None).value("beta") == 0.5
    notebook.write_text("{}")
    with pytest.raises(SpecError, match="is not Python"):
        read_source(notebook, None)


def test_the_owner_of_a_method_is_evaluated_once(tmp_path: Path) -> None:
    text = "sizes = {'n': 8}\nconfig = GRPOConfig(num_generations={'n': sizes.pop('n')}.get('n'))\n"
    assert read(tmp_path, text + END).value("num_generations") == 8


@pytest.mark.parametrize("value", ["len(range(20_000))", "b'8'", "(1, 2) * 4", "round(8, -99)", "'8' * 1"])
def test_a_value_that_is_not_computed_is_unknown_and_shown_as_it_is_written(tmp_path: Path, value: str) -> None:
    with pytest.raises(SpecError) as refusal:
        read(tmp_path, f"config = GRPOConfig(num_generations={value})\n{END}").value("num_generations")
    assert f"num_generations is {value}, which is known only at run time" in str(refusal.value)


def test_a_loop_over_more_numbers_than_are_followed_does_not_end_early(tmp_path: Path) -> None:
    text = "n = 0\nfor i in range(20_000):\n    n = i\nconfig = GRPOConfig(num_generations=n)\n"
    with pytest.raises(SpecError, match="known only at run time"):
        read(tmp_path, text + END).value("num_generations")


STANDBY = """
import os
os.environ["UNSLOTH_VLLM_STANDBY"] = "1"
from unsloth import FastLanguageModel
from trl import GRPOConfig, GRPOTrainer
model, tokenizer = FastLanguageModel.from_pretrained(
    "{}", max_seq_length={}, fast_inference=True, gpu_memory_utilization=0.9
)
model = FastLanguageModel.get_peft_model(model, r={}, lora_alpha=64, use_gradient_checkpointing="unsloth")
args = GRPOConfig(
    num_generations={}, max_prompt_length=256, max_completion_length={}, per_device_train_batch_size=1,
    optim="adamw_8bit",
)
GRPOTrainer(model=model, reward_funcs=[f], args=args, train_dataset=d).train()
"""


@pytest.mark.parametrize(
    "numbers",
    [("unsloth/Qwen2.5-3B-Instruct", 1024, 64, 8, 200), ("unsloth/meta-Llama-3.1-8B-Instruct", 1024, 32, 6, 768)],
)
def test_grpo_notebooks_of_unsloth_fit_on_the_t4_that_they_are_published_for(
    numbers: tuple[str | int, ...], tmp_path: Path
) -> None:
    # Unsloth's KV cache sleeps during training (unsloth_zoo/vllm_utils.py, `UNSLOTH_VLLM_STANDBY`)
    (tmp_path / "n.py").write_text(STANDBY.format(*numbers))
    assert check(read_source(tmp_path / "n.py", None), Asked("1xT4")).fits
    (tmp_path / "n.py").write_text(STANDBY.format(*numbers).replace('"1"', '"0"'))
    assert not check(read_source(tmp_path / "n.py", None), Asked("1xT4")).fits
