"""Inductor passes that split the graph of a rule with sums into two passes over its tensors.

The graph comes from the phase BOTH: it returns the sums, and what follows uses their totals. The first pass computes
the sums. It also stores every result that does not depend on the totals, such as the moments of Lamb. The second pass
reads these results back instead of computing them again from the gradient. Numbers for each row, such as those of
AdamP, are carried from the first pass to the second in memory of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from operator import is_not
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from compiled_optim.torch_private import CustomGraphPass, get_hash_for_files

COPY = torch.ops.aten.copy_.default
SUMS = (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList)


class Split(NamedTuple):
    """How a graph is split: the stores of the first pass, and the values that it carries over to the second.

    ``carried`` maps the store of a carry to the value that it shall store.
    """

    early: list[Node]
    carried: dict[Node, Node]


class FirstPass(CustomGraphPass):
    """Keeps the sums, the early stores and the carried values."""

    def __init__(self, totals: int, carries: Sequence[int]) -> None:
        """Take the indices of the placeholders of the totals and of the carries."""
        self._totals, self._carries = totals, tuple(carries)

    def __call__(self, graph: Graph) -> None:
        """Change the graph in place."""
        early, carried = split(graph, self._totals, self._carries)
        for store in graph.find_nodes(op="call_function", target=COPY):
            if store in carried:
                store.update_arg(1, carried[store])
            elif store not in early:
                graph.erase_node(store)
        columns: dict[str, Node] = {}
        for store in early:
            _, value = _home_and_value(store)
            if value.target is COPY:
                continue  # stored already, into another state
            # behind the value, so that Inductor stores it in the loop that computes the sums
            value.append(store)
            value.replace_all_uses_with(store, delete_user_cb=partial(is_not, store))
            if value.meta["val"].ndim == 2:
                store.update_arg(1, _by_rows(graph, store, value, columns))
        graph.eliminate_dead_code()

    def uuid(self) -> str:
        """Return the key of this pass in Inductor's graph cache."""
        return f"{type(self).__name__} {self._totals} {self._carries} {get_hash_for_files((__file__,))!r}"


class SecondPass(FirstPass):
    """Keeps everything that depends on the totals, and reads back what the first pass has stored."""

    def __call__(self, graph: Graph) -> None:
        """Change the graph in place."""
        early, carried = split(graph, self._totals, self._carries)
        carries = _placeholders(graph, self._carries)
        for store in graph.find_nodes(op="call_function", target=COPY):
            home, value = _home_and_value(store)
            if store in early or home in carries:
                graph.erase_node(store)
                carried.get(store, value).replace_all_uses_with(home)
        (output,) = graph.find_nodes(op="output")
        output.args = ((),)
        graph.eliminate_dead_code()


def split(graph: Graph, totals: int, carries: Sequence[int]) -> Split:
    """Find the results that do not depend on the totals and whose old values are not needed later, and what to carry.

    A result that its store rounds to another dtype is not stored early, because the rule uses it unrounded.
    """
    late = _with_users(*_placeholders(graph, [totals]))
    homes = _placeholders(graph, carries)
    stores = {store: _home_and_value(store) for store in graph.find_nodes(op="call_function", target=COPY)}
    results = {store: pair for store, pair in stores.items() if pair[0] not in homes}
    early = [
        store
        for store, (home, value) in results.items()
        if value not in late and value.op != "placeholder" and home.meta["val"].dtype == value.meta["val"].dtype
    ]
    while True:
        known = {results[store][1] for store in early}
        finals = [value for store, (_, value) in results.items() if store not in early]
        small = _row_values(_with_inputs(finals, known), late, homes)
        carried = dict(zip((store for store in stores if store not in results), small, strict=False))
        if len(small) > len(carried):
            carried = {}  # too many: the second pass computes them again
        needed = _with_inputs(finals, known | set(carried.values()))
        kept = [store for store in early if results[store][0] not in needed]
        if kept == early:
            return Split(early, carried)
        early = kept


def _home_and_value(store: Node) -> tuple[Node, Node]:
    """Return the tensor that a ``copy_`` writes to, and the value that it writes."""
    home, value = store.args[:2]
    assert isinstance(home, Node)
    assert isinstance(value, Node)
    return home, value


def _row_values(needed: Collection[Node], late: Collection[Node], homes: Sequence[Node]) -> list[Node]:
    """Return the values of rows that the second pass needs, and that it would have to compute from sums over rows."""
    dtypes = {home.meta["val"].dtype for home in homes}
    return [
        node
        for node in needed
        if node.op == "call_function"
        and node not in late
        and any(user in late and user in needed for user in node.users)
        and node.meta["val"].ndim == 1
        and node.meta["val"].dtype in dtypes
        and any(other.target in SUMS for other in _with_inputs([node], ()))
    ]


def _placeholders(graph: Graph, indices: Sequence[int]) -> list[Node]:
    nodes = list(graph.find_nodes(op="placeholder"))
    return [nodes[i] for i in indices]


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


def _with_users(node: Node) -> set[Node]:
    """Return a node and everything that depends on it."""
    found, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user not in found:
                found.add(user)
                waiting.append(user)
    return found


def _with_inputs(nodes: Iterable[Node], known: Collection[Node]) -> set[Node]:
    """Return the nodes that are needed to compute ``nodes``, if those in ``known`` need not be computed."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and node not in known:
            found.add(node)
            waiting += node.all_input_nodes
    return found
