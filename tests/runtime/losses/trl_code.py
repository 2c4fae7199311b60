"""TRL's own losses, called without TRL: the text of one method is taken out of the installed file and compiled alone.

Importing TRL's trainers takes half a minute and starts looking for engines; a loss needs nothing of that but torch.
In: masked tensors [batch, tokens]. Out: the loss that TRL 1.16 computes. Fails where TRL is not installed.
"""

import ast
import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

TRL_VERSION = "1.16.0"


@cache
def method(file: str, name: str) -> Callable[..., Any]:
    """A method of the trainer in `trl/trainer/FILE`, as a function of self."""
    assert version("trl") == TRL_VERSION
    module_spec = find_spec("trl")
    assert module_spec is not None
    assert module_spec.submodule_search_locations is not None
    path = Path(module_spec.submodule_search_locations[0]) / "trainer" / file
    functions = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)]
    function = next(node for node in functions if node.name == name)
    function.decorator_list = []
    names = {"torch": torch, "math": math, "F": torch.nn.functional, "nanmin": torch.min, "nanmax": torch.max}
    names |= {"is_peft_model": lambda model: False, "Any": Any, "disable_gradient_checkpointing": None}
    exec(compile(ast.Module([function], []), str(path), "exec"), names)  # TRL's file, as it is installed
    result: Callable[..., Any] = names[name]  # type: ignore[assignment]
    return result


def alone() -> SimpleNamespace:
    """An accelerator of one process."""
    return SimpleNamespace(
        num_processes=1,
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        reduce=lambda value, reduction: value,
        sync_gradients=True,
        device=torch.device("cpu"),
    )


def grpo_loss(inputs: dict[str, torch.Tensor], **settings: Any) -> torch.Tensor:
    """`GRPOTrainer._compute_loss`. inputs: `logps`, `entropies`, `completion_mask`, `advantages` and more."""
    mask = inputs["completion_mask"]
    prompt = {"prompt_ids": torch.ones(len(mask), 1), "prompt_mask": torch.ones(len(mask), 1)}
    args = {"use_bias_correction_kl": False, "delta": None, "steps_per_generation": 1}
    trainer = SimpleNamespace(
        **{
            "_get_per_token_logps_and_entropies": lambda *_, **__: (inputs["logps"], inputs["entropies"], None),
            "_entropy_bonus_enabled": bool(settings.get("entropy_coef")),
            "_metrics": {"train": defaultdict(list)},
            "top_entropy_quantile": 1.0,
            "aux_loss_enabled": False,
            "off_policy_mask_threshold": None,
            "importance_sampling_level": "token",
            "beta": 0.0,
            "loss_type": "grpo",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "use_vllm": "importance_sampling_ratio" in inputs,
            "vllm_importance_sampling_correction": True,
            "use_adaptive_entropy": False,
            "current_gradient_accumulation_steps": 1,
            "model": SimpleNamespace(training=True),
            "accelerator": alone(),
            "args": SimpleNamespace(**args),
        }
        | settings
    )
    whole = {**prompt, "completion_ids": mask, "num_items_in_batch": mask.sum(), **inputs}
    loss: torch.Tensor = method("grpo_trainer.py", "_compute_loss")(trainer, None, whole)
    return loss


def rloo_loss(inputs: dict[str, torch.Tensor], **settings: Any) -> torch.Tensor:
    """`RLOOTrainer._compute_loss`. inputs: `logps`, `entropies`, `completion_mask`, `advantages`, `old_logps`."""
    mask = inputs["completion_mask"]
    prompt = {"prompt_ids": torch.ones(len(mask), 1), "prompt_mask": torch.ones(len(mask), 1)}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (inputs["logps"], inputs["entropies"], None),
        _metrics={"train": defaultdict(list)},
        aux_loss_enabled=False,
        model=SimpleNamespace(training=True),
        accelerator=alone(),
        **settings,
    )
    whole = {**prompt, "completion_ids": mask, **inputs}
    loss: torch.Tensor = method("rloo_trainer.py", "_compute_loss")(trainer, None, whole)
    return loss


def dpo_loss(
    logps: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, beta: float, kind: str = "sigmoid"
) -> torch.Tensor:
    """`DPOTrainer._compute_loss`. kind: `sigmoid` or `ipo`. Tensors: [chosen then rejected, tokens], half of each."""
    whole = torch.cat([torch.zeros(len(mask), 1), mask], dim=1)  # one token of a prompt
    zeros = torch.zeros_like(logps)

    def model(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(log_probs=logps * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    ref_chosen, ref_rejected = (reference * mask).sum(1).chunk(2)
    inputs = {"input_ids": whole, "attention_mask": whole, "completion_mask": whole}
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=alone(),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=0.0,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    batch = {**inputs, "ref_chosen_logps": ref_chosen, "ref_rejected_logps": ref_rejected}
    loss: torch.Tensor = method("dpo_trainer.py", "_compute_loss")(trainer, model, batch, False)
    return loss


def kto_loss(
    logps: torch.Tensor,
    reference: torch.Tensor,
    others: tuple[torch.Tensor, torch.Tensor],
    good: list[bool],
    beta: float,
) -> torch.Tensor:
    """`KTOTrainer._compute_loss`. others: log-probs of policy and reference of answers to other prompts, [answers]."""
    whole = torch.ones(len(good), logps.shape[1] + 1)

    def model(**_: Any) -> SimpleNamespace:
        zeros = torch.zeros_like(logps)
        return SimpleNamespace(log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=alone(),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        _compute_kl_logps=lambda *_: others[0],
        loss_type="kto",
        desirable_weight=1.0,
        undesirable_weight=1.0,
        beta=beta,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    batch = {"input_ids": whole, "attention_mask": whole, "completion_mask": whole, "label": torch.tensor(good)}
    batch |= {"ref_logps": reference.sum(1), "ref_KL_logps": others[1]}
    loss: torch.Tensor = method("kto_trainer.py", "_compute_loss")(trainer, model, batch, False)
    return loss


def advantages(file: str, first: str, names: dict[str, Any]) -> torch.Tensor:
    """The advantages of a trainer's `_generate_and_score_completions`, from the line that begins with `first` on."""
    module_spec = find_spec("trl")
    assert module_spec is not None
    assert module_spec.submodule_search_locations is not None
    folder = Path(module_spec.submodule_search_locations[0]) / "trainer"
    lines = (folder / file).read_text("utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.strip().startswith(first))
    end = next(
        n for n, line in enumerate(lines) if n > begin and line.strip().startswith("advantages = torch.nan_to_num")
    )
    text = "\n".join(line[8:] for line in lines[begin : end + 1])
    helpers = ast.parse((folder / "utils.py").read_text("utf-8"))
    nanstd = [node for node in helpers.body if isinstance(node, ast.FunctionDef) and node.name == "nanstd"]
    scope: dict[str, Any] = {"torch": torch, **names}
    exec(compile(ast.Module(nanstd, []), "utils.py", "exec"), scope)  # type: ignore[arg-type]
    exec(compile(text, file, "exec"), scope)
    result: torch.Tensor = scope["advantages"]
    return result
