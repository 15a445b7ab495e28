"""Adafactor: second moments that are kept as a factor for each row and one for each column."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.hyperparameters import check_lr
from compiled_optim.engine.rule import Group, Rule
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import TorchOptions
from compiled_optim.tensors import AllReduce, MeanOver, Number, Scalar, Tensors, materialize, root_of_product


class Adafactor(Optimizer):
    r"""Drop-in for :class:`torch.optim.Adafactor` (Shazeer and Stern, 2018, `arXiv:1804.04235 <https://arxiv.org/abs/1804.04235>`_).

    With :math:`\hat\beta = 1 - t^{\tau}` and the means over rows and columns of the last two dimensions:

    .. math::
        r &= \hat\beta r + (1 - \hat\beta) \operatorname{mean}_\text{row}(g^2), \qquad
        c = \hat\beta c + (1 - \hat\beta) \operatorname{mean}_\text{column}(g^2) \\
        u &= g / \max(\sqrt{r c / \max(\operatorname{mean}(r), \epsilon_1)}, \epsilon_1) \\
        p &= (1 - lr \cdot \lambda) p - \min(lr, 1 / \sqrt{t}) \cdot \max(\epsilon_2, \operatorname{rms}(p)) \cdot
            \frac{u}{\max(1, \operatorname{rms}(u) / d)}

    Parameters of one dimension keep the second moment of each element. Use it where memory is short: a matrix of
    :math:`n \times m` elements has states of :math:`n + m`. :class:`~compiled_optim.AdamW` usually reaches a lower
    loss for the same number of steps. For convolutions it saves little, because the last two dimensions are small.

    On the CPU one call steps all matrices, and one those of each small size (docs/compile_cost.md). On CUDA and on NPUs
    each parameter of two or more dimensions is stepped by a call of its own.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: the largest relative step; a float or a tensor of one element.
        beta2_decay: the exponent :math:`\tau`, at most 0.
        eps: :math:`\epsilon_1`, None for the machine epsilon of the parameter's dtype, and :math:`\epsilon_2`.
        d: the clipping threshold of the update, at least 1.
        weight_decay: the decay :math:`\lambda`.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`; ``foreach`` and ``capturable`` have no effect.

    >>> weight = torch.nn.Parameter(torch.ones(2, 3))
    >>> opt = Adafactor([weight], lr=0.5, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> weight.tolist()
    [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
    >>> {name: tuple(state.shape) for name, state in opt.state[weight].items() if name != "step"}
    {'row_var': (2, 1), 'col_var': (1, 3)}
    """

    has_torch_switches = True
    matrices = True
    reduced_states: ClassVar[Mapping[str, int]] = {"row_var": -1, "col_var": -2}
    vector_states = frozenset({"variance"})
    nonnegative = Rule.nonnegative | {"row_var", "col_var", "variance"}
    takes_complex = False

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        defaults = dict(lr=lr, beta2_decay=beta2_decay, eps=eps, d=d, weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, defaults, **options)

    def check(self, group: Group) -> None:
        eps1, eps2 = group["eps"]
        if not isinstance(group["lr"], Tensor) and not group["lr"] >= 0.0:
            raise ValueError(f"Learning rate should be >= 0 but is: {group['lr']}")
        check_lr(group["lr"])
        if not group["beta2_decay"] <= 0.0:
            raise ValueError(f"beta2_decay should be <= 0 but is: {group['beta2_decay']}")
        if eps1 is not None and not eps1 >= 0.0:
            raise ValueError(f"epsilon1 should be >= 0 but is: {eps1}")
        if not eps2 >= 0.0:
            raise ValueError(f"epsilon2 should be >= 0 but is: {eps2}")
        if not group["d"] >= 1.0:
            raise ValueError(f"Clipping threshold d should be >= 1 but is: {group['d']}")
        if not group["weight_decay"] >= 0.0:
            raise ValueError(f"weight_decay should be >= 0 but is: {group['weight_decay']}")

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        lr, (eps1, eps2) = float(group["lr"]), group["eps"]
        return {
            "row_var": True,
            "col_var": True,
            "variance": True,
            "weight": step ** float(group["beta2_decay"]),
            "rho": min(lr, 1 / math.sqrt(step)),
            "shrink": 1 - lr * float(group["weight_decay"]),
            "eps1": 0.0 if eps1 is None else float(eps1),
            "eps2": float(eps2),
            "uses_dtype_eps": eps1 is None,
        }

    @staticmethod
    def update(
        p: Tensors, g: Tensors, row_var: Tensors | None = None, col_var: Tensors | None = None,
        variance: Tensors | None = None, *,
        weight: Number, rho: Number, shrink: Number, eps1: Number, eps2: Number, d: Number, dtype_eps: Number,
        uses_dtype_eps: bool, mean_over: MeanOver, all_reduce: AllReduce,
    ) -> None:  # fmt: skip
        floor = partial(at_least, dtype_eps if uses_dtype_eps else eps1)
        squares = g * g
        if variance is None:
            assert row_var is not None
            assert col_var is not None
            row_var.lerp_(mean_over(squares, -1), weight)
            col_var.lerp_(mean_over(squares, -2), weight)
            shares = row_var.map(torch.div, mean_over(row_var, -2).map(floor))
            roots = shares.map(root_of_product, col_var)
        else:
            variance.lerp_(squares, weight)
            roots = variance.map(torch.sqrt)
        u = g / roots.map(floor)
        ones = g.map(torch.ones_like)
        weights, updates, sizes = all_reduce(p.sum_of_squares(), u.sum_of_squares(), ones.sum_of_squares())
        u *= weights.map(partial(step_size, rho, eps2, d, p[0].dtype), updates, sizes)
        p *= shrink
        p -= u


def at_least(limit: Number, tensor: Tensor) -> Tensor:
    """Return a tensor without values below a limit."""
    return torch.maximum(tensor, limit.tensor) if isinstance(limit, Scalar) else tensor.clamp(min=limit)


def step_size(
    rho: Number, eps2: Number, d: Number, dtype: torch.dtype, weights: Tensor, updates: Tensor, size: Tensor
) -> Tensor:
    """Return the factor of an update, from the sums of squares of the weights and of the update."""
    alpha = at_least(eps2, (weights / size).sqrt()) * rho
    return materialize((alpha / ((updates / size).sqrt() / d).clamp(min=1.0)).to(dtype))
