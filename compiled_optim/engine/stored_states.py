"""Convert states between formats: float tensors, and codes of one byte with scales."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_optim.engine import layout
from compiled_optim.engine.sharding import shard_like
from compiled_optim.engine.tensor_types import local_shard
from compiled_optim.quantization import blocks, decode, encode, scales_of
from compiled_optim.storage import Compensated, MasterWeights, Quantized

(SCALE,) = Quantized.companions
"""The suffix of the name of the scales of a state."""

COMPANIONS = (*Compensated.companions, *MasterWeights.companions)
"""The names of the companions of parameters."""

(MASTER,) = MasterWeights.companions
(COMPENSATION,) = Compensated.companions


def is_quantized(values: Mapping[str, Any], name: str) -> bool:
    """Return True if a state is kept as codes."""
    tensor = values.get(name)
    return isinstance(tensor, Tensor) and tensor.dtype == torch.uint8 and isinstance(values.get(name + SCALE), Tensor)


def rows_of_scales(codes: Tensor, scales: object, rows: int) -> int | None:
    """Return in how many dimensions, after the first, a program sees codes with these scales; None if none would.

    This is ``rows`` if the scales fit that. Another rule may have saved them by blocks instead of by rows.
    """
    if not isinstance(scales, Tensor) or scales.dtype != torch.float32:
        return None
    for each in (rows, 0, 1):
        by_rows = each > 0 and codes.ndim > 1
        count = codes.shape[0] if by_rows else blocks(codes.numel())
        if scales.shape == (count,) and layout.has_working_view(codes, int(by_rows)):
            return int(by_rows)
    return None


def dequantize(codes: Tensor, scales: Tensor, signed: bool, rows: int) -> Tensor:
    """Return a state in float32, with the strides of its codes. ``rows`` is how the rule of its parameter sees it."""
    rows = rows_of_scales(codes, scales, rows) or 0
    flat = layout.working_view(codes, rows)
    made = torch.empty_strided(codes.shape, codes.stride(), dtype=torch.float32, device=codes.device)
    layout.working_view(made, rows).copy_(decode(flat, scales.to(codes.device), signed))
    return made


def quantize(param: Tensor, values: Tensor, signed: bool, rows: int) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a state, rounded to nearest. The codes have the parameter's working strides."""
    flat = layout.working_view(layout.copy_like(param, values, rows, torch.float32), rows)
    scales = scales_of(flat, signed)
    strides = layout.working_strides(param, rows)
    codes = torch.empty_strided(param.shape, strides, dtype=torch.uint8, device=param.device)
    layout.working_view(codes, rows).copy_(encode(flat, scales, None, signed))
    return codes, scales


def has_quantized(values: Mapping[str, Any]) -> bool:
    """Return True if a parameter has states that are kept as codes."""
    return any(is_quantized(values, name) for name in values)


def in_full_precision(
    values: Mapping[str, Any], nonnegative: Collection[str], rows: int, param: Tensor, keep_companions: bool
) -> dict[str, Any]:
    """Return the states of a parameter as float tensors, without scales, and without other companions unless asked."""
    found: dict[str, Any] = {}
    scales = {name + SCALE for name in values if is_quantized(values, name)}
    for name, value in values.items():
        if name + SCALE in scales:
            plain = dequantize(local_shard(value), values[name + SCALE], name not in nonnegative, rows)
            found[name] = shard_like(param, plain)
        elif name not in scales and (keep_companions or name not in COMPANIONS):
            found[name] = value
    return found
