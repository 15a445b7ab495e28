"""Drop-in for ``torch_npu.optim``: a training script changes one import line and nothing else.

The classes have torch_npu's names, argument order and defaults, and what its GradScaler and users ask of a fused
optimizer. They run on whatever device the parameters are on.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.optimizer import Optimizer
from compiled_optim.options import TorchOptions
from compiled_optim.rules.adadelta import Adadelta
from compiled_optim.rules.adam import Adam, AdamW
from compiled_optim.rules.adamp import AdamP
from compiled_optim.rules.bertadam import BertAdam
from compiled_optim.rules.lamb import Lamb
from compiled_optim.rules.rmsprop import RMSprop, RMSpropTF
from compiled_optim.rules.sgd import SGD

__all__ = [
    "NpuFusedAdadelta",
    "NpuFusedAdam",
    "NpuFusedAdamP",
    "NpuFusedAdamW",
    "NpuFusedBertAdam",
    "NpuFusedLamb",
    "NpuFusedOptimizer",
    "NpuFusedRMSprop",
    "NpuFusedRMSpropTF",
    "NpuFusedSGD",
]


class NpuFusedOptimizer(Optimizer):
    """What torch_npu's fused optimizers have beyond torch.optim's.

    There, gradients are combined into one tensor for each dtype, which torch_npu's GradScaler then unscales. Nothing is
    combined here; the scaler gets the gradients themselves, one by one.
    """

    is_fused_optimizer = True
    is_params_grads_combined = True

    def _maybe_init_combined_params_and_grads(self) -> None:
        """Nothing to combine."""

    @property
    def grads_all_group_combined(self) -> list[Tensor]:
        """All gradients there are, to be unscaled in place."""
        grads = [param.grad for group in self.param_groups for param in group["params"]]
        return [grad for grad in grads if grad is not None]

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Reset gradients: to zero by default, as torch_npu does, or to None, which it refuses."""
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_fused_(self, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale all gradients in place to a norm of at most ``max_norm``; returns the norm before that."""
        grads = self.grads_all_group_combined
        if not grads:
            return torch.tensor(0.0)
        each = [torch.linalg.vector_norm(grad, norm_type, dtype=_wide(grad.dtype)) for grad in grads]
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(each[0]) for norm in each]), norm_type)
        coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(coefficient.to(grad.device))
        return total


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class NpuFusedSGD(NpuFusedOptimizer, SGD):
    """:class:`~compiled_optim.SGD`, where the learning rate has to be given."""

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, **options)


class NpuFusedAdam(NpuFusedOptimizer, Adam):
    """:class:`~compiled_optim.Adam`."""


class NpuFusedAdamW(NpuFusedOptimizer, AdamW):
    """:class:`~compiled_optim.AdamW`."""


class NpuFusedAdamP(NpuFusedOptimizer, AdamP):
    """:class:`~compiled_optim.AdamP`."""


class NpuFusedLamb(NpuFusedOptimizer, Lamb):
    """:class:`~compiled_optim.Lamb`."""


class NpuFusedBertAdam(NpuFusedOptimizer, BertAdam):
    """:class:`~compiled_optim.BertAdam`."""


class NpuFusedAdadelta(NpuFusedOptimizer, Adadelta):
    """:class:`~compiled_optim.Adadelta`."""


class NpuFusedRMSprop(NpuFusedOptimizer, RMSprop):
    """:class:`~compiled_optim.RMSprop`."""


class NpuFusedRMSpropTF(NpuFusedOptimizer, RMSpropTF):
    """:class:`~compiled_optim.RMSpropTF`."""
