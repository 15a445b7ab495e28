"""Storing a result as soon as it is known, in graphs that pass over their tensors twice.

A rule that needs a norm before it can step, as Lamb and AdamP do, reads everything twice. Traced, its results are
stored at the very end, so that the second pass would compute the moments again from what the first one read. Stored by
the first pass, which costs it nothing where reading is the limit, they are read back by the second: 12 bytes for each
parameter instead of 16, without the gradient, and without a temporary.
"""

from __future__ import annotations

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

aten = torch.ops.aten
SUMS = (aten.sum.default, aten.sum.dim_IntList)


class EarlyStores(CustomGraphPass):
    """Moves each store of a result that is used again to where the result is known, and its uses to what is stored.

    Only of results in the dtype they are stored in: the rule goes on with what it had before rounding.
    """

    def __call__(self, graph: Graph) -> None:
        """Change the graph in place."""
        nodes = list(graph.nodes)
        if not any(node.target in SUMS for node in nodes):
            return  # one pass reads nothing back
        order = {node: place for place, node in enumerate(nodes)}
        columns: dict[str, Node] = {}
        for store in graph.find_nodes(op="call_function", target=aten.copy_.default):
            home, value = store.args[:2]
            if value.op == "placeholder" or value.target is aten.copy_.default:
                continue  # nothing was computed, or it is stored already
            read_later = any(order[user] > order[value] for user in home.users if user is not store)
            if len(value.users) < 2 or read_later or home.meta["val"].dtype != value.meta["val"].dtype:
                continue
            value.append(store)
            value.replace_all_uses_with(store, delete_user_cb=lambda user, store=store: user is not store)
            if value.meta["val"].ndim == 2:
                store.update_arg(1, _by_rows(graph, store, value, columns))

    def uuid(self) -> str:
        """By what Inductor's cache of graphs knows this pass: its source."""
        return str(get_hash_for_files((__file__,)))


def _by_rows(graph: Graph, store: Node, value: Node, columns: dict[str, Node]) -> Node:
    """The value times a column of ones: Inductor merges the loops over rows and columns of anything simpler.

    A merged loop would be a pass of its own, since sums over rows need both loops.
    """
    rows = value.meta["val"].shape[0]
    if str(rows) not in columns:
        with value.meta["val"].fake_mode:
            example = value.meta["val"].new_ones((rows, 1))
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first):
            size = graph.call_function(aten.sym_size.int, (store.args[0], 0))
            ones = graph.call_function(
                aten.full.default, ([size, 1], 1.0), {"dtype": example.dtype, "device": example.device}
            )
            # in memory, or the compiler would see through it
            columns[str(rows)] = graph.call_function(aten.as_strided.default, (ones, [size, 1], [1, 1]))
        size.meta["val"] = rows
        ones.meta["val"] = columns[str(rows)].meta["val"] = example
    with graph.inserting_before(store):
        product = graph.call_function(aten.mul.Tensor, (value, columns[str(rows)]))
    product.meta["val"] = value.meta["val"]
    return product
