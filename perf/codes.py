"""Measure the errors of 8-bit codes on the states of a training run: ``python -m perf.codes``.

A small GPT is trained with AdamW in float32. Its states are then encoded in blocks, to nearest, with the code of
``compiled_optim.quantization`` and with two others: equal steps, and equal steps of the square root.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor

import compiled_optim as co
from compiled_optim.quantization import BLOCK, decode, encode, scales_of
from perf.convergence import loss_of
from perf.learning_tasks import TASKS

STEPS = 200
SMALLEST = 4096
"""Tensors with fewer elements are not kept in 8 bits."""

Code = Callable[[Tensor], Tensor]
"""Returns the numbers that are nearest to shares of the largest value of a block."""

CODES: dict[str, dict[str, Code]] = {
    "exp_avg": {
        "equal steps": lambda share: (share * 127).round() / 127,
        "floating point (ours)": lambda share: _ours(share, signed=True),
    },
    "exp_avg_sq": {
        "equal steps": lambda share: (share * 255).round() / 255,
        "equal steps of the root": lambda share: ((share.sqrt() * 255).round() / 255).square(),
        "floating point (ours)": lambda share: _ours(share, signed=False),
    },
}


def _ours(share: Tensor, signed: bool) -> Tensor:
    rows = share.view(-1, 1)
    scales = scales_of(torch.ones_like(rows), signed)
    return decode(encode(rows, scales, None, signed), scales, signed).view(-1)


def trained_states() -> dict[str, Tensor]:
    """Return the states of all large tensors after training, as one long tensor for each state."""
    task = TASKS["text"]
    torch.manual_seed(0)
    model = task.model()
    optimizer = co.AdamW(model, lr=task.lr)
    batches = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        loss_of(model, *task.batch(batches)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    large = [values for values in optimizer.state.values() if values["exp_avg"].numel() >= SMALLEST]
    return {name: torch.cat([values[name].flatten() for values in large]) for name in CODES}


def errors(values: Tensor, code: Code) -> tuple[float, float, float]:
    """Return the median relative error, its 99th percentile, and the share of elements that become zero."""
    values = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    share = (values / values.abs().amax(1, keepdim=True))[values != 0]
    found = code(share)
    relative = ((found - share) / share).abs().sort().values
    median, high = (float(relative[int(part * (len(relative) - 1))]) for part in (0.5, 0.99))
    return median, high, float((found == 0).float().mean())


def main() -> None:
    """Print the table."""
    states = trained_states()
    rows = [
        (name, label, *errors(states[name], code)) for name, codes in CODES.items() for label, code in codes.items()
    ]
    headers = ("state", "code", "median relative error", "99th percentile", "become zero")
    print(tabulate(rows, headers, floatfmt=("", "", ".1%", ".1%", ".2%")))


if __name__ == "__main__":
    main()
