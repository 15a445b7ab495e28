"""Inductor passes that split the graph of a program with sums into one pass over its tensors for each stage.

The graph comes from the phase STAGED: it returns the sums of each stage, and what follows uses their totals. The pass
of a stage computes its sums. It also stores every result that depends on no later totals, such as the moments of Lamb.
Later passes read these results back instead of computing them again from the gradient. Numbers for each row, such as
those of AdamP, are carried from one pass to the later ones in memory of their own. The last pass does the rest.

Chunks may be rows of a matrix. A state with the size 1 in this dimension, such as ``col_var`` of Adafactor, belongs to
all of them. So it is stored by a pass over columns, which is run once for each matrix after the stage that its new
value depends on. Later passes read it back. If it is stored rounded, they get what depends on the unrounded value in
memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import is_not

import torch
from torch.fx import Graph, Node

from compiled_optim.backends import stage_split
from compiled_optim.backends.recording import CannotRecord
from compiled_optim.backends.stage_split import COPY, home_and_value, split
from compiled_optim.stages import is_one
from compiled_optim.torch_private import CustomGraphPass, get_hash_for_files

VISIBLE = "user_visible_output_idxs"
"""The entry of the output's ``meta`` that makes Inductor give outputs their strides in the graph before the passes. It
finds them by the number of an output, which is another one if an output before it is removed."""


class StagePass(CustomGraphPass):
    """Keeps the pass of one stage, or with the number of stages the last pass, or the pass over columns after a stage.

    ``refusal`` says why it has refused a graph, in addition to CannotRecord, of which Inductor makes another error.
    """

    refusal = ""

    def __init__(
        self, number: int, totals: Sequence[int], carries: Sequence[int], is_over_columns: bool = False
    ) -> None:
        """Take the number of the pass, and the indices of the placeholders of totals, or means, and of carries."""
        self._number, self._totals, self._carries = number, tuple(totals), tuple(carries)
        self._is_over_columns = is_over_columns

    def __call__(self, graph: Graph) -> None:
        """Change the graph in place."""
        number = self._number
        measures = not self._is_over_columns and number < len(self._totals)
        try:
            pass_of, columns_of, carried = split(graph, self._totals, self._carries)
        except CannotRecord as error:
            self.refusal = str(error)
            raise
        here = columns_of if self._is_over_columns else pass_of
        stores = {store: home_and_value(store) for store in graph.find_nodes(op="call_function", target=COPY)}
        early = []
        for store, (home, value) in stores.items():
            value = carried.get(store, value)
            if here.get(store) != number:
                graph.erase_node(store)
            else:
                store.update_arg(1, value)
                early += [store] * measures
            if {**pass_of, **columns_of}.get(store, number) < number:
                value.replace_all_uses_with(home)
        columns: dict[str, Node] = {}
        for store in early:
            home, value = home_and_value(store)
            if value.target is COPY or any(value < user for user in home.users if user is not store):
                continue  # stored already, into another state, or the old value is still needed
            # behind the value, so that Inductor stores it in the loop that computes the sums
            value.append(store)
            value.replace_all_uses_with(store, delete_user_cb=partial(is_not, store))
            if value.meta["val"].ndim == 2 and not is_one(value.meta["val"].shape[1]):
                store.update_arg(1, _by_rows(graph, store, value, columns))
        (output,) = graph.find_nodes(op="output")
        output.args = ((output.args[0][number],),) if measures else ((),)
        output.meta.pop(VISIBLE, None)
        graph.eliminate_dead_code()

    def uuid(self) -> str:
        """Return the key of this pass in Inductor's graph cache."""
        own = self._number, self._totals, self._carries, self._is_over_columns
        return f"{type(self).__name__} {own} {get_hash_for_files((__file__, stage_split.__file__))!r}"


def _by_rows(graph: Graph, store: Node, value: Node, columns: dict[str, Node]) -> Node:
    """Return a node that multiplies the value by a column of ones, so that Inductor keeps two loops for its store.

    For a plain elementwise store Inductor merges the loops over rows and columns into one. It could not fuse that loop
    with the sums over rows, which need both loops, so the store would be a separate loop.
    """
    rows = value.meta["val"].shape[0]
    if str(rows) not in columns:
        with value.meta["val"].fake_mode:
            example = value.meta["val"].new_ones((rows, 1))
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first):
            size = graph.call_function(torch.ops.aten.sym_size.int, (store.args[0], 0))
            ones = graph.call_function(
                torch.ops.aten.full.default, ([size, 1], 1.0), {"dtype": example.dtype, "device": example.device}
            )
            # as_strided makes Inductor store the ones; it would fold a constant into the product
            columns[str(rows)] = graph.call_function(torch.ops.aten.as_strided.default, (ones, [size, 1], [1, 1]))
        size.meta["val"] = rows
        ones.meta["val"] = columns[str(rows)].meta["val"] = example
    with graph.inserting_before(store):
        product = graph.call_function(torch.ops.aten.mul.Tensor, (value, columns[str(rows)]))
    product.meta["val"] = value.meta["val"]
    return product
