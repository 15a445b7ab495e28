"""``accelerate.Accelerator`` trains with our AdamW as with torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from .runs import OPTIONS, OURS, THEIRS, Run, assert_same_run, batches, loss_of, small_model

STEPS = 8


@pytest.fixture(autouse=True)
def _new_state() -> Iterator[None]:
    """Let each test choose its precision, which all accelerators of a process share."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Training:
    """A training loop as accelerate's documentation has it, step by step."""

    def __init__(self, optimizer, *, precision="no", accumulate=1, max_norm=None, overflow=None, **options):
        AcceleratorState._reset_state(reset_partial_state=True)
        self.max_norm, self.overflow = max_norm, overflow
        self.accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate)
        if precision == "fp16":
            # accelerate makes a scaler for accelerators only
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        model = small_model()
        optimizer = optimizer(model.parameters(), **OPTIONS, **options)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.run = Run.of(model)

    def step(self, number, batch):
        with self.accelerator.accumulate(self.model):
            loss = loss_of(self.model, batch)
            self.accelerator.backward(loss * (float("inf") if number == self.overflow else 1.0))
            if self.max_norm is not None and self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        scaler = self.accelerator.scaler
        self.run.losses.append(loss.item())
        self.run.reports.append(
            {
                "skipped": self.accelerator.optimizer_step_was_skipped,
                "lr": self.scheduler.get_last_lr(),
                "scale": scaler and scaler.get_scale(),
            }
        )

    def finish(self) -> Run:
        return self.run.finish(self.model, self.optimizer.optimizer)


def trained(optimizer, **options) -> Run:
    training = Training(optimizer, **options)
    for number, batch in enumerate(batches(STEPS)):
        training.step(number, batch)
    return training.finish()


CASES = {
    "plain": {},
    "accumulation": {"accumulate": 2},
    "clipping": {"max_norm": 0.5},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "fp16, clipping, accumulation": {"precision": "fp16", "max_norm": 0.5, "accumulate": 2},
    "fp16, fused": {"precision": "fp16", "fused": True},
    "overflow": {"precision": "fp16", "overflow": 3},
    "overflow, clipping": {"precision": "fp16", "overflow": 3, "max_norm": 0.5},
    "overflow, fused": {"precision": "fp16", "overflow": 3, "fused": True},
}


@pytest.mark.parametrize("case", CASES)
def test_training(case):
    assert_same_run(trained(OURS, **CASES[case]), trained(THEIRS, **CASES[case]))


@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["no clipping", "clipping"])
def test_an_overflow_skips_the_step_and_the_scheduler(max_norm):
    run = trained(OURS, precision="fp16", overflow=3, max_norm=max_norm)
    assert [report["skipped"] for report in run.reports] == [number == 3 for number in range(STEPS)]
    rates = [report["lr"] for report in run.reports]
    kept = [number for number, (before, now) in enumerate(pairwise(rates), start=1) if before == now]
    assert kept == [3]


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("loaded_by", [OURS, THEIRS], ids=["loaded by ours", "loaded by torch"])
@pytest.mark.parametrize("saved_by", [OURS, THEIRS], ids=["saved by ours", "saved by torch"])
def test_a_loaded_state_continues_the_run(saved_by, loaded_by, precision, tmp_path):
    expected = trained(THEIRS, precision=precision)
    first = Training(saved_by, precision=precision)
    numbered = list(enumerate(batches(STEPS)))
    for number, batch in numbered[: STEPS // 2]:
        first.step(number, batch)
    first.accelerator.save_state(str(tmp_path))
    second = Training(loaded_by, precision=precision)
    second.accelerator.load_state(str(tmp_path))
    second.run.losses, second.run.reports = first.run.losses, first.run.reports
    for number, batch in numbered[STEPS // 2 :]:
        second.step(number, batch)
    assert_same_run(second.finish(), expected)
