"""A compiled graph: where its inputs come from, and how it is called with new gradients and everything else fixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from compiled_optim.backends.base import Call
from compiled_optim.program import TensorLists

Place = tuple[int, int]
"""Where an input comes from: the list, and the place in it."""

SIZES = -1
"""As the list of a :data:`Place`: all lanes' sizes, dimension by dimension."""

SHARED = -2
"""As the list of a :data:`Place`: the tensors shared by all lanes."""


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

    def __call__(self, arguments: list[Any]) -> Sequence[Tensor]:
        """Run the graph on the inputs it asks for."""
        if self.one_kernel:
            self.run(*arguments)
            return ()
        outputs: Sequence[Tensor] = self.run(arguments)
        return outputs

    def arguments(self, shapes: Sequence[tuple[int, ...]], lists: TensorLists, shared: Sequence[Tensor]) -> list[Any]:
        """The graph's inputs in its own order."""
        sizes = [size for shape in shapes for size in shape]
        sources: dict[int, Sequence[Any]] = {SIZES: sizes, SHARED: shared, **dict(enumerate(lists))}
        return [sources[i][place] for i, place in self.inputs]

    def bind(self, template: list[Any], count: int) -> Call:
        """A call that puts ``count`` gradients, list 0, into their places among these arguments and runs the graph."""
        run = self.run
        filled = _filling(template, {at: lane for at, (i, lane) in enumerate(self.inputs) if i == 0 and lane < count})

        def call_kernel(grads: Sequence[Tensor]) -> None:
            run(*filled(grads))

        def call_graph(grads: Sequence[Tensor]) -> Tensor | None:
            outputs = run(filled(grads))
            return outputs[0] if outputs else None

        return call_kernel if self.one_kernel else call_graph


def _filling(template: list[Any], places: Mapping[int, int]) -> Callable[[Sequence[Tensor]], list[Any]]:
    """A function that returns a copy of the template with values in it: at each of the places, the value it names."""
    strides = {after - before for before, after in pairwise(places)}
    if places and list(places.values()) == list(range(len(places))) and len(strides) <= 1:
        evenly = slice(min(places), max(places) + 1, *strides)

        def filled(values: Sequence[Tensor]) -> list[Any]:
            arguments = template.copy()
            arguments[evenly] = values
            return arguments
    else:

        def filled(values: Sequence[Tensor]) -> list[Any]:
            arguments = template.copy()
            for place, i in places.items():
                arguments[place] = values[i]
            return arguments

    return filled
