"""Inductor passes that split the graph of a program with sums into one pass over its tensors for each stage.

The graph comes from the phase STAGED: it returns the sums of each stage, and what follows uses their totals. The pass
of a stage computes its sums. It also stores every result that depends on no later totals, such as the moments of Lamb.
Later passes read these results back instead of computing them again from the gradient. Numbers for each row, such as
those of AdamP, are carried from one pass to the later ones in memory of their own. The last pass does the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import is_not
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from compiled_optim.torch_private import CustomGraphPass, get_hash_for_files

COPY = torch.ops.aten.copy_.default
SUMS = (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList)


class Split(NamedTuple):
    """How a graph is split: the pass of each store, and the values to carry, by the stores of their carries."""

    pass_of: dict[Node, int]
    carried: dict[Node, Node]


class StagePass(CustomGraphPass):
    """Keeps the pass of one stage, or with the number of stages the last pass."""

    def __init__(self, number: int, totals: Sequence[int], carries: Sequence[int]) -> None:
        """Take the number of the pass, and the indices of the placeholders of the totals and of the carries."""
        self._number, self._totals, self._carries = number, tuple(totals), tuple(carries)

    def __call__(self, graph: Graph) -> None:
        """Change the graph in place."""
        number, is_last = self._number, self._number == len(self._totals)
        pass_of, carried = split(graph, self._totals, self._carries)
        stores = {store: _home_and_value(store) for store in graph.find_nodes(op="call_function", target=COPY)}
        early = []
        for store, (home, value) in stores.items():
            value = carried.get(store, value)
            own = pass_of.get(store)
            if own != number:
                graph.erase_node(store)
            elif not is_last:
                store.update_arg(1, value)
                early.append(store)
            if own is not None and own < number:
                value.replace_all_uses_with(home)
        columns: dict[str, Node] = {}
        for store in early:
            home, value = _home_and_value(store)
            if value.target is COPY or any(value < user for user in home.users if user is not store):
                continue  # stored already, into another state, or the old value is still needed
            # behind the value, so that Inductor stores it in the loop that computes the sums
            value.append(store)
            value.replace_all_uses_with(store, delete_user_cb=partial(is_not, store))
            if value.meta["val"].ndim == 2:
                store.update_arg(1, _by_rows(graph, store, value, columns))
        (output,) = graph.find_nodes(op="output")
        output.args = ((),) if is_last else ((output.args[0][number],),)  # type: ignore[index]
        graph.eliminate_dead_code()

    def uuid(self) -> str:
        """Return the key of this pass in Inductor's graph cache."""
        own = self._number, self._totals, self._carries
        return f"{type(self).__name__} {own} {get_hash_for_files((__file__,))!r}"


def split(graph: Graph, totals: Sequence[int], carries: Sequence[int]) -> Split:
    """Find the pass of each store, and what to carry.

    A result is stored in the pass that can compute it first, unless its old value is needed later, or its store rounds
    it to another dtype and the rule uses it unrounded. Then it is stored in the last pass. Carries that are not used
    have no pass.
    """
    last = len(totals)
    stage_of = _stages(graph, _placeholders(graph, totals))
    homes = _placeholders(graph, carries)
    order = {node: i for i, node in enumerate(graph.nodes)}
    stores = {store: _home_and_value(store) for store in graph.find_nodes(op="call_function", target=COPY)}
    results = {store: pair for store, pair in stores.items() if pair[0] not in homes}
    of_carries = [store for store in stores if store not in results]
    (output,) = graph.find_nodes(op="output")
    sums: Sequence[Node] = output.args[0]  # type: ignore[assignment]
    pass_of = {
        store: stage_of[value]
        if value.op != "placeholder" and home.meta["val"].dtype == value.meta["val"].dtype
        else last
        for store, (home, value) in results.items()
    }
    while True:
        needed: list[set[Node]] = []
        carried: dict[Node, Node] = {}
        for number in range(1, last + 1):
            known = {value for store, (_, value) in results.items() if pass_of[store] < number}
            own = [value for store, (_, value) in results.items() if pass_of[store] == number]
            own += sums[number : number + 1]
            small = _row_values(_with_inputs(own, known), stage_of, number, homes)
            new = sorted(small.difference(carried.values()), key=order.__getitem__)
            if len(new) <= len(of_carries) - len(carried):  # else the pass computes them again
                carried |= zip(of_carries[len(carried) :], new, strict=False)
            needed.append(_with_inputs(own, known | set(carried.values())))
        kept = {
            store: number
            if all(results[store][0] not in later for later in needed[number:])  # of the passes number + 1 and later
            else last
            for store, number in pass_of.items()
        }
        if kept == pass_of:
            return Split({**pass_of, **{store: stage_of[value] for store, value in carried.items()}}, carried)
        pass_of = kept


def _stages(graph: Graph, totals: Sequence[Node]) -> Mapping[Node, int]:
    """Return the pass that can compute each node first: it knows the totals of all stages before its own."""
    found: dict[Node, int] = {}
    for node in graph.nodes:
        own = [totals.index(node) + 1] if node in totals else [0]
        found[node] = max(own + [found[each] for each in node.all_input_nodes])
    return found


def _home_and_value(store: Node) -> tuple[Node, Node]:
    """Return the tensor that a ``copy_`` writes to, and the value that it writes."""
    home, value = store.args[:2]
    assert isinstance(home, Node)
    assert isinstance(value, Node)
    return home, value


def _row_values(
    needed: Collection[Node], stage_of: Mapping[Node, int], number: int, homes: Sequence[Node]
) -> set[Node]:
    """Return the values of rows that a pass needs, and that it would have to compute from sums over rows.

    Those that an earlier pass can compute, and whose users here cannot be computed earlier.
    """
    kinds = {_kind(home) for home in homes}
    return {
        node
        for node in needed
        if node.op == "call_function"
        and stage_of[node] < number
        and any(stage_of[user] >= number and user in needed for user in node.users)
        and _kind(node) in kinds
        and any(other.target in SUMS for other in _with_inputs([node], ()))
    }


def _kind(node: Node) -> tuple[torch.dtype, str]:
    """Return dtype and shape of a node, whose sizes may be symbols."""
    return node.meta["val"].dtype, str(tuple(node.meta["val"].shape))


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
