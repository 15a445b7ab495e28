"""Drop-in replacement for ``torch_npu.optim``: a training script changes one import line.

The classes have the names, argument order and defaults of torch_npu, and the attributes and methods that torch_npu's
GradScaler and training scripts use. They run on any device. The NPU backend itself is ``backends/npu.py``.
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
    """The interface that torch_npu's fused optimizers have in addition to torch.optim's.

    torch_npu combines gradients into one tensor for each dtype, and its GradScaler unscales these tensors. Here
    gradients are not combined: the scaler gets the list of gradients.
    """

    is_fused_optimizer = True
    is_params_grads_combined = True

    def _maybe_init_combined_params_and_grads(self) -> None:
        """Do nothing: gradients are not combined."""

    @property
    def grads_all_group_combined(self) -> list[Tensor]:
        """The gradients of all parameters that have one. GradScaler unscales them in place."""
        grads = [param.grad for group in self.param_groups for param in group["params"]]
        return [grad for grad in grads if grad is not None]

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Set gradients to zero, as torch_npu does, or to None, which torch_npu does not support."""
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_fused_(self, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip all gradients in place to a global norm of ``max_norm``; return the norm before clipping."""
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
    """:class:`~compiled_optim.SGD`, with a required learning rate."""

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
