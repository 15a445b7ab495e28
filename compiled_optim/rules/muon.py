"""Muon: momentum whose matrices are orthogonalized, and AdamW for everything that is no hidden matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.matrix_map import MatrixCut, MatrixMap, Part
from compiled_optim.engine.rule import Clip, Constants, Group, Rule
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import EngineOptions
from compiled_optim.rules.adam import AdamFormula
from compiled_optim.rules.routing import ADAMW, MUON, Override, described, in_groups, routes_of
from compiled_optim.tensors import Number, Tensors

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MATRIX_OPTIONS = {"ns_dtype": torch.bfloat16, "flatten": False, "batch_dims": 0, "split": None}
"""Options that torch.optim.Muon does not have, and their defaults. A group that does not set one has no such key."""


@dataclass(frozen=True)
class NewtonSchulz(MatrixMap):
    """Orthogonalize matrices: move their singular values close to 1, by an iteration of matrix products."""

    coefficients: tuple[float, float, float]
    steps: int
    eps: float
    dtype: torch.dtype

    def __call__(self, stack: Tensor) -> Tensor:
        a, b, c = self.coefficients
        norms: Tensor = torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True)
        x = stack / norms.clamp(min=self.eps)  # no singular value above 1
        for _ in range(self.steps):  # x = a x + (b x xᵀ + c (x xᵀ)²) x
            gram = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x


class Muon(Optimizer):
    r"""Drop-in for :class:`torch.optim.Muon` (Jordan et al., 2024, `Muon <https://kellerjordan.github.io/posts/muon/>`_).

    .. math::
        m &= \mu m + (1 - \mu) g, \qquad u = \mu m + (1 - \mu) g \ \text{with Nesterov momentum, else}\ m \\
        p &= (1 - lr \cdot \lambda) p - lr \cdot r \cdot \operatorname{NS}(u)

    NS orthogonalizes a matrix by a Newton–Schulz iteration: if :math:`u = U S V^T`, then
    :math:`\operatorname{NS}(u)` is close to :math:`U V^T`. The factor is :math:`r = \sqrt{\max(1, rows / columns)}`, or
    :math:`0.2 \sqrt{\max(rows, columns)}` with ``adjust_lr_fn="match_rms_adamw"`` (Liu et al., 2025,
    `arXiv:2502.16982 <https://arxiv.org/abs/2502.16982>`_), which lets Muon use AdamW's learning rate.

    Use it for the hidden layers of transformers, where it needs fewer steps than AdamW, and one state instead of two.
    Do not use it for embeddings, the output layer, biases and gains: there AdamW is better. It does not pay for tiny
    models, or to fine-tune weights that AdamW has trained.

    With a module, ``Muon(model)`` sends each parameter to the rule it needs, in one optimizer: hidden matrices to Muon;
    vectors and scalars, embeddings and the head (the last ``nn.Linear``) to AdamW. ``explain()`` lists who went where.
    With parameters or groups, all parameters are stepped by Muon and must have two dimensions, as in torch.optim,
    unless ``flatten`` or ``batch_dims`` is set; a group with ``rule="adamw"`` is stepped by AdamW.

    Matrices of equal shape are multiplied as one batch, whatever their number. Parameters with more than two dimensions
    need ``flatten`` or ``batch_dims``.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        weight_decay: the decoupled decay :math:`\lambda`.
        momentum: decay rate :math:`\mu` of the average of the gradient.
        nesterov: look ahead by one step of the average.
        ns_coefficients: the three coefficients of the iteration.
        eps: the smallest norm a matrix is divided by.
        ns_steps: number of iterations; less than 100.
        adjust_lr_fn: ``"original"``, ``"match_rms_adamw"`` or None, which is ``"original"``.
        ns_dtype: the dtype of the iteration. torch.optim.Muon uses bfloat16; float32 is more exact, and faster on
            processors without bfloat16.
        flatten: treat a parameter with more than two dimensions, such as the kernel of a convolution, as a matrix: its
            first dimension is the rows, all others together are the columns.
        batch_dims: the number of leading dimensions that index separate matrices, such as 1 for a stack of experts of
            shape (experts, rows, columns).
        split: orthogonalize parts of the rows separately: the number of equal parts, or the number of rows of each
            part. ``3`` is for a projection to queries, keys and values of equal size.
        route: overrides the choice of a rule for parameters of a module. A dict from patterns of names, such as
            ``"*.qkv.weight"``, to ``"muon"``, ``"adamw"`` or a dict of options of a group, such as ``{"split": 3}``; or
            a function of name and parameter that returns one of these, or None for the usual choice.
        adamw_lr: learning rate of the parameters that AdamW steps.
        adamw_betas: decay rates there.
        adamw_eps: added to the denominator there.
        adamw_weight_decay: the decay there.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 10))
    >>> opt = Muon(model, lr=0.02, adamw_lr=3e-4, compile=False)
    >>> model(torch.tensor([1, 2])).sum().backward()
    >>> opt.step()
    >>> print(*opt.explain().routes, sep="\n")
    Muon: 1 tensor, 16 elements (matrix: 1.weight)
    AdamW: 4 tensors, 94 elements (embedding: 0.weight; vector: 1.bias, 2.bias; head: 2.weight)
    """

    counts_steps = False
    takes_complex = False
    own_options = Optimizer.own_options | MATRIX_OPTIONS.keys()

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        flatten: bool = False,
        batch_dims: int = 0,
        split: int | Sequence[int] | None = None,
        route: Override | None = None,
        adamw_lr: float | Tensor = 3e-4,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.0,
        maximize: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        defaults: dict[str, Any] = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)
        defaults |= dict(ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn)
        given = dict(ns_dtype=ns_dtype, flatten=flatten, batch_dims=batch_dims, split=split)
        defaults |= {key: value for key, value in given.items() if value != MATRIX_OPTIONS[key]}
        self._adamw = dict(lr=adamw_lr, betas=adamw_betas, eps=adamw_eps, weight_decay=adamw_weight_decay)
        self._adamw |= dict(amsgrad=False, decoupled_weight_decay=True)
        self._route, self._reasons = route, dict[str, str]()
        super().__init__(params, {**defaults, "maximize": maximize}, **options)

    def check(self, group: Group) -> None:
        if group.get("rule", MUON) not in (MUON, ADAMW):
            raise ValueError(f"Invalid rule of a group: {group['rule']!r}; use {MUON!r} or {ADAMW!r}")
        if group.get("rule") == ADAMW:
            super().check(group)
            return
        if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        for name, key in (("Learning rate", "lr"), ("momentum", "momentum"), ("weight decay", "weight_decay")):
            if not group[key] >= 0:
                raise ValueError(f"{name} should be >= 0 but is: {group[key]}")
        if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"Adjust learning rate function {group['adjust_lr_fn']} is not supported")
        if not 0 <= group["ns_steps"] < 100:
            raise ValueError("Number of steps must be less than 100 for computational efficiency")
        if len(group["ns_coefficients"]) != 3:
            raise ValueError("Coefficients must be a tuple of exactly 3 values")
        if not _option(group, "ns_dtype").is_floating_point:
            raise ValueError(f"Invalid ns_dtype value: {group['ns_dtype']}; use a floating point dtype")
        split = _option(group, "split")
        if split is not None and (split if isinstance(split, int) else len(split)) < 1:
            raise ValueError(f"Invalid split value: {split}; use None, a number of parts, or the rows of each part")

    def check_params(self, group: Group, names: Callable[[], Sequence[str]]) -> None:
        for i, param in enumerate(group["params"]):
            try:
                self.matrix_cut(group, param.shape)
            except ValueError as error:
                raise ValueError(f"{error}; it is {names()[i]}") from None

    def for_group(self, group: Group) -> Rule:
        return AdamWPart(self) if group.get("rule") == ADAMW else self

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch.optim. With ``rule="adamw"`` it has the hyperparameters of AdamW."""
        if isinstance(param_group, dict) and param_group.get("rule") == ADAMW:
            param_group.update({**self._adamw, **param_group})
        super().add_param_group(param_group)

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        lr = float(group["lr"])
        return {
            "nesterov": bool(group["nesterov"]),
            "shrink": 1 - lr * float(group["weight_decay"]),
            "step_size": lr * group.get("lr_factor", 1.0),
        }

    @staticmethod
    def update(
        p: Tensors, g: Tensors, momentum_buffer: Tensors, *,
        momentum: Number, shrink: Number, step_size: Number, nesterov: bool,
        map_matrices: Callable[[Tensors], Tensors],
    ) -> None:  # fmt: skip
        momentum_buffer.lerp_(g, 1 - momentum)  # m = μ m + (1 - μ) g
        direction = momentum_buffer + (1 - momentum) * (g - momentum_buffer) if nesterov else momentum_buffer
        p *= shrink  # p = (1 - lr wd) p
        p -= step_size * map_matrices(direction)  # orthogonalized by Newton–Schulz

    # ---- matrices

    def matrix_map(self, group: Group) -> MatrixMap:
        a, b, c = map(float, group["ns_coefficients"])
        return NewtonSchulz((a, b, c), group["ns_steps"], float(group["eps"]), _option(group, "ns_dtype"))

    def matrix_cut(self, group: Group, shape: Sequence[int]) -> MatrixCut:
        batch_dims, split = _option(group, "batch_dims"), _option(group, "split")
        dims = len(shape) - batch_dims
        if dims != 2 and not (dims > 2 and _option(group, "flatten")):
            remedy = "use AdamW for it: Muon(model) and groups with rule='adamw' do"
            if dims > 2:
                remedy += "; or take it as a matrix with flatten=True, or as a stack of matrices with batch_dims=1"
            raise ValueError(
                "Muon only supports 2D parameters whereas we found a parameter with size: "
                f"{torch.Size(shape)}; {remedy}"
            )
        rows, columns = shape[batch_dims], math.prod(shape[batch_dims + 1 :])
        parts = [rows] if split is None else [rows // split] * split if isinstance(split, int) else list(split)
        if sum(parts) != rows or min(parts) < (1 if rows else 0):
            raise ValueError(f"split={split!r} does not divide the {rows} rows of a parameter with size {tuple(shape)}")
        factors = [_lr_factor(group, part, columns) for part in parts]
        scales = [factor / factors[0] if factors[0] else 1.0 for factor in factors]
        return MatrixCut(batch_dims, tuple(map(Part, parts, scales)))

    def constants(self, group: Group, shape: Sequence[int]) -> Constants:
        first, columns = self.matrix_cut(group, shape).sizes(shape)[0][1:]
        return (("lr_factor", _lr_factor(group, first, columns)),)

    def plan_key(self, group: Group) -> Hashable:
        keys = ("rule", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn", *MATRIX_OPTIONS)
        return repr([group.get(key) for key in keys])

    # ---- routing

    def groups_of(self, module: torch.nn.Module, defaults: Mapping[str, Any]) -> ParamsT:
        """Return the groups of a module: its parameters by rule, and by the options that ``route`` gives them."""
        takes_more = bool(_option(defaults, "flatten") or _option(defaults, "batch_dims"))
        routes = routes_of(module, self._route, takes_more)
        self._reasons = {name: route.reason for name, route in routes.items()}
        return in_groups(module, routes)

    def routes(self, groups: Sequence[Group]) -> Sequence[str]:
        return described(groups, self._reasons)

    def state_names(self, group: Group) -> Sequence[str]:
        return ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_adamw": self._adamw, "_route": None, "_reasons": self._reasons}


class AdamWPart(AdamFormula):
    """The rule of the groups of Muon that AdamW steps, with the options of the optimizer."""

    label = "AdamW"

    def __init__(self, optimizer: Muon) -> None:
        self._optimizer = optimizer
        self.max_grad_norm_per_parameter = optimizer.max_grad_norm_per_parameter

    def clips(self, group: Group, dtype: torch.dtype) -> list[Clip]:
        return self._optimizer.clips(group, dtype)


def _option(group: Mapping[str, Any], name: str) -> Any:
    """Return an option that torch.optim.Muon does not have."""
    return group.get(name, MATRIX_OPTIONS[name])


def _lr_factor(group: Group, rows: int, columns: int) -> float:
    """Return the factor of the learning rate for matrices of this size."""
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns)) if columns else 1.0
