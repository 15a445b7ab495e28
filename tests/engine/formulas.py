"""The catalog's references with parameter groups and absent gradients, which a Formula itself does not have."""

from __future__ import annotations

from collections import defaultdict

import torch

from catalog import Entry


class FormulaOfEach(torch.optim.Optimizer):
    """An optimizer that steps each parameter with a Formula of its own, if it has a gradient.

    A group's ``max_grad_norm`` is applied by torch's ``clip_grad_norm_`` to its gradients of one dtype, as BertAdam
    does. The clipped gradients are written.
    """

    def __init__(self, params, entry: Entry, lr=0.1, **options):
        super().__init__(params, {"lr": lr, **options})
        self.formulas = {}
        for group in self.param_groups:
            own = {key: value for key, value in group.items() if key not in ("params", "lr")}
            if "max_grad_norm" in own:
                own["max_grad_norm"] = -1
            self.formulas.update({param: entry.reference([param], **own) for param in group["params"]})

    def step(self, closure=None):
        for group in self.param_groups:
            of_dtype = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    of_dtype[param.dtype].append(param)
            for params in of_dtype.values():
                if group.get("max_grad_norm", -1) > 0:
                    torch.nn.utils.clip_grad_norm_(params, group["max_grad_norm"])
                for param in params:
                    self.formulas[param].param_groups[0]["lr"] = group["lr"]
                    self.formulas[param].step()

    def steps_taken(self):
        """Return the number of steps of each parameter."""
        return [formula.steps for formula in self.formulas.values()]
