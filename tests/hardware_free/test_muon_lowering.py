"""Muon for CUDA and NPU without the hardware: products by the libraries, all else in two passes over all tensors."""

from __future__ import annotations

import pytest

from tests.hardware_free.conftest import require

pytestmark = pytest.mark.slow

PRODUCTS = {"aten.bmm.default": 5, "aten.baddbmm.default": 10}
"""The products of five iterations, for each shape of matrices."""


@pytest.fixture(scope="module")
def interpreted(run_script):
    require("torch", "triton")
    return run_script("muon_cuda", TORCHINDUCTOR_COMPILE_THREADS="1", TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def on_npu(run_script):
    require("torch", "torch_npu")
    return run_script("muon_npu")


@pytest.mark.parametrize("number", ["5", "20"])
def test_interpreted_steps_agree_with_torch(interpreted, number):
    """Two passes over all tensors. In float32 a last bit may differ in bfloat16; here none does."""
    assert interpreted[number]["apart"] <= 1e-5
    assert interpreted[number]["limits"] == []
    assert interpreted[number]["calls"] == 2


def test_operations_do_not_depend_on_the_number_of_matrices(interpreted):
    """There are three shapes after tall matrices are transposed."""
    few, many = interpreted["5"]["operations"], interpreted["20"]["operations"]
    assert few == many
    assert {name: few[name] for name in PRODUCTS} == {name: 3 * count for name, count in PRODUCTS.items()}


def test_ptxas_accepts_both_passes(run_script):
    require("torch", "triton")
    found = run_script("muon_cuda", TORCHINDUCTOR_COMPILE_THREADS="1")
    assert [label.split(", ")[1] for label in found] == ["prepare", "apply"]
    for label, targets in found.items():
        for one in targets:
            assert one["machine_code"], label
            assert (one["load"], one["store"], one["spilled"]) == (16, 16, 0), label
            assert one["registers"] <= 64, label


def test_npu_graphs_have_the_products_of_all_matrices(on_npu):
    """One graph for each shape of stacks. Twice as many matrices need no more products."""
    for case, found in on_npu.items():
        assert found["backends"] == ["npu"]
        assert found["recompiles"] == 0
        assert {*found["products"]} == {15}, case
        assert all("BatchMatMul" in operations for operations in found["maps"])
    assert len(on_npu["10 torch.bfloat16"]["products"]) <= len(on_npu["5 torch.bfloat16"]["products"]) == 3


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float32", 1e-6)])
def test_npu_steps_agree_with_eager(on_npu, dtype, tolerance):
    """torchair rounds each product to bfloat16 before it is scaled and added, and the coefficients too."""
    assert on_npu[f"5 torch.{dtype}"]["apart"] <= tolerance
