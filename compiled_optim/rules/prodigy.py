"""Prodigy: Adam that estimates its learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.hyperparameters import check_betas, check_lr, check_not_negative
from compiled_optim.engine.rule import Group
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import EngineOptions
from compiled_optim.tensors import AllReduce, Number, Tensors, materialize, sum_dtype


class Prodigy(Optimizer):
    r"""Prodigy (Mishchenko and Defazio, 2023, `arXiv:2306.06101 <https://arxiv.org/abs/2306.06101>`_).

    The arguments are those of the package prodigyopt, without ``slice_p`` and ``fsdp_in_use``.
    With the estimate :math:`d`, which is one number for all parameters, and :math:`p_0` the parameters at the start:

    .. math::
        m &= \beta_1 m + (1 - \beta_1) d g, \qquad v = \beta_2 v + (1 - \beta_2) d^2 g^2, \qquad
        s = \beta_3 s + \tfrac{d}{d_0} \, lr \, d \, g \\
        a &= \beta_3 a + \tfrac{d}{d_0} \, lr \, d \textstyle\sum g \cdot (p_0 - p), \qquad
        \hat d = c \cdot a / \textstyle\sum |s|, \qquad d' = \max(d, \hat d) \\
        p &= (1 - lr \, d \lambda) p - lr \, d \, m / (\sqrt{v} + d' \epsilon)

    Use it if there is no time to tune a learning rate: leave ``lr`` at 1, and tune ``d_coef`` if at all. A cosine
    schedule of ``lr`` down to 0 helps. It keeps four states a parameter, twice as many as
    :class:`~compiled_optim.AdamW`, and each step reads the gradients twice. Not for pretraining at scale, where a
    learning rate is tuned anyway, and not with parameters in bfloat16: :math:`p_0 - p` is rounded to nothing there.

    The estimate is kept in the groups: ``optimizer.param_groups[0]["d"]``. Its sums are over the parameters that have a
    gradient. On an accelerator the host waits for them at the end of each step.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: a factor of the learning rate; a float or a tensor of one element. Groups may differ in it, unlike in
            the package.
        betas: decay rates of the averages of the gradient and of its square.
        beta3: decay rate of the sums of the estimate; None for the square root of :math:`\beta_2`.
        eps: added to the denominator, times :math:`d'`.
        weight_decay: the decay :math:`\lambda`.
        decouple: False adds the decay to the gradient instead, times the parameter.
        use_bias_correction: use the bias correction of Adam.
        safeguard_warmup: leave ``lr`` out of :math:`s`, for schedules with a warm-up.
        d0: the first estimate :math:`d_0`.
        d_coef: the factor :math:`c`.
        growth_rate: the largest factor by which the estimate grows in a step.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`.

    >>> weight = torch.nn.Parameter(torch.ones(3))
    >>> opt = Prodigy([weight], compile=False)
    >>> for _ in range(20):
    ...     weight.grad = weight.detach().clone()  # of half of the squared norm
    ...     opt.step()
    >>> opt.param_groups[0]["d"] > 0.01  # from 1e-6
    True
    """

    initial_values: ClassVar[Mapping[str, None]] = {"p0": None}
    sums_over_all = True

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        beta3: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0,
        decouple: bool = True,
        use_bias_correction: bool = False,
        safeguard_warmup: bool = False,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        growth_rate: float = math.inf,
        *,
        maximize: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        defaults: Group = dict(lr=lr, betas=betas, beta3=beta3, eps=eps, weight_decay=weight_decay, decouple=decouple)
        defaults |= dict(use_bias_correction=use_bias_correction, safeguard_warmup=safeguard_warmup, d0=d0)
        defaults |= dict(d_coef=d_coef, growth_rate=growth_rate, maximize=maximize)
        super().__init__(params, {**defaults, "d": d0, "d_max": d0, "d_numerator": 0.0, "k": 0}, **options)

    def check(self, group: Group) -> None:
        check_lr(group["lr"])
        for name, value in (("d0", group["d0"]), ("epsilon", group["eps"])):
            if not value > 0.0:
                raise ValueError(f"Invalid {name} value: {value}")
        check_betas(group["betas"], 2)
        check_not_negative("weight_decay value", group["weight_decay"])
        check_not_negative("d_coef value", group["d_coef"])
        if group["beta3"] is not None and not 0.0 <= group["beta3"] < 1.0:
            raise ValueError(f"Invalid beta3 parameter: {group['beta3']}")
        if not group["growth_rate"] >= 1.0:
            raise ValueError(f"Invalid growth_rate value: {group['growth_rate']}")

    def before_step(self, groups: Sequence[Group]) -> None:
        """Give all groups the estimate of the first, also one that was added later."""
        for group in groups[1:]:
            group.update({name: groups[0][name] for name in ("d", "d_max", "d_numerator")})

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        d, d0, (beta1, beta2) = group["d"], group["d0"], map(float, group["betas"])
        scale = d * float(group["lr"])
        if group["use_bias_correction"]:
            steps = group["k"] + 1
            scale *= math.sqrt(1 - beta2**steps) / (1 - beta1**steps)
        has_decay = bool(group["weight_decay"] != 0)
        return {
            "scale": scale,
            "gain": d / d0 * scale,
            "s_gain": d / d0 * (d if group["safeguard_warmup"] else scale),
            "beta3": decay_of_sums(group),
            "numerator": decay_of_sums(group) * group["d_numerator"],
            "is_first": 1.0 if d == d0 else 0.0,
            "shrink": 1 - scale * float(group["weight_decay"]),
            "coupled_decay": has_decay and not group["decouple"],
            "decoupled_decay": has_decay and bool(group["decouple"]),
        }

    def after_step(self, group: Group, sums: Sequence[float] = ()) -> Mapping[str, Any]:
        if not sums or not sums[1]:  # no gradient was different from zero
            return {}
        numerator, denominator = decay_of_sums(group) * group["d_numerator"] + sums[0], sums[1]
        d_hat = group["d_coef"] * numerator / denominator
        d = max(group["d"], d_hat) if group["d"] == group["d0"] else group["d"]
        d_max = max(group["d_max"], d_hat)
        d = min(d_max, d * group["growth_rate"])
        sums_of_step = {"d_numerator": numerator, "d_denom": denominator, "d_hat": d_hat}
        return {**sums_of_step, "d": d, "d_max": d_max, "k": group["k"] + 1}

    @staticmethod
    def update(
        p: Tensors, g: Tensors, exp_avg: Tensors, exp_avg_sq: Tensors, s: Tensors, p0: Tensors, *,
        scale: Number, gain: Number, s_gain: Number, shrink: Number, beta1: Number, beta2: Number, beta3: Number,
        eps: Number, weight_decay: Number, d: Number, d_max: Number, d_coef: Number, growth_rate: Number,
        numerator: Number, is_first: Number, coupled_decay: bool, decoupled_decay: bool, all_reduce: AllReduce,
    ) -> None:  # fmt: skip
        if coupled_decay:
            g = g + weight_decay * p
        scaled = d * g
        exp_avg.ema_(scaled, beta1)  # m = b1 m + (1 - b1) d g
        exp_avg_sq.ema_(scaled * scaled, beta2)  # v = b2 v + (1 - b2) d² g²
        s *= beta3
        s += s_gain * g
        dtype = sum_dtype(p[0])
        products, sizes = all_reduce((gain * g * (p0 - p)).total(dtype), s.abs().total(dtype))
        estimate = partial(next_estimate, p[0].dtype, d, d_max, d_coef, growth_rate, numerator, is_first, eps)
        denominator = exp_avg_sq.sqrt() + products.map(estimate, sizes)  # √v + d' eps
        if decoupled_decay:
            p *= sizes.map(partial(shrink_or_one, p[0].dtype, shrink))
        p -= scale * (exp_avg / denominator)


def decay_of_sums(group: Group) -> float:
    """Return the decay rate of the sums of the estimate."""
    return float(math.sqrt(group["betas"][1]) if group["beta3"] is None else group["beta3"])


def next_estimate(
    dtype: torch.dtype, d: Number, d_max: Number, d_coef: Number, growth_rate: Number, numerator: Number,
    is_first: Number, eps: Number, product: Tensor, size: Tensor,
) -> Tensor:  # fmt: skip
    """Return epsilon times the estimate after this step, as ``after_step`` computes it on the host."""
    d_hat = torch.where(size > 0, d_coef * (numerator + product) / size, 0.0)
    grown = torch.where(d_hat * is_first > d, d_hat, d)  # type: ignore[arg-type]
    largest = torch.where(d_hat > d_max, d_hat, d_max)  # type: ignore[arg-type]
    return materialize((torch.minimum(grown * growth_rate, largest) * eps).to(dtype))


def shrink_or_one(dtype: torch.dtype, shrink: Number, size: Tensor) -> Tensor:
    """Return the factor of weight decay: 1 if no gradient was different from zero, because nothing is updated then."""
    return materialize(torch.where(size == 0, torch.ones_like(size), shrink).to(dtype))  # type: ignore[arg-type]
