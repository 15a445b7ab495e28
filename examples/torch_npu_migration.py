"""From torch_npu's fused optimizers to this package: one import line changes.

.. code-block:: diff

    - from torch_npu.optim import NpuFusedAdamW
    + from compiled_optim.npu import NpuFusedAdamW

Arguments, attributes and methods stay. The change is worth it for what torch_npu forbids: its documentation says that
results are unpredictable once a parameter has been reallocated, for example by ``module.cpu()``. Here the next step
follows the parameter, or raises with ``on_realloc="raise"``.

Run it on an NPU with ``python examples/torch_npu_migration.py``. Without one, ``--test-device`` runs it on a device
``npu`` whose tensors are in CPU memory; there the steps are eager.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

from compiled_optim import ReallocationError
from compiled_optim.npu import NpuFusedAdamW


def train(model: nn.Module, optimizer: NpuFusedAdamW, steps: int) -> float:
    """Train as with torch_npu: gradients are zeroed, and clipped by the method of the optimizer."""
    device = next(model.parameters()).device
    for _ in range(steps):
        x = torch.randn(64, 8)
        optimizer.zero_grad()
        loss = (model(x.to(device)) - x.sum(1, keepdim=True).to(device)).square().mean()
        loss.backward()
        optimizer.clip_grad_norm_fused_(1.0)
        optimizer.step()
    return loss.item()


def main() -> None:
    """Train on the NPU, move the model, and go on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--test-device", action="store_true", help="use a device npu in CPU memory, for tests")
    is_test = parser.parse_args().test_device
    if is_test:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests import npu_device

        npu_device.install()
    else:
        import torch_npu  # noqa: F401
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to("npu")
    if is_test:  # this device knows contiguous tensors only, but the gradient of a Linear is a transposed one
        for param in model.parameters():
            param.register_hook(lambda grad: grad.clone(memory_format=torch.contiguous_format))
    optimizer = NpuFusedAdamW(model, lr=2e-2, weight_decay=0.05, compile=not is_test)
    first, last = train(model, optimizer, 1), train(model, optimizer, 50)
    print(f"on {next(model.parameters()).device}: loss {first:.3f} at first, {last:.3f} after 50 steps")
    assert last < first

    model.cpu()  # with torch_npu, no step is defined after this
    print(f"after model.cpu(): loss {train(model, optimizer, 50):.3f} after 50 more steps")
    print("the guard saw:", *optimizer.explain().events, sep="\n  ")

    strict = NpuFusedAdamW(model, lr=2e-2, on_realloc="raise", compile=not is_test)
    train(model, strict, 1)
    model.double()
    try:
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        strict.step()
    except ReallocationError as error:
        print(f'with on_realloc="raise": {str(error).splitlines()[0]}')
    else:
        raise AssertionError("the step has not seen that the model is in float64 now")


if __name__ == "__main__":
    main()
