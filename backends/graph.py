"""A compiled graph: where its inputs come from, and how it is called with new gradients and everything else fixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from compiled_optim.backends.base import Call, Shape
from compiled_optim.program import TensorLists

Place = tuple[int | str, int]
"""Where an input comes from, and its index there: a list by its number, an argument by its name, or SIZES."""

SIZES = "sizes"
"""The source of inputs that are the sizes of the lanes, dimension by dimension."""

ArgumentValues = Mapping[str, Tensor | Sequence[Tensor]]
"""The arguments by name; the scalars of an accelerator are 0-dim tensors."""


@dataclass
class Graph:
    """A compiled graph and the place each of its inputs comes from.

    ``run`` takes the inputs as a list, which it empties, and returns the outputs. If the graph is ``one_kernel``, it
    takes them as arguments instead and returns nothing.
    """

    run: Callable[..., Any]
    inputs: list[Place]
    kernels: int = 0
    seconds: float = 0.0
    from_disk: bool = False
    one_kernel: bool = False

    def __call__(self, inputs: list[Any]) -> Sequence[Tensor]:
        """Run the graph on inputs in its own order."""
        if self.one_kernel:
            self.run(*inputs)
            return ()
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
        """Return a call that puts ``count`` gradients, list 0, into their places among these inputs and runs."""
        run = self.run
        fill = _filler(template, {at: lane for at, (i, lane) in enumerate(self.inputs) if i == 0 and lane < count})

        def call_kernel(grads: Sequence[Tensor]) -> None:
            run(*fill(grads))

        def call_graph(grads: Sequence[Tensor]) -> Tensor | None:
            outputs = run(fill(grads))
            return outputs[0] if outputs else None

        return call_kernel if self.one_kernel else call_graph


def _filler(template: list[Any], places: Mapping[int, int]) -> Callable[[Sequence[Tensor]], list[Any]]:
    """Return a function that copies the template and puts values in: at each place, the value of the given index."""
    strides = {after - before for before, after in pairwise(places)}
    if places and list(places.values()) == list(range(len(places))) and len(strides) <= 1:
        evenly = slice(min(places), max(places) + 1, *strides)

        def fill(values: Sequence[Tensor]) -> list[Any]:
            inputs = template.copy()
            inputs[evenly] = values
            return inputs
    else:

        def fill(values: Sequence[Tensor]) -> list[Any]:
            inputs = template.copy()
            for place, i in places.items():
                inputs[place] = values[i]
            return inputs

    return fill
