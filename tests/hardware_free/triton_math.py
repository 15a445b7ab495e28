"""What Triton's interpreter lacks: libdevice functions, in NumPy, and rounding to bfloat16."""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

FUNCTIONS = {
    "sqrt": np.sqrt,
    "sqrt_rn": np.sqrt,
    "div_rn": np.divide,
    "abs": np.abs,
    "pow": np.power,
    "mul_rn": np.multiply,
    "add_rn": np.add,
    "sub_rn": np.subtract,
    "fma": lambda a, b, c: a.astype(np.float64) * b + c,
}


def install() -> None:
    for name, function in FUNCTIONS.items():
        setattr(libdevice, name, _on_numpy(function))
    interpreter._convert_float = _round_to_nearest(interpreter._convert_float)


def _on_numpy(function):
    def call(*args, **_):
        tensors = [arg for arg in args if isinstance(arg, tl.tensor)]
        dtype = tensors[0].handle.data.dtype
        values = [arg.handle.data if isinstance(arg, tl.tensor) else np.asarray(arg, dtype) for arg in args]
        with np.errstate(all="ignore"):
            result = np.asarray(function(*np.broadcast_arrays(*values))).astype(dtype, copy=False)
        scalar = tensors[0].type.scalar
        block = result.ndim and any(tensor.type.is_block() for tensor in tensors)
        return tl.tensor(TensorHandle(result, scalar), tl.block_type(scalar, list(result.shape)) if block else scalar)

    return call


def _round_to_nearest(convert):
    """Return a conversion that rounds float32 to bfloat16 as the hardware does; the interpreter cuts the bits off."""

    def converted(data, source, target, mode):
        if source != tl.float32 or target != tl.bfloat16:
            return convert(data, source, target, mode)
        bits = np.ascontiguousarray(data.astype(np.float32)).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).reshape(data.shape)

    return converted
