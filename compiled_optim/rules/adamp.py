"""AdamP: Adam that does not let momentum inflate scale-invariant weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from operator import invert, or_
from typing import NamedTuple, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.hyperparameters import check_not_negative
from compiled_optim.engine.rule import Group
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import EngineOptions
from compiled_optim.tensors import AllReduce, Number, Tensors, materialize


class AdamP(Optimizer):
    r"""AdamP (Heo et al., 2020, `arXiv:2006.08217 <https://arxiv.org/abs/2006.08217>`_), for normalised networks.

    With :math:`u` the direction of Adam's step and :math:`\hat p = p / \|p\|`:

    .. math::
        u &= u - \hat p \, (\hat p \cdot u) \quad \text{if } \cos(g, p) < \delta / \sqrt{\dim p} \\
        p &= (1 - lr \cdot \lambda \cdot r) \, p - \frac{lr}{1 - \beta_1^t} \, u

    The condition is tried for the rows of a tensor (its channels), which must all meet it, and then for the tensor as a
    whole. Where it holds, the weights are taken to be scale-invariant and :math:`r` is ``wd_ratio``, else 1. Parameters
    of one dimension are stepped as by AdamW. Without normalisation layers it is AdamW at a higher cost.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        betas: decay rates of the averages of the gradient and of its square.
        eps: added to denominators.
        weight_decay: the decay :math:`\lambda`.
        delta: the threshold of the cosine.
        wd_ratio: the factor of the weight decay of scale-invariant weights.
        nesterov: use Nesterov momentum.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`.

    >>> weight = torch.nn.Parameter(torch.eye(2))
    >>> opt = AdamP([weight], lr=0.5, compile=False)
    >>> weight.grad = torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # orthogonal to each row
    >>> opt.step()
    >>> weight.tolist()
    [[1.0, -0.5], [-0.5, 1.0]]
    """

    rowwise = True

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, delta=delta, wd_ratio=wd_ratio)
        super().__init__(params, {**defaults, "nesterov": nesterov, "maximize": maximize}, **options)

    def check(self, group: Group) -> None:
        super().check(group)
        check_not_negative("delta value", group["delta"])
        check_not_negative("wd_ratio value", group["wd_ratio"])

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        return {
            "decay": lr * float(group["weight_decay"]),
            "correction": 1 / math.sqrt(1 - beta2**step),
            "step_size": lr / (1 - beta1**step),
            "nesterov": bool(group["nesterov"]),
        }

    @staticmethod
    def update(
        p: Tensors, g: Tensors, exp_avg: Tensors, exp_avg_sq: Tensors, *,
        decay: Number, wd_ratio: Number, delta: Number, beta1: Number, beta2: Number, correction: Number, eps: Number,
        step_size: Number, nesterov: bool, all_reduce: AllReduce,
    ) -> None:  # fmt: skip
        exp_avg.ema_(g, beta1)  # m = b1 m + (1 - b1) g
        exp_avg_sq.ema_(g * g, beta2)  # v = b2 v + (1 - b2) g²
        momentum = beta1 * exp_avg + (1 - beta1) * g if nesterov else exp_avg
        u = momentum / (exp_avg_sq.sqrt() * correction + eps)
        if not p.has_rows:
            p *= 1 - decay
            p -= step_size * u
            return
        channel = RowSums.of_rows(p, g, u)
        misses = channel.is_orthogonal(delta, eps).map(invert).total(channel.inner[0].dtype)
        *sums, size, missed = all_reduce(*channel.layer_sums(), misses)
        layer = RowSums._make([*sums, size.map(torch.sqrt)])
        # the channel view is tried first, and fires if all its rows are orthogonal; then the layer view
        channel_fires, layer_fires = missed.map(is_zero), layer.is_orthogonal(delta, eps)
        along = channel_fires.map(torch.where, channel.along(eps), layer_fires.map(or_zero, layer.along(eps)))
        along = along.map(partial(stored_as, p[0].dtype)).as_columns()
        fires = channel_fires.map(or_, layer_fires).map(materialize)
        shrink = fires.map(partial(shrink_by, decay, wd_ratio, p[0].dtype), missed)
        for weight, stepped in zip(p, p.map(partial(step_along, step_size), u, shrink, along), strict=True):
            weight.copy_(stepped)


class RowSums(NamedTuple):
    """Sums over the rows of tensors, of g p, p², g² and u p, and the root of a row's length."""

    inner: Tensors
    weight: Tensors
    grad: Tensors
    overlap: Tensors
    root_length: Sequence[float | Tensor]

    @classmethod
    def of_rows(cls, p: Tensors, g: Tensors, u: Tensors) -> RowSums:
        """Return the sums of the channel view: as many rows as the tensors have."""
        inner, weight, grad, overlap = (a.row_sums(b) for a, b in ((g, p), (p, p), (g, g), (u, p)))
        return cls(inner, weight, grad, overlap, [length**0.5 for length in p.row_lengths()])

    def layer_sums(self) -> list[Tensors]:
        """Return the sums of the layer view, which is all rows as one, and the number of its elements."""
        sums = [rows.total() for rows in (self.inner, self.weight, self.grad, self.overlap)]
        return [*sums, self.inner.map(torch.ones_like).total().map(lambda rows, root: rows * root**2, self.root_length)]

    def is_orthogonal(self, delta: Number, eps: Number) -> Tensors:
        """Return for each row whether its gradient is nearly orthogonal to its weights."""

        def is_small(inner: Tensor, weight: Tensor, grad: Tensor, root_length: Tensor) -> Tensor:
            cosine = inner.abs() / (grad.sqrt() + eps) / (weight.sqrt() + eps)
            return cosine * root_length < delta  # cos < delta / sqrt(columns)

        return self.inner.map(is_small, self.weight, self.grad, self.root_length)

    def along(self, eps: Number) -> Tensors:
        """Return for each row how much of its weights is in its step: ``p̂ Σ(p̂ u) = p along``."""

        def share(overlap: Tensor, weight: Tensor) -> Tensor:
            norm = weight.sqrt() + eps
            return overlap / norm / norm

        return self.overlap.map(share, self.weight)


def is_zero(tensor: Tensor) -> Tensor:
    return tensor == 0


def or_zero(condition: Tensor, value: Tensor) -> Tensor:
    return torch.where(condition, value, 0.0)


def stored_as(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return materialize(tensor.to(dtype))


def shrink_by(decay: Number, wd_ratio: Number, dtype: torch.dtype, fires: Tensor, missed: Tensor) -> Tensor:
    """Return the factor of weight decay, which is smaller where the projection fires."""
    ratio = torch.where(fires, wd_ratio, torch.ones_like(missed).to(dtype))  # type: ignore[arg-type]
    return 1 - decay * ratio


def step_along(step_size: Number, weight: Tensor, u: Tensor, shrink: Tensor, along: Tensor) -> Tensor:
    """Return the weights after a step without its part along the weights."""
    return weight * shrink - step_size * (u - weight * along)
