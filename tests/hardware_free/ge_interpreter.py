"""Interpreter for GE graphs: it runs on the CPU, operation by operation, the graph that torchair passes to CANN."""

from __future__ import annotations

from typing import Any

import torch
from torchair._ge_concrete_graph.ge_ir_pb2 import DataType as StoredType
from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef
from torchair.ge._ge_graph import DataType

DTYPES = {
    "DT_FLOAT": torch.float32,
    "DT_FLOAT16": torch.float16,
    "DT_BF16": torch.bfloat16,
    "DT_DOUBLE": torch.float64,
    "DT_INT64": torch.int64,
    "DT_INT32": torch.int32,
    "DT_BOOL": torch.bool,
}
STORED = {StoredType.Value(name): dtype for name, dtype in DTYPES.items()}
CAST = {int(getattr(DataType, name)): dtype for name, dtype in DTYPES.items()}


def _ints(tensor: torch.Tensor) -> list[int]:
    return [int(value) for value in tensor.flatten().tolist()]


def _each(function):
    """Return an operation on two lists.

    Its inputs are the first list, the second list, and optionally a factor ``alpha`` for the second.
    """

    def apply(operation, *inputs):
        half, rest = divmod(len(inputs), 2)
        alpha = inputs[-1] if rest else 1
        return [function(a, b * alpha) for a, b in zip(inputs[:half], inputs[half : 2 * half], strict=True)]

    return apply


OPERATIONS: dict[str, Any] = {
    "Abs": lambda o, a: a.abs(),
    "Add": lambda o, a, b: a + b,
    "Addcmul": lambda o, a, b, c, value: a + value * b * c,
    "BatchMatMul": lambda o, a, b: (a.mT if o.attr["adj_x1"].b else a) @ (b.mT if o.attr["adj_x2"].b else b),
    "ClipByValueV2": lambda o, a, low, high: torch.minimum(torch.maximum(a, low), high),
    "Cast": lambda o, a: a.to(CAST[o.attr["dst_type"].i]),
    "Equal": lambda o, a, b: a == b,
    "Fill": lambda o, shape, value: torch.full(_ints(shape), value.item(), dtype=value.dtype),
    "ForeachAbs": lambda o, *tensors: [tensor.abs() for tensor in tensors],
    "ForeachAddList": _each(torch.add),
    "ForeachDivList": _each(torch.div),
    "ForeachMaximumList": _each(torch.maximum),
    "ForeachMinimumList": _each(torch.minimum),
    "ForeachMulList": _each(torch.mul),
    "ForeachSubList": _each(torch.sub),
    "GatherV2": lambda o, a, indices, axis: a.index_select(int(axis), indices),
    "Greater": lambda o, a, b: a > b,
    "Less": lambda o, a, b: a < b,
    "LogicalAnd": lambda o, a, b: a & b,
    "LogicalNot": lambda o, a: ~a,
    "LogicalOr": lambda o, a, b: a | b,
    "LpNormV2": lambda o, a: torch.linalg.vector_norm(
        a, o.attr["p"].f, list(o.attr["axes"].list.i), keepdim=o.attr["keepdim"].b
    ),
    "Maximum": lambda o, a, b: torch.maximum(a, b),
    "Minimum": lambda o, a, b: torch.minimum(a, b),
    "Mul": lambda o, a, b: a * b,
    "Neg": lambda o, a: -a,
    "OnesLike": lambda o, a: torch.ones_like(a),
    "Pack": lambda o, *tensors: torch.stack(tensors, o.attr["axis"].i),
    "RealDiv": lambda o, a, b: a / b,
    "Reciprocal": lambda o, a: 1 / a,
    "ReduceSum": lambda o, a, axes: a.sum(_ints(axes), keepdim=o.attr["keep_dims"].b) if axes.numel() else a,
    "Reshape": lambda o, a, shape: a.reshape(_ints(shape)),
    "SelectV2": lambda o, condition, a, b: torch.where(condition, a, b),
    "Shape": lambda o, a: torch.tensor(a.shape),
    "Sign": lambda o, a: a.sign(),
    "Sqrt": lambda o, a: a.sqrt(),
    "Sub": lambda o, a, b: a - b,
    "Sxpy": lambda o, a, b, alpha: a - alpha.to(a.dtype) * b,
    "TensorMove": lambda o, a: a.clone(),
    "Transpose": lambda o, a, order: a.permute(_ints(order)).clone(memory_format=torch.contiguous_format),
    "Unpack": lambda o, a: list(a.unbind(o.attr["axis"].i)),
    "UnsortedSegmentSum": lambda o, a, segments, count: a.new_zeros(int(count)).index_add(0, segments, a),
    "Unsqueeze": lambda o, a: a.unsqueeze(o.attr["axes"].list.i[0]),
    "ZerosLike": lambda o, a: torch.zeros_like(a),
}


def _constant(operation: Any) -> torch.Tensor:
    value = operation.attr["value"].t
    dtype, shape = STORED[value.desc.dtype], list(value.desc.shape.dim)
    return torch.frombuffer(bytearray(value.data), dtype=dtype).reshape(shape) if value.data else torch.empty(shape)


def run(model: bytes, inputs: list[torch.Tensor], assigned: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return the outputs of the graph. An output that has a tensor in ``assigned`` is written to that tensor."""
    parsed = ModelDef()
    parsed.ParseFromString(model)
    values: dict[str, torch.Tensor] = {}
    outputs: list[torch.Tensor] = []
    for operation in parsed.graph[0].op:
        arguments = [values[name] for name in operation.input if name and not name.endswith(":-1")]
        if operation.type in ("Data", "RefData"):
            results: Any = inputs[operation.attr["index"].i]
        elif operation.type == "Const":
            results = _constant(operation)
        elif operation.type == "NetOutput":
            outputs = arguments
            continue
        else:
            if operation.type not in OPERATIONS:
                raise LookupError(f"the interpreter has no operation {operation.type}")
            results = OPERATIONS[operation.type](operation, *arguments)
        for i, result in enumerate(results if isinstance(results, list) else [results]):
            values[f"{operation.name}:{i}"] = result
    given = assigned or [None] * len(outputs)
    return [
        output.clone() if target is None else target.copy_(output)
        for output, target in zip(outputs, given, strict=True)
    ]
