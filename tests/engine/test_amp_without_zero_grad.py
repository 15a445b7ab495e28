"""GradScaler in a training loop that never calls ``zero_grad``: what a step leaves in ``p.grad`` enters the next one.

torch's optimizers leave unscaled gradients, whether the scaler or a fused step unscales them. The next backward adds
scaled gradients to these. torch_npu's own tests train so.
"""

from __future__ import annotations

import pytest
import torch

import compiled_optim as co
from catalog import CATALOG
from compiled_optim import npu
from tests.helpers import assert_close

IN_TORCH = [name for name, entry in CATALOG.items() if entry.in_torch]
IN_TORCH_NPU = [f"NpuFused{name}" for name in IN_TORCH if hasattr(npu, f"NpuFused{name}")]
SCALERS = {
    "growing": {"init_scale": 2.0**10, "growth_interval": 3},
    "constant": {"init_scale": 128.0, "growth_interval": 1000},
}


def trained(make, scaler_options, steps=10):
    """Return the losses, parameters and gradients of a model with a convolution and a batch norm."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # without a bias, whose gradient before a batch norm is rounding errors alone
        convolution = torch.nn.Conv2d(1, 4, 3, bias=False)
        model = torch.nn.Sequential(convolution, torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Linear(10, 6))
        model.double()
    optimizer, scaler = make(model.parameters()), torch.amp.GradScaler("cpu", **scaler_options)
    losses = []
    for _ in range(steps):
        loss = model(torch.rand(3, 1, 12, 12, dtype=torch.float64, generator=generator)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    params = list(model.parameters())
    return [torch.stack(losses), *params, *(param.grad for param in params)]


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("name", [*IN_TORCH, *IN_TORCH_NPU])
def test_gradients_accumulate_as_with_torch(name, scaler, compiled):
    entry = CATALOG[name.removeprefix("NpuFused")]
    cls = getattr(npu if name.startswith("NpuFused") else co, name)
    options = {"lr": 0.01, **entry.typical}
    ours = trained(lambda params: cls(params, **options, compile=compiled), SCALERS[scaler])
    theirs = trained(lambda params: entry.reference(params, **options), SCALERS[scaler])
    assert_close(ours, theirs, 1e-9)


@pytest.mark.parametrize("name", [name for name in IN_TORCH if CATALOG[name].fused])
def test_gradients_accumulate_as_with_torchs_fused_step(name, compiled):
    entry = CATALOG[name]
    options = {"lr": 0.01, **entry.typical, "fused": True}
    ours = trained(lambda params: getattr(co, name)(params, **options, compile=compiled), SCALERS["growing"])
    theirs = trained(lambda params: entry.reference(params, **options), SCALERS["growing"])
    assert_close(ours, theirs, 1e-9)
