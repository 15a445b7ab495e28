"""A compiled graph: the order of its inputs, and a call that takes new gradients while all else is bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from compiled_optim.backends.base import Call, Shape
from compiled_optim.program import TensorLists

Place = tuple[int | str, int]
"""The source of an input and its index there: the number of a list, the name of an argument, SIZES or a carry."""

SIZES = "sizes"
"""The source of inputs that are the sizes of the tensors, dimension by dimension."""

CARRY, COLUMN_CARRY = CARRIES = "carry", "column carry"
"""The sources of inputs that carry a number for each row, or for each column, from a pass to later ones."""

ArgumentValues = Mapping[str, Tensor | Sequence[Tensor]]
"""The arguments by name. Accelerator backends pass the scalars as a list of 0-dim tensors."""


@dataclass
class Graph:
    """A compiled graph and the place of each of its inputs.

    ``run`` takes the inputs as a list, clears the list and returns the outputs.
    """

    run: Callable[..., Any]
    inputs: list[Place]
    kernels: int = 0
    seconds: float = 0.0

    def __call__(self, inputs: list[Any]) -> Sequence[Tensor]:
        """Run the graph on inputs in its own order."""
        outputs: Sequence[Tensor] = self.run(inputs)
        return outputs

    def order_inputs(self, shapes: Sequence[Shape], lists: TensorLists, arguments: ArgumentValues) -> list[Any]:
        """Return the graph's inputs in its own order."""
        sources: dict[int | str, Sequence[Any]] = {
            SIZES: [size for shape in shapes for size in shape],
            **{name: [value] if isinstance(value, Tensor) else value for name, value in arguments.items()},
            **dict(enumerate(lists)),
        }
        return [sources[source][index] for source, index in self.inputs]

    def bind(self, template: list[Any], count: int) -> Call:
        """Return a call that inserts ``count`` gradients (list 0) into a copy of ``template`` and runs the graph."""
        run = self.run
        fill = _filler(template, {at: lane for at, (i, lane) in enumerate(self.inputs) if i == 0 and lane < count})

        def call(grads: Sequence[Tensor | None]) -> Tensor | None:
            outputs = run(fill(grads))
            return outputs[0] if outputs else None

        return call


def _filler(template: list[Any], places: Mapping[int, int]) -> Callable[[Sequence[Tensor | None]], list[Any]]:
    """Return a function that copies the template and inserts values. ``places`` maps a position to a value's index."""
    strides = {after - before for before, after in pairwise(places)}
    if places and list(places.values()) == list(range(len(places))) and len(strides) <= 1:
        evenly = slice(min(places), max(places) + 1, *strides)

        def fill(values: Sequence[Tensor | None]) -> list[Any]:
            inputs = template.copy()
            inputs[evenly] = values
            return inputs
    else:

        def fill(values: Sequence[Tensor | None]) -> list[Any]:
            inputs = template.copy()
            for place, i in places.items():
                inputs[place] = values[i]
            return inputs

    return fill
