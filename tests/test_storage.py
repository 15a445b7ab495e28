"""How parameters and states are kept, and how a rule sees them."""

from __future__ import annotations

import pytest
import torch

from compiled_optim.storage import Direct, Rounded, compute_dtype, storage_for


@pytest.mark.parametrize(
    ("kept", "computed", "storage"),
    [
        (torch.float32, torch.float32, Direct()),
        (torch.float64, torch.float64, Direct()),
        (torch.bfloat16, torch.float32, Rounded()),
        (torch.float32, torch.float64, Rounded()),
    ],
    ids=str,
)
def test_the_storage_of_a_dtype(kept, computed, storage):
    assert storage_for(kept, computed) == storage


def test_a_rule_computes_in_float32_or_float64():
    dtypes = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float64: torch.float64}
    assert {dtype: compute_dtype(dtype) for dtype in dtypes} == dtypes


def test_direct_is_the_memory_itself():
    kept = [torch.ones(3)]
    loaded = Direct().load(kept, torch.float32)
    loaded += 1.0
    Direct().store(kept, loaded)
    assert kept[0].tolist() == [2.0] * 3


def test_rounded_rounds_to_nearest_once():
    kept = [torch.ones(2, dtype=torch.bfloat16)]
    loaded = Rounded().load(kept, torch.float32)
    assert loaded[0].dtype == torch.float32
    step = 2.0**-8  # half of the distance to the next bfloat16 above 1
    loaded += step
    assert kept[0].tolist() == [1.0] * 2, "nothing is written before the store"
    Rounded().store(kept, loaded * 1.001)
    assert kept[0].tolist() == [1 + 2 * step] * 2
