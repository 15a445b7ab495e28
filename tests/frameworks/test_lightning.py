"""Lightning's Trainer and Fabric train with our AdamW as with torch.optim.AdamW."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from .runs import OPTIONS, OURS, THEIRS, Run, assert_same_run, batches, loss_of, small_model

STEPS = 8


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Ignore advice about data loaders, loggers and unused accelerators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def new_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)


def precision(name: str, plugin: type[MixedPrecision | FabricMixedPrecision]) -> dict[str, Any]:
    """Return the arguments of Trainer or Fabric. On the CPU both use bfloat16 for "16-mixed" unless given a plugin."""
    return {"plugins": plugin("16-mixed", "cpu", new_scaler())} if name == "16-mixed" else {"precision": name}


class Module(lightning.LightningModule):
    """A module with automatic optimization. Its loss is infinite in the batch ``overflow``.

    It counts the batches itself, because Lightning does not resume with the next one.
    """

    def __init__(self, optimizer: Any, overflow: int | None = None, **options: Any) -> None:
        super().__init__()
        self.model = small_model()
        self.make, self.overflow, self.options = optimizer, overflow, options
        self.run = Run.of(self.model)

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), **OPTIONS, **self.options)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: Tensor) -> Tensor:
        number = len(self.run.losses)
        loss = loss_of(self.model, batches(2 * STEPS)[number])
        self.run.losses.append(loss.item())
        return loss * (float("inf") if number == self.overflow else 1.0)

    def on_train_batch_end(self, *args: Any) -> None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        rates = [group["lr"] for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        self.run.reports.append({"lr": rates, "scale": scaler and scaler.get_scale()})


class ManualModule(Module):
    """A module with manual optimization: two optimizers, each for a part of the model, take turns."""

    def __init__(self, optimizer: Any, max_norm: float | None = None, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self.automatic_optimization = False
        self.max_norm = max_norm

    def configure_optimizers(self) -> Any:
        parts = self.model[0].parameters(), self.model[2].parameters()
        return [self.make(part, **OPTIONS, **self.options) for part in parts]

    def training_step(self, batch: Tensor) -> None:
        optimizer = self.optimizers()[len(self.run.losses) % 2]
        self.toggle_optimizer(optimizer)
        self.manual_backward(super().training_step(batch))
        if self.max_norm is not None:
            self.clip_gradients(optimizer, gradient_clip_val=self.max_norm, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)


def trained(
    module: Module, directory: Path, name: str = "32-true", resume: Path | None = None, **arguments: Any
) -> lightning.Trainer:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        **precision(name, MixedPrecision),
        **{"max_steps": STEPS, **arguments},
    )
    trainer.fit(module, torch.utils.data.DataLoader(range(STEPS // 2)), ckpt_path=resume)
    for optimizer in trainer.optimizers:
        module.run.finish(module.model, optimizer)
    return trainer


def run_of(module: Module, *args: Any, **kwargs: Any) -> Run:
    trained(module, *args, **kwargs)
    return module.run


PRECISIONS = ["32-true", "bf16-mixed", "16-mixed"]
CASES = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping by norm": {"gradient_clip_val": 0.5},
    "clipping by value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    "accumulation, clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
}
MANUAL_CASES = {
    "plain": ("32-true", {}),
    "clipping": ("32-true", {"max_norm": 0.5}),
    "bf16, clipping": ("bf16-mixed", {"max_norm": 0.5}),
    "fp16": ("16-mixed", {}),
    "fp16, overflow": ("16-mixed", {"overflow": 2}),
}
OVERFLOWS = {"plain": ({}, {}), "clipping": ({}, {"gradient_clip_val": 0.5}), "fused": ({"fused": True}, {})}


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("case", CASES)
def test_training(case, name, tmp_path):
    ours, theirs = (run_of(Module(optimizer), tmp_path, name, **CASES[case]) for optimizer in (OURS, THEIRS))
    assert_same_run(ours, theirs)


@pytest.mark.parametrize("case", OVERFLOWS)
def test_an_overflow_skips_the_step(case, tmp_path):
    options, arguments = OVERFLOWS[case]
    ours, theirs = (
        run_of(Module(optimizer, overflow=2, **options), tmp_path, "16-mixed", **arguments)
        for optimizer in (OURS, THEIRS)
    )
    assert_same_run(ours, theirs)
    assert [report["scale"] for report in ours.reports[:4]] == [256.0, 256.0, 128.0, 128.0]


@pytest.mark.parametrize("name", ["bf16-mixed", "16-mixed"])
def test_clipping_is_refused_with_fused_as_for_torch(name, tmp_path):
    for optimizer in (OURS, THEIRS):
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            trained(Module(optimizer, fused=True), tmp_path, name, gradient_clip_val=0.5)


@pytest.mark.parametrize("name", ["32-true", "16-mixed"])
@pytest.mark.parametrize("resumed_by", [OURS, THEIRS], ids=["resumed by ours", "resumed by torch"])
@pytest.mark.parametrize("saved_by", [OURS, THEIRS], ids=["saved by ours", "saved by torch"])
def test_a_resumed_run_equals_an_uninterrupted_one(saved_by, resumed_by, name, tmp_path):
    expected = run_of(Module(THEIRS), tmp_path, name)
    first = Module(saved_by)
    trained(first, tmp_path, name, max_steps=STEPS // 2).save_checkpoint(tmp_path / "half.ckpt")
    second = Module(resumed_by)
    second.run.losses, second.run.reports = first.run.losses, first.run.reports
    assert_same_run(run_of(second, tmp_path, name, tmp_path / "half.ckpt"), expected)


@pytest.mark.parametrize("case", MANUAL_CASES)
def test_manual_optimization(case, tmp_path):
    name, options = MANUAL_CASES[case]
    ours, theirs = (run_of(ManualModule(optimizer, **options), tmp_path, name) for optimizer in (OURS, THEIRS))
    assert_same_run(ours, theirs)


class FabricTraining:
    """A training loop as Fabric's documentation has it, step by step."""

    def __init__(
        self, optimizer: Any, name: str = "32-true", max_norm: float | None = None, overflow: int | None = None
    ):
        self.max_norm, self.overflow = max_norm, overflow
        self.fabric = lightning.Fabric(accelerator="cpu", devices=1, **precision(name, FabricMixedPrecision))
        model = small_model()
        self.run = Run.of(model)
        self.inner = optimizer(model.parameters(), **OPTIONS)
        self.model, self.optimizer = self.fabric.setup(model, self.inner)

    def step(self, batch: Tensor) -> None:
        loss = loss_of(self.model, batch)
        self.fabric.backward(loss * (float("inf") if len(self.run.losses) == self.overflow else 1.0))
        if self.max_norm is not None:
            self.fabric.clip_gradients(
                self.model, self.optimizer, max_norm=self.max_norm, error_if_nonfinite=self.overflow is None
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.run.losses.append(loss.item())

    def finish(self) -> Run:
        return self.run.finish(self.model, self.inner)


FABRIC_CASES = {
    "plain": {},
    "clipping": {"max_norm": 0.5},
    "bf16": {"name": "bf16-mixed", "max_norm": 0.5},
    "fp16": {"name": "16-mixed"},
    "fp16, clipping": {"name": "16-mixed", "max_norm": 0.5},
    "fp16, overflow": {"name": "16-mixed", "overflow": 2},
    "fp16, overflow, clipping": {"name": "16-mixed", "overflow": 2, "max_norm": 0.5},
}


def trained_by_fabric(optimizer: Any, **options: Any) -> Run:
    training = FabricTraining(optimizer, **options)
    for batch in batches(STEPS):
        training.step(batch)
    return training.finish()


@pytest.mark.parametrize("case", FABRIC_CASES)
def test_fabric(case):
    ours, theirs = (trained_by_fabric(optimizer, **FABRIC_CASES[case]) for optimizer in (OURS, THEIRS))
    assert_same_run(ours, theirs)


@pytest.mark.parametrize("loaded_by", [OURS, THEIRS], ids=["loaded by ours", "loaded by torch"])
@pytest.mark.parametrize("saved_by", [OURS, THEIRS], ids=["saved by ours", "saved by torch"])
def test_a_checkpoint_of_fabric_continues_the_run(saved_by, loaded_by, tmp_path):
    first, second = FabricTraining(saved_by), FabricTraining(loaded_by)
    for batch in batches(STEPS)[: STEPS // 2]:
        first.step(batch)
    first.fabric.save(tmp_path / "half.ckpt", {"model": first.model, "optimizer": first.optimizer})
    second.fabric.load(tmp_path / "half.ckpt", {"model": second.model, "optimizer": second.optimizer})
    second.run.losses = first.run.losses
    for batch in batches(STEPS)[STEPS // 2 :]:
        second.step(batch)
    assert_same_run(second.finish(), trained_by_fabric(THEIRS))
