"""An Inductor pass for states in blocks: what a block stores is computed once, although it is needed twice.

A block is needed for its scale, and for its codes once the scale is known. Inductor computes it again for the codes,
because it takes that for cheaper than memory. The driver runs a few blocks at a time, so this memory is in the cache.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from compiled_optim.torch_private import CustomGraphPass, get_hash_for_files

LARGEST, SIZE = torch.ops.aten.amax.default, torch.ops.aten.abs.default

KEEP = "inductor_realize_to_strides"
"""The entry of a node's ``meta`` that makes Inductor store its result. Without its effect a unit is slower."""


class KeepBlocks(CustomGraphPass):
    """Stores the values of which the scales of blocks are computed; see ``quantization.scales_of``."""

    def __call__(self, graph: Graph) -> None:
        """Change the graph in place."""
        for largest in graph.find_nodes(op="call_function", target=LARGEST):
            node: Node = largest
            while node.target is not SIZE and len(node.all_input_nodes) == 1:
                (node,) = node.all_input_nodes
            if node.target is SIZE:
                node.all_input_nodes[0].meta[KEEP] = True

    def uuid(self) -> str:
        """Return the key of this pass in Inductor's graph cache."""
        return f"{type(self).__name__} {get_hash_for_files((__file__,))!r}"
