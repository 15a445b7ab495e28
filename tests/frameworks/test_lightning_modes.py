"""Lightning's Trainer with weight averaging, with bfloat16 weights, and with steps during backward."""

from __future__ import annotations

from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor

from .runs import OURS, THEIRS, assert_same_run, batches, loss_of
from .test_lightning import STEPS, Module, _quiet, run_of, trained

__all__ = ["_quiet"]  # the fixture


class Average(StochasticWeightAveraging):
    """Stochastic weight averaging that counts the models it has averaged."""

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.averaged = int(self.n_averaged)
        super().on_train_end(trainer, module)


def test_stochastic_weight_averaging(tmp_path):
    """It replaces the scheduler, and writes the averages into the parameters at the end."""
    runs, averaged = [], []
    for optimizer in (OURS, THEIRS):
        average = Average(swa_lrs=2e-2, swa_epoch_start=2, annealing_epochs=1)
        runs.append(run_of(Module(optimizer), tmp_path, max_steps=-1, max_epochs=4, callbacks=[average]))
        averaged.append(average.averaged)
    assert_same_run(*runs)
    assert averaged == [3, 3]
    without = run_of(Module(THEIRS), tmp_path, max_steps=-1, max_epochs=4)
    assert not torch.allclose(runs[0].end[0], without.end[0], atol=1e-3)


class LowPrecisionModule(Module):
    """A module whose data have the dtype of its parameters."""

    def training_step(self, batch: Tensor) -> Tensor:
        number = len(self.run.losses)
        loss = loss_of(self.model, batches(2 * STEPS)[number].to(self.model[0].weight.dtype))
        self.run.losses.append(loss.item())
        return loss


def distance(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the mean difference of all elements."""
    return float(torch.cat([(one - other).flatten() for one, other in zip(some, others, strict=True)]).abs().mean())


def test_bfloat16_weights(tmp_path):
    """Our steps are rounded once and torch's several times. Ours are no further from a run in float32."""
    modules = [LowPrecisionModule(optimizer) for optimizer in (OURS, THEIRS)]
    ours, theirs = (run_of(module, tmp_path, "bf16-true", gradient_clip_val=0.5) for module in modules)
    exact = run_of(Module(THEIRS), tmp_path, gradient_clip_val=0.5)
    assert all(param.dtype == torch.bfloat16 for param in ours.end)
    error = distance(ours.end, exact.end)
    assert error < 0.2 * distance(exact.start, exact.end)
    assert error < 1.1 * distance(theirs.end, exact.end)
    assert ours.losses == pytest.approx(theirs.losses, rel=0.02)
    assert ours.reports == theirs.reports


def in_backward(*args: Any, **kwargs: Any) -> Any:
    return OURS(*args, in_backward=True, **kwargs)


@pytest.mark.parametrize("name", ["32-true", "bf16-mixed"])
def test_steps_during_backward(name, tmp_path):
    """The closure that Lightning passes to step() calls backward."""
    module = Module(in_backward)
    ours, theirs = run_of(module, tmp_path, name), run_of(Module(THEIRS), tmp_path, name)
    assert_same_run(ours, theirs)
    assert all(param.grad is None for param in module.parameters())


def test_steps_during_backward_of_a_resumed_run(tmp_path):
    expected = run_of(Module(THEIRS), tmp_path)
    first, second = Module(in_backward), Module(in_backward)
    trained(first, tmp_path, max_steps=STEPS // 2).save_checkpoint(tmp_path / "half.ckpt")
    second.run.losses, second.run.reports = first.run.losses, first.run.reports
    assert_same_run(run_of(second, tmp_path, resume=tmp_path / "half.ckpt"), expected)


class AccumulatingModule(Module):
    """A module that keeps gradients of every other batch, as Lightning's ``accumulate_grad_batches=2`` needs it."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if len(self.run.losses) % 2:
            with self.optimizers().optimizer.accumulate():
                loss.backward()
        else:
            loss.backward()


def test_steps_during_backward_with_accumulation(tmp_path):
    """Without ``accumulate()``, the second backward of an iteration is refused."""
    arguments = {"accumulate_grad_batches": 2, "max_steps": STEPS // 2}
    theirs = run_of(Module(THEIRS), tmp_path, **arguments)
    assert_same_run(run_of(AccumulatingModule(in_backward), tmp_path, **arguments), theirs)
    with pytest.raises(RuntimeError, match="accumulate"):
        trained(Module(in_backward), tmp_path, **arguments)


def test_steps_during_backward_refuse_a_scaler(tmp_path):
    with pytest.raises(RuntimeError, match="does not support GradScaler"):
        trained(Module(in_backward), tmp_path, "16-mixed")
