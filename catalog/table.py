"""Write the table of all optimizers to docs/optimizers.md: ``python -m catalog.table``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path

import torch

import compiled_optim as co
from catalog.entries import ALL
from catalog.entry import Entry, Options

PAGE = Path(__file__).parents[1] / "docs" / "optimizers.md"
SIZE = 256
"""The number of rows and columns of the float32 matrix whose states are counted."""

TEXT = """# Optimizers

`python -m catalog.table` writes this page from the catalog that the tests use. *Bytes* are those of the states of a
float32 matrix, for each of its elements: with the default options, and with those that keep the most. They are fewer
with `state_dtype`. *Options* are the arguments of an optimizer after `params` and `lr`; all have `maximize`, and the
options of `co.Optimizer`.

{table}

Checkpoints are exchanged, both ways, with the classes of torch.optim and schedulefree. `Prodigy` has the arguments of
prodigyopt's (without `slice_p` and `fsdp_in_use`), but keeps two of its states in another shape. The names of torch_npu
are in `compiled_optim.npu`.

## For any of them

- `cautious=True` sets the elements of an update to zero whose change has the sign of the gradient, and scales up the
  others ([arXiv:2411.16085](https://arxiv.org/abs/2411.16085)). Weight decay that is a factor of the parameters is not
  masked; in Lamb, Lars and Schedule-Free it is a part of the update. Without momentum an update mostly has the sign of
  its gradient, and nothing changes: so it is with Adafactor. Schedule-Free masks z like the parameters.
- `decoupled_weight_decay=True`, an option of a group too, multiplies parameters by `1 - lr * weight_decay` instead of
  adding the decay to the gradient. Adam, NAdam and RAdam have it in torch.optim as well. Prodigy,
  Rprop and the Schedule-Free optimizers refuse it.

```python
import compiled_optim as co
import torch

model = torch.nn.Linear(4, 2)
decayed = {{"params": [model.weight], "weight_decay": 0.1, "decoupled_weight_decay": True}}
opt = co.SGD([decayed, {{"params": [model.bias]}}], lr=0.1, momentum=0.9, cautious=True)
model(torch.ones(3, 4)).square().sum().backward()
opt.step()
```

## What is not here

- `torch.optim.LBFGS` evaluates the loss several times in a step and keeps the history of all parameters as one vector.
  There is nothing to fuse: use torch's.
- `torch.optim.SparseAdam` is for sparse gradients, which no optimizer here takes. Use it for embeddings with
  `sparse=True`, beside one of these for the other parameters.
"""

COMMON = {"self", "params", "lr", "maximize", "options", "foreach"}


def page() -> str:
    """Return the page."""
    rows = [_row(entry) for entry in sorted(ALL.values(), key=lambda entry: entry.name.lower())]
    head = ["| optimizer | formula | bytes | options | drop-in for |", "|---|---|---|---|---|"]
    return TEXT.format(table="\n".join([*head, *rows]))


def _row(entry: Entry) -> str:
    own = [name for name in inspect.signature(getattr(co, entry.name).__init__).parameters if name not in COMMON]
    other = f"torch.optim.{entry.name}" if entry.in_torch else entry.drop_in_for
    options = ", ".join(f"`{name}`" for name in own)
    return f"| `{entry.name}` | {entry.formula} | {_bytes(entry)} | {options} | {f'`{other}`' if other else ''} |"


def _bytes(entry: Entry) -> str:
    counts = {_bytes_with(entry, options) for options in ({}, *entry.parity)}
    default, most = _bytes_with(entry, {}), max(counts)
    return f"{default:.2g}" if default == most else f"{default:.2g} to {most:.2g}"


def _bytes_with(entry: Entry, options: Options) -> float:
    """Return the bytes of the states of an element, with these options."""
    param = torch.nn.Parameter(torch.ones(SIZE, SIZE))
    optimizer = getattr(co, entry.name)([param], **options, compile=False)
    param.grad = torch.ones(SIZE, SIZE)
    optimizer.step()
    states: Iterable[torch.Tensor] = optimizer.state.get(param, {}).values()
    return sum(state.nbytes for state in states if state.ndim) / param.numel()


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
