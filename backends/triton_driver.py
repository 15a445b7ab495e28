"""Triton kernels that all table units on GPUs share. Importing this module imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["grads", "slots", "partials", "totals"])
def add_up(
    grads, slots, partials, totals,
    FIRST: tl.constexpr, COUNT: tl.constexpr, SUMS: tl.constexpr, KNOWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add some sums over the chunks of a tensor, always in the same order. Totals of a skipped tensor are 0."""
    tensor = tl.program_id(0).to(tl.int64)
    first = tl.load(slots + tensor)
    last = tl.load(slots + tensor + 1)
    if tl.load(grads + tensor) == 0:
        last = first
    for number in tl.static_range(FIRST, FIRST + COUNT):
        total = tl.zeros([BLOCK], tl.float64)
        for start in range(first, last, BLOCK):
            slot = start + tl.arange(0, BLOCK)
            total += tl.load(partials + slot * SUMS + number, slot < last, 0.0).to(tl.float64)
        tl.store(totals + tensor * (KNOWN + SUMS) + KNOWN + number, tl.sum(total))


@triton.jit(
    do_not_specialize=["count", "rows", "max_norm", "eps", "second_max_norm", "second_eps", "sign"],
    do_not_specialize_on_alignment=["squares", "inv_scale", "grad_scale", "norm"],
)
def clip(
    squares, inv_scale, grad_scale, norm, count, rows, max_norm, eps, second_max_norm, second_eps, sign,
    UNSCALES: tl.constexpr, CLIPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the norm of all gradients, and the factor that clips them by it, for each row."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        total += tl.load(squares + index, index < count, 0.0).to(tl.float64)
    found = tl.sqrt_rn(tl.sum(total).to(tl.float32))
    if UNSCALES:
        found *= tl.load(inv_scale)
    tl.store(norm, found)
    factor = _clip_factor(found, max_norm, eps)
    if CLIPS == 2:
        factor *= _clip_factor(found * factor, second_max_norm, second_eps)
    for start in range(0, rows, BLOCK):
        index = start + tl.arange(0, BLOCK)
        tl.store(grad_scale + index, tl.zeros([BLOCK], tl.float32) + factor * sign, index < rows)


@triton.jit
def _clip_factor(norm, max_norm, eps):
    factor = tl.div_rn(max_norm, norm + eps)
    # not tl.minimum: a norm that is NaN makes the factor NaN, as in torch
    return tl.where(factor > 1.0, 1.0, factor)
