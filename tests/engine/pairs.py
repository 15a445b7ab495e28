"""One of our optimizers and the one of torch.optim with the same name, stepped side by side."""

from __future__ import annotations

import torch

import compiled_optim as co
from tests.helpers import assert_close, copies, gradients

OPTIMIZERS = {
    "SGD": dict(lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "Adam": dict(lr=0.1, weight_decay=0.01),
    "AdamW": dict(lr=0.1, amsgrad=True),
}


class Pair:
    """One of our optimizers and torch's, stepped side by side."""

    def __init__(self, name, params, compiled=True, groups=None, **options):
        self.ours, self.theirs = params, copies(params)
        options = {**OPTIMIZERS[name], **options}
        split = groups or (lambda ps: ps)
        self.optimizer = getattr(co, name)(split(self.ours), **options, compile=compiled)
        self.reference = getattr(torch.optim, name)(split(self.theirs), **options)

    def step(self, grads):
        for param, twin, grad in zip(self.ours, self.theirs, grads, strict=True):
            param.grad = grad
            twin.grad = None if grad is None else grad.clone()
        self.optimizer.step()
        self.reference.step()

    def steps(self, count=3, seed=1, mask=lambda step, i: True):
        for step, grads in enumerate(gradients(self.ours, count, seed)):
            self.step([grad if mask(step, i) else None for i, grad in enumerate(grads)])

    def agree(self, tolerance=2e-6):
        assert_close(self.ours, self.theirs, tolerance)
