"""Decide how the graph of a program with sums is split into passes: which pass stores what, and what to carry.

See ``stage_passes``. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from compiled_optim.backends.recording import CannotRecord
from compiled_optim.stages import is_one

COPY = torch.ops.aten.copy_.default
SUMS = (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList)

SHARED = "a state that all rows of a matrix share "
NEEDED_LATER = SHARED + "is needed after its new value was stored, so a matrix cannot be cut into chunks"
NOT_OF_COLUMNS = SHARED + "depends on elements other than by a mean, so a matrix cannot be cut into chunks"


class Split(NamedTuple):
    """How a graph is split: the pass of each store, and the values to carry, by the stores of their carries.

    ``columns_of`` has the stores of passes over columns, with the stages that these follow.
    """

    pass_of: dict[Node, int]
    columns_of: dict[Node, int]
    carried: dict[Node, Node]


def split(graph: Graph, totals: Sequence[int], carries: Sequence[int]) -> Split:
    """Find the pass of each store, and what to carry; raise CannotRecord if there is none.

    A result is stored in the pass that can compute it first, unless its old value is needed later, or its store rounds
    it to another dtype and the rule uses it unrounded. Then it is stored in the last pass. Carries that are not used
    have no pass.
    """
    last = len(totals)
    (output,) = graph.find_nodes(op="output")
    sums: Sequence[Node] = output.args[0]
    stage_of = _stages(graph, _placeholders(graph, totals), sums)
    homes = _placeholders(graph, carries)
    order = {node: i for i, node in enumerate(graph.nodes)}
    stores = {store: home_and_value(store) for store in graph.find_nodes(op="call_function", target=COPY)}
    of_carries = [store for store, (home, _) in stores.items() if home in homes and not _is_shared(home)]
    of_column_carries = [store for store, (home, _) in stores.items() if home in homes and _is_shared(home)]
    results = {store: pair for store, pair in stores.items() if pair[0] not in homes and not _is_shared(pair[0])}
    shared = {store: pair for store, pair in stores.items() if pair[0] not in homes and _is_shared(pair[0])}
    after = {store: _stage_before(stage_of[value]) for store, (_, value) in shared.items()}
    pass_of = {
        store: stage_of[value]
        if value.op != "placeholder" and home.meta["val"].dtype == value.meta["val"].dtype
        else last
        for store, (home, value) in results.items()
    }
    while True:
        needed: list[set[Node]] = []
        carried: dict[Node, Node] = {}
        column_carried: dict[Node, Node] = {}
        for number in range(1, last + 1):
            known = {value for store, (_, value) in results.items() if pass_of[store] < number}
            known |= {value for store, (_, value) in shared.items() if after[store] < number}
            own = [value for store, (_, value) in results.items() if pass_of[store] == number]
            own += sums[number : number + 1]
            small = _row_values(_with_inputs(own, known), stage_of, number, _homes(of_carries))
            _carry(small, of_carries, carried, order)
            known |= set(carried.values())
            overwritten = {home for store, (home, _) in shared.items() if after[store] < number}
            lost = _column_values(_with_inputs(own, known), known, overwritten, _homes(of_column_carries))
            _carry(lost, of_column_carries, column_carried, order)
            needed.append(_with_inputs(own, known | set(column_carried.values())))
            if not overwritten.isdisjoint(needed[-1]):
                raise CannotRecord(NEEDED_LATER)
        for stage, later in enumerate(needed):  # those of pass stage + 1, and of the pass over columns before it
            later |= _with_inputs([value for store, (_, value) in shared.items() if after[store] == stage], ())
        kept = {
            store: number
            if all(results[store][0] not in later for later in needed[number:])  # of the passes number + 1 and later
            else last
            for store, number in pass_of.items()
        }
        if kept == pass_of:
            break
        pass_of = kept
    pass_of |= {store: stage_of[value] for store, value in carried.items()}
    columns_of = after | {store: _stage_before(stage_of[value]) for store, value in column_carried.items()}
    values = {store: value for store, (_, value) in shared.items()} | column_carried
    _check_columns(values, columns_of)
    return Split(pass_of, columns_of, carried | column_carried)


def _stages(graph: Graph, totals: Sequence[Node], sums: Sequence[Node]) -> Mapping[Node, int]:
    """Return the pass that can compute each node first: it knows the totals of all stages before its own.

    Sums are computed in the pass of their stage, also if an earlier one could.
    """
    found: dict[Node, int] = {}
    for node in graph.nodes:
        own = [totals.index(node) + 1] if node in totals else [0]
        own += [sums.index(node)] if node in sums else []
        found[node] = max(own + [found[each] for each in node.all_input_nodes])
    return found


def _stage_before(number: int) -> int:
    """Return the stage behind which the pass over columns comes that first can compute what pass ``number`` can."""
    return max(number - 1, 0)


def _homes(stores: Iterable[Node]) -> list[Node]:
    return [home_and_value(store)[0] for store in stores]


def _carry(
    values: Collection[Node], stores: Sequence[Node], carried: dict[Node, Node], order: Mapping[Node, int]
) -> None:
    """Give a carry to each value that has none, if there are enough; else passes compute them again."""
    new = sorted(set(values).difference(carried.values()), key=order.__getitem__)
    if len(new) <= len(stores) - len(carried):
        carried |= zip(stores[len(carried) :], new, strict=False)


def _column_values(
    needed: Collection[Node], known: Collection[Node], overwritten: Collection[Node], homes: Sequence[Node]
) -> set[Node]:
    """Return the values of columns that a pass needs for its rows, but whose inputs are overwritten before it."""
    kinds = {_kind(home) for home in homes}
    return {
        node
        for node in needed
        if node.op == "call_function"
        and _kind(node) in kinds
        and any(user in needed and _kind(user)[1] not in (_kind(node)[1], "") for user in node.users)
        and not _with_inputs([node], known).isdisjoint(overwritten)
    }


def _check_columns(values: Mapping[Node, Node], columns_of: Mapping[Node, int]) -> None:
    """Raise CannotRecord if passes over columns need more than what all rows of a matrix share, and its first row.

    ``values`` are the values that they store, ``columns_of`` are the stages that they follow. The first row gives the
    random bits for rounding stochastically.
    """
    for stage in set(columns_of.values()):
        earlier = [store for store, each in columns_of.items() if each < stage]
        own = [value for store, value in values.items() if columns_of[store] == stage]
        known = {values[store] for store in earlier}
        needed = _with_inputs(own, known)
        if not needed.isdisjoint(_homes(earlier)):
            raise CannotRecord(NEEDED_LATER)
        needed = _with_inputs(own, known.union(filter(_is_first_row, needed)))
        if any(node.op == "placeholder" and _is_of_rows(node) for node in needed):
            raise CannotRecord(NOT_OF_COLUMNS)


def _is_shared(node: Node) -> bool:
    """Return True if a tensor belongs to all rows of a matrix: it has the size 1 in the dimension of the rows."""
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.ndim == 2 and is_one(value.shape[0])


def _is_of_rows(node: Node) -> bool:
    """Return True if a tensor has a value for each row, or for each element."""
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.ndim == 2 and not is_one(value.shape[0])


def _is_first_row(node: Node) -> bool:
    """Return True if a node selects the first row of a chunk. In a pass over columns it is that of the matrix."""
    return node.target is torch.ops.aten.slice.Tensor and node.args[1:] == (0, 0, 1)


def home_and_value(store: Node) -> tuple[Node, Node]:
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


def _kind(node: Node) -> tuple[torch.dtype | None, str]:
    """Return dtype and shape of a node, whose sizes may be symbols. A node may also be a size."""
    value = node.meta["val"]
    return (value.dtype, str(tuple(value.shape))) if isinstance(value, torch.Tensor) else (None, "")


def _placeholders(graph: Graph, indices: Sequence[int]) -> list[Node]:
    nodes = list(graph.find_nodes(op="placeholder"))
    return [nodes[i] for i in indices]


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
