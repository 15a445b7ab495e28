"""``transformers.Trainer`` trains with our AdamW as with torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from .runs import OPTIONS, OURS, THEIRS, Run, assert_same_run, batches, loss_of, small_model

STEPS = 8
Rows = list[dict[str, Tensor]]


def language_model() -> tuple[torch.nn.Module, Rows]:
    """Return a transformer and its data. It is too deep to compare runs in bfloat16, which amplifies the last bit."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.2)
    tokens = torch.randint(0, 16, (64, 8), generator=torch.Generator().manual_seed(1))
    return LlamaForCausalLM(config), [{"input_ids": row, "labels": row} for row in tokens]


class Regression(torch.nn.Module):
    """A model with the interface that Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.inner, batch)}


def regression() -> tuple[torch.nn.Module, Rows]:
    return Regression(), [{"batch": row} for row in torch.cat(batches(4))]


class Case(NamedTuple):
    problem: Callable[[], tuple[torch.nn.Module, Rows]]
    arguments: dict[str, Any]


BOTH = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
CASES = {
    "plain": Case(language_model, {}),
    "accumulation": Case(language_model, {"gradient_accumulation_steps": 2}),
    "clipping": Case(language_model, {"max_grad_norm": 0.5}),
    "accumulation, clipping": Case(language_model, BOTH),
    "bf16": Case(regression, {"bf16": True}),
    "bf16, accumulation, clipping": Case(regression, {"bf16": True, **BOTH}),
}


def trained(case: Case, optimizer: Any, directory: Path, resume: Path | None = None) -> Run:
    """Train with an optimizer class, or with the optimizer that a function makes for a model."""
    model, rows = case.problem()
    usual = {"max_grad_norm": 0.0, "learning_rate": OPTIONS["lr"], "weight_decay": OPTIONS["weight_decay"]}
    arguments = TrainingArguments(
        output_dir=str(directory),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=4,
        max_steps=STEPS,
        logging_steps=1,
        save_steps=STEPS // 2,
        **{**usual, **case.arguments},
    )
    how = (
        {"optimizer_cls_and_kwargs": (optimizer, OPTIONS)}
        if isinstance(optimizer, type)
        else {"optimizers": (optimizer(model), None)}
    )
    run = Run.of(model)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, **how)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    run.losses = [entry["loss"] for entry in history]
    run.reports = [entry["learning_rate"] for entry in history]
    return run.finish(model, trainer.optimizer.optimizer)


@pytest.mark.parametrize("case", CASES)
def test_training(case, tmp_path):
    ours, theirs = (trained(CASES[case], optimizer, tmp_path) for optimizer in (OURS, THEIRS))
    assert_same_run(ours, theirs)


def test_training_with_an_optimizer_of_the_user(tmp_path):
    """Our optimizer gets the module itself, and so watches it."""
    case = CASES["accumulation, clipping"]
    ours = trained(case, lambda model: OURS(model, **OPTIONS), tmp_path)
    theirs = trained(case, lambda model: THEIRS(model.parameters(), **OPTIONS), tmp_path)
    assert_same_run(ours, theirs)


@pytest.mark.parametrize("case", ["accumulation, clipping", "bf16, accumulation, clipping"])
@pytest.mark.parametrize("resumed_by", [OURS, THEIRS], ids=["resumed by ours", "resumed by torch"])
@pytest.mark.parametrize("saved_by", [OURS, THEIRS], ids=["saved by ours", "saved by torch"])
def test_a_resumed_run_equals_an_uninterrupted_one(case, saved_by, resumed_by, tmp_path):
    expected = trained(CASES[case], THEIRS, tmp_path / "torch")
    whole = trained(CASES[case], saved_by, tmp_path / "whole")
    checkpoint = tmp_path / "whole" / f"checkpoint-{STEPS // 2}"
    resumed = trained(CASES[case], resumed_by, tmp_path / "resumed", checkpoint)
    assert_same_run(resumed, expected)
    if saved_by is resumed_by:
        assert all(map(torch.equal, resumed.end, whole.end))


@pytest.mark.parametrize("case", ["plain", "bf16"])
def test_steps_during_backward(case, tmp_path):
    ours = trained(CASES[case], lambda model: OURS(model, in_backward=True, **OPTIONS), tmp_path)
    theirs = trained(CASES[case], lambda model: THEIRS(model.parameters(), **OPTIONS), tmp_path)
    assert_same_run(ours, theirs)


def test_steps_during_backward_refuse_accumulation_by_the_trainer(tmp_path):
    """The second backward of an iteration would step again."""
    with pytest.raises(RuntimeError, match=r"accumulate\(\)"):
        trained(CASES["accumulation"], lambda model: OURS(model, in_backward=True, **OPTIONS), tmp_path)
