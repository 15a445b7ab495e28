"""Schedule-Free AdamW and SGD: averaging of the weights in place of a learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.averages import move_towards
from compiled_optim.engine.hyperparameters import check_not_negative, check_usual
from compiled_optim.engine.rule import Group
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import EngineOptions
from compiled_optim.tensors import Number, Tensors

COUNTERS = {"k": 0, "train_mode": True, "weight_sum": 0.0, "lr_max": -1.0, "scheduled_lr": 0.0}
"""The entries of a group that steps change, under the names of the package schedulefree, and their initial values."""


class ScheduleFree(Optimizer):
    """The base of both optimizers: the weights of the average, and the modes.

    Parameters hold :math:`y` in train mode and :math:`x` in eval mode. Both are interpolations of the other one and
    the state :math:`z`, so no further copy of the weights is kept.
    """

    counts_steps = False
    initial_values: ClassVar[Mapping[str, None]] = {"z": None}

    def check(self, group: Group) -> None:
        check_usual(group)
        if not 0.0 < self.interpolation(group) < 1.0:
            raise ValueError(
                f"Invalid momentum of {type(self).__name__}: {self.interpolation(group)}; it must be between 0 and 1"
            )
        check_not_negative("warmup_steps value", group["warmup_steps"])
        check_not_negative("r value", group["r"])
        check_not_negative("weight_lr_power value", group["weight_lr_power"])

    @staticmethod
    def interpolation(group: Group) -> float:
        """Return the momentum: :math:`y` is this much of :math:`x`, and the rest is of :math:`z`."""
        return float(group["betas"][0] if "betas" in group else group["momentum"])

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        after = self.after_step(group)
        share = after["weight_sum"] - group["weight_sum"]
        share = share / after["weight_sum"] if after["weight_sum"] else 0.0
        lr = after["scheduled_lr"]
        return {
            "lr": lr,
            "share": share,
            "y_step": lr * (1 - self.interpolation(group) * (1 - share)),
            "has_weight_decay": bool(group["weight_decay"] != 0),
        }

    def before_step(self, groups: Sequence[Group]) -> None:
        """Raise if a group is in eval mode."""
        for number, group in enumerate(groups):
            if not group["train_mode"]:
                raise RuntimeError(
                    f"{type(self).__name__} is in eval mode: the parameters of group {number} hold the averaged "
                    "weights, which are not trained; call optimizer.train() before training and optimizer.eval() "
                    "before evaluation"
                )

    def after_step(self, group: Group, sums: Sequence[float] = ()) -> Mapping[str, Any]:
        steps, warmup = group["k"] + 1, group["warmup_steps"]
        lr = float(group["lr"]) * min(steps / warmup, 1.0) if warmup else float(group["lr"])
        lr_max = max(lr, group["lr_max"])
        weight = steps ** group["r"] * lr_max ** group["weight_lr_power"]
        return {"k": steps, "scheduled_lr": lr, "lr_max": lr_max, "weight_sum": group["weight_sum"] + weight}

    def train(self) -> None:
        """Set train mode: write :math:`y` into the parameters. Steps are made in this mode, in which it starts."""
        self._set_mode(True)

    def eval(self) -> None:
        """Set eval mode: write the averaged weights :math:`x` into the parameters, to evaluate or save the model."""
        self._set_mode(False)

    def _set_mode(self, train: bool) -> None:
        self._follow_modules()
        for group in self.param_groups:
            if group["train_mode"] != train:
                beta = self.interpolation(group)
                move_towards("z", group["params"], self._state, 1 - beta if train else 1 - 1 / beta)
                group["train_mode"] = train


class ScheduleFreeAdamW(ScheduleFree):
    r"""Drop-in for ``schedulefree.AdamWScheduleFree`` (Defazio et al., 2024, `arXiv:2405.15682 <https://arxiv.org/abs/2405.15682>`_).

    With the learning rate :math:`\gamma` after warm-up, :math:`\gamma_{max}` its largest value so far,
    :math:`w_t = t^r \gamma_{max}^q` (:math:`q` is ``weight_lr_power``), and :math:`c = w_t / \sum_{i \le t} w_i`:

    .. math::
        v &= \beta_2 v + (1 - \beta_2) g^2, \qquad
        u = \frac{g}{\sqrt{v / (1 - \beta_2^t)} + \epsilon} + \lambda y \\
        z &= z - \gamma u, \qquad x = (1 - c) x + c z, \qquad y = \beta_1 x + (1 - \beta_1) z

    Gradients are computed at :math:`y`, and the model is evaluated and saved at :math:`x`. So call ``train()`` before
    training, and ``eval()`` before evaluation and before saving the model; both change the parameters in place.

    Use it if the number of steps is not known in advance: it needs no schedule, and keeps as many states as
    :class:`~compiled_optim.AdamW`. The learning rate is 1 to 10 times larger than AdamW's with a schedule; warm-up
    helps. Do not combine it with another learning rate schedule. For networks with batch normalisation, run a few
    batches in train mode of the model and eval mode of the optimizer before evaluation, to update the statistics.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        betas: the interpolation of :math:`y`, and the decay rate of the average of the squared gradient.
        eps: added to the denominator.
        weight_decay: the decay :math:`\lambda`, at :math:`y`.
        warmup_steps: the number of steps in which the learning rate rises linearly.
        r: the exponent of the step count in :math:`w_t`.
        weight_lr_power: the exponent :math:`q` of the learning rate in :math:`w_t`.
        foreach: has no effect.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`.

    >>> weight = torch.nn.Parameter(torch.ones(3))
    >>> opt = ScheduleFreeAdamW([weight], lr=0.5, compile=False)
    >>> for _ in range(2):
    ...     weight.grad = torch.ones(3)
    ...     opt.step()
    >>> opt.eval()
    >>> weight.tolist()  # the average of 0.5 and 0
    [0.25, 0.25, 0.25]
    """

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        foreach: bool | None = True,
        *,
        maximize: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        defaults: Group = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, warmup_steps=warmup_steps, r=r)
        defaults |= dict(weight_lr_power=weight_lr_power, foreach=foreach, maximize=maximize)
        super().__init__(params, {**defaults, **COUNTERS}, **options)

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        beta2 = float(group["betas"][1])
        return {**super().derived(group, step), "correction": 1 / math.sqrt(1 - beta2 ** (group["k"] + 1))}

    @staticmethod
    def update(
        y: Tensors, g: Tensors, z: Tensors, exp_avg_sq: Tensors, *,
        lr: Number, share: Number, y_step: Number, beta2: Number, correction: Number, eps: Number,
        weight_decay: Number, has_weight_decay: bool,
    ) -> None:  # fmt: skip
        exp_avg_sq.ema_(g * g, beta2)  # v = b2 v + (1 - b2) g²
        u = g / (exp_avg_sq.sqrt() * correction + eps)
        if has_weight_decay:
            u = u + weight_decay * y
        y.lerp_(z, share)  # y = b1 x + (1 - b1) z for the new x and z, without x
        y -= y_step * u
        z -= lr * u


class ScheduleFreeSGD(ScheduleFree):
    r"""Drop-in for ``schedulefree.SGDScheduleFree`` (Defazio et al., 2024, `arXiv:2405.15682 <https://arxiv.org/abs/2405.15682>`_).

    With the learning rate :math:`\gamma` after warm-up, :math:`\gamma_{max}` its largest value so far,
    :math:`w_t = t^r \gamma_{max}^q` (:math:`q` is ``weight_lr_power``), and :math:`c = w_t / \sum_{i \le t} w_i`:

    .. math::
        z &= z - \gamma (g + \lambda y), \qquad x = (1 - c) x + c z, \qquad y = \beta x + (1 - \beta) z

    Gradients are computed at :math:`y`, and the model is evaluated and saved at :math:`x`. So call ``train()`` before
    training, and ``eval()`` before evaluation and before saving the model; both change the parameters in place.

    Use it in place of :class:`~compiled_optim.SGD` with momentum if the number of steps is not known in advance. The
    learning rate is 10 to 50 times larger. See :class:`~compiled_optim.ScheduleFreeAdamW` for its limits.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        momentum: the interpolation :math:`\beta`, between 0 and 1.
        weight_decay: the decay :math:`\lambda`, at :math:`y`.
        warmup_steps: the number of steps in which the learning rate rises linearly.
        r: the exponent of the step count in :math:`w_t`.
        weight_lr_power: the exponent :math:`q` of the learning rate in :math:`w_t`.
        foreach: has no effect.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`.

    >>> weight = torch.nn.Parameter(torch.ones(3))
    >>> opt = ScheduleFreeSGD([weight], lr=0.5, compile=False)
    >>> for _ in range(2):
    ...     weight.grad = torch.ones(3)
    ...     opt.step()
    >>> opt.eval()
    >>> weight.tolist()  # the average of 0.5 and 0
    [0.25, 0.25, 0.25]
    """

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2,
        foreach: bool | None = True,
        *,
        maximize: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        defaults: Group = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, warmup_steps=warmup_steps, r=r)
        defaults |= dict(weight_lr_power=weight_lr_power, foreach=foreach, maximize=maximize)
        super().__init__(params, {**defaults, **COUNTERS}, **options)

    @staticmethod
    def update(
        y: Tensors, g: Tensors, z: Tensors, *,
        lr: Number, share: Number, y_step: Number, weight_decay: Number, has_weight_decay: bool,
    ) -> None:  # fmt: skip
        u = g + weight_decay * y if has_weight_decay else g
        y.lerp_(z, share)  # y = b x + (1 - b) z for the new x and z, without x
        y -= y_step * u
        z -= lr * u
