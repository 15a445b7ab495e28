"""An Inductor pass that stores results as early as possible, for graphs that read their tensors twice.

A rule that needs a norm before it updates the parameters, such as Lamb or AdamP, makes two passes over its tensors. The
traced graph stores all results at the end, so the second pass would recompute the moments from the inputs of the first.
With early stores the first pass writes the moments and the second reads them back: 12 bytes per element instead of 16,
because the gradient is not read again, and no temporary. The stores are free where the first pass is limited by reads.
"""

from __future__ import annotations

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

aten = torch.ops.aten
SUMS = (aten.sum.default, aten.sum.dim_IntList)


class EarlyStores(CustomGraphPass):
    """Moves each ``copy_`` of a value with further uses directly behind the value; the uses then read the stored one.

    A value that the store would round to another dtype is left alone, because the rule uses it unrounded.
    """

    def __call__(self, graph: Graph) -> None:
        """Change the graph in place."""
        nodes = list(graph.nodes)
        if not any(node.target in SUMS for node in nodes):
            return  # without a reduction there is only one pass
        order = {node: place for place, node in enumerate(nodes)}
        columns: dict[str, Node] = {}
        for store in graph.find_nodes(op="call_function", target=aten.copy_.default):
            home, value = store.args[:2]
            if value.op == "placeholder" or value.target is aten.copy_.default:
                continue  # the value is an input, or is stored already
            read_later = any(order[user] > order[value] for user in home.users if user is not store)
            if len(value.users) < 2 or read_later or home.meta["val"].dtype != value.meta["val"].dtype:
                continue
            value.append(store)
            value.replace_all_uses_with(store, delete_user_cb=lambda user, store=store: user is not store)
            if value.meta["val"].ndim == 2:
                store.update_arg(1, _by_rows(graph, store, value, columns))

    def uuid(self) -> str:
        """Return the key of this pass in Inductor's graph cache: a hash of this file."""
        return str(get_hash_for_files((__file__,)))


def _by_rows(graph: Graph, store: Node, value: Node, columns: dict[str, Node]) -> Node:
    """Return a node that multiplies the value by a column of ones, so that Inductor keeps two loops for its store.

    For a plain elementwise store Inductor merges the loops over rows and columns into one. It could not fuse that loop
    with the sums over rows, which need both loops, so the store would be a separate pass.
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
            # as_strided makes Inductor store the ones; it would fold a constant into the product
            columns[str(rows)] = graph.call_function(aten.as_strided.default, (ones, [size, 1], [1, 1]))
        size.meta["val"] = rows
        ones.meta["val"] = columns[str(rows)].meta["val"] = example
    with graph.inserting_before(store):
        product = graph.call_function(aten.mul.Tensor, (value, columns[str(rows)]))
    product.meta["val"] = value.meta["val"]
    return product
