"""Operations that become one GE node each, and the rewriting of a traced graph to use them.

torchair converts each ATen operation on its own, which leaves idle nodes. After every multiplication there is a Cast to
the dtype it already has, because the converter compares dtypes before GE has derived that of the product. Operations of
our own have converters of our own, registered with torchair's public ``register_fx_node_ge_converter``:

- ``mul``: a product of tensors with the same dtype, without the Cast.
- ``addcmul``: a product that is only added to or subtracted from a tensor, so it is not written to memory.
- ``segment_sum``: sums over the segments of a flat buffer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten
SIGNS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}


@lru_cache(maxsize=1)
def operations() -> Any:
    """Return the namespace of the operations. They are defined, and known to torchair, from the first call on."""
    import torchair

    # only shapes and dtypes: torchair runs the GE graph
    library: Any = torch.library
    library.define("compiled_optim_ge::mul", "(Tensor x, Tensor y) -> Tensor")
    library.define("compiled_optim_ge::addcmul", "(Tensor x, Tensor y, Tensor z, int sign) -> Tensor")
    library.define("compiled_optim_ge::segment_sum", "(Tensor rows, Tensor segments, int count) -> Tensor")
    library.register_fake("compiled_optim_ge::mul", lambda x, y: torch.empty_like(torch.mul(x, y)))
    library.register_fake("compiled_optim_ge::addcmul", lambda x, y, z, sign: torch.empty_like(x))
    library.register_fake("compiled_optim_ge::segment_sum", lambda rows, segments, count: rows.new_empty(count))
    found = torch.ops.compiled_optim_ge
    register: Any = torchair.register_fx_node_ge_converter
    register(found.mul.default)(_mul)
    register(found.addcmul.default)(_addcmul)
    register(found.segment_sum.default)(_segment_sum)
    return found


def _mul(x: Any, y: Any, meta_outputs: Any = None) -> Any:
    from torchair.ge import custom_op

    return custom_op("Mul", inputs={"x1": x, "x2": y}, outputs=["y"])


def _addcmul(x: Any, y: Any, z: Any, sign: int, meta_outputs: Any = None) -> Any:
    from torchair.ge import Const, custom_op

    value = Const(float(sign), dtype=x.dtype)
    return custom_op("Addcmul", inputs={"input_data": x, "x1": y, "x2": z, "value": value}, outputs=["y"])


def _segment_sum(rows: Any, segments: Any, count: int, meta_outputs: Any = None) -> Any:
    from torchair.ge import Const, DataType, attr, custom_op

    inputs = {"x": rows, "segment_ids": segments, "num_segments": Const(count, dtype=DataType.DT_INT32)}
    attributes = {"is_preprocessed": attr.Bool(False)}
    return custom_op("UnsortedSegmentSum", inputs=inputs, attrs=attributes, outputs=["y"])


def product(x: Any, y: Any) -> Any:
    """Decompose a product of tensors that have the same floating-point dtype."""
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype == y.dtype and x.is_floating_point():
        return operations().mul(x, y)
    return NotImplemented


def rewrite(module: GraphModule) -> None:
    """Use ``addcmul`` and ``segment_sum`` in a traced graph, in place."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target in SIGNS and not node.kwargs:
            _fuse_product(node, SIGNS[node.target])
        elif node.target is aten.index_add.default and _is_zero(node.args[0]):
            _, _, segments, rows = node.args
            with graph.inserting_before(node):
                sums = graph.call_function(
                    operations().segment_sum.default, (rows, segments, node.meta["val"].shape[0])
                )
            sums.meta = node.meta
            node.replace_all_uses_with(sums)
            zeros = node.args[0]
            graph.erase_node(node)
            if not zeros.users:
                graph.erase_node(zeros)
    module.recompile()


def _fuse_product(node: Node, sign: int) -> None:
    """Replace ``x + y z`` or ``x - y z`` by one operation, if the product is not used elsewhere."""
    x, factors = node.args
    if not (isinstance(x, Node) and isinstance(factors, Node) and factors.target is aten.mul.Tensor):
        return
    y, z = factors.args
    if len(factors.users) > 1 or not (isinstance(y, Node) and isinstance(z, Node)) or _is_written(factors, node):
        return
    values = [each.meta["val"] for each in (x, y, z, node)]
    if values[0].shape != values[3].shape or len({value.dtype for value in values}) > 1:
        return
    with node.graph.inserting_before(node):
        fused = node.graph.call_function(operations().addcmul.default, (x, y, z, sign))
    fused.meta = node.meta
    node.replace_all_uses_with(fused)
    node.graph.erase_node(node)
    node.graph.erase_node(factors)


def _is_written(product: Node, until: Node) -> bool:
    """Return True if a factor of a product is overwritten before the product is used."""
    node = product.next
    while node is not until:
        if node.target is aten.copy_.default and node.args[0] in product.args:
            return True
        node = node.next
    return False


def _is_zero(node: Any) -> bool:
    """Return True for a new tensor of zeros."""
    return isinstance(node, Node) and node.target in (aten.new_zeros.default, aten.zeros.default)
