"""How parameters and states are kept, and how a rule sees them."""

from __future__ import annotations

import math

import pytest
import torch

from compiled_optim.engine.averages import move_towards
from compiled_optim.noise import Noise, step_seed
from compiled_optim.quantization import decode, dropped_bits, encode, scales_of
from compiled_optim.storage import Compensated, Direct, MasterWeights, Rounded, compute_dtype, round_to, storage_for
from compiled_optim.tensors import Tensors


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
    loaded = Direct().load(kept, (), torch.float32)
    loaded += 1.0
    Direct().store(kept, (), loaded, None, 0)
    assert kept[0].tolist() == [2.0] * 3


def test_rounded_rounds_to_nearest_once():
    kept = [torch.ones(2, dtype=torch.bfloat16)]
    loaded = Rounded().load(kept, (), torch.float32)
    assert loaded[0].dtype == torch.float32
    step = 2.0**-8  # half of the distance to the next bfloat16 above 1
    loaded += step
    assert kept[0].tolist() == [1.0] * 2, "nothing is written before the store"
    Rounded().store(kept, (), loaded * 1.001, None, 0)
    assert kept[0].tolist() == [1 + 2 * step] * 2


VALUES = torch.tensor([1.001, -0.3337, 3e-5, 6e4, 1e-6])


def rounded(kept: torch.dtype, values: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the mean, over many seeds, of values rounded stochastically to a dtype."""
    grads, params, total = torch.linspace(-1, 1, len(values)), torch.linspace(2, 3, len(values)), 0.0
    for step in range(steps):
        memory = [torch.empty(len(values), dtype=kept)]
        noise = Noise([grads], [params], float(step_seed(0, step)))
        Rounded(True).store(memory, (), Tensors([values]), noise, 1)
        assert ((memory[0].double() - values) / values).abs().max() < 0.05
        total = total + memory[0].double()
    return total / steps


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16], ids=str)
def test_stochastic_rounding_has_no_bias(kept):
    steps = 4000
    # a rounding error is at most one unit in the last place, so the mean of n deviates by about 1 / sqrt(n) of it
    unit = torch.maximum(VALUES.abs() * torch.finfo(kept).eps, torch.tensor(2.0**-24 if kept == torch.float16 else 0.0))
    assert ((rounded(kept, VALUES, steps) - VALUES).abs() <= unit * 4 * 0.5 / steps**0.5).all()


def test_random_bits_are_uniform_and_independent():
    generator = torch.Generator().manual_seed(0)
    grads, params = (torch.randn(1 << 16, generator=generator) for _ in range(2))
    first = Noise([grads], [params], float(step_seed(0, 1)))
    second = Noise([grads], [params], float(step_seed(0, 2)))
    same = Noise([torch.zeros(1 << 16)], [params], float(step_seed(0, 1)))
    drawn = [noise.bits(place, 16)[0].double() / 2**16 for noise in (first, second, same) for place in range(3)]
    for bits in drawn:
        assert abs(bits.mean() - 0.5) < 4 * (1 / 12) ** 0.5 / 2**8
        assert (torch.histc(bits, 16, 0, 1) / 2**12 - 1).abs().max() < 5 / 2**6
    correlations = torch.corrcoef(torch.stack([*drawn, drawn[0].roll(1)])) - torch.eye(len(drawn) + 1)
    assert correlations.abs().max() < 5 / 2**8


def test_seeds_of_steps_differ():
    seeds = [step_seed(seed, step) for seed in range(4) for step in range(1000)]
    assert all(0 <= seed < 1 << 24 for seed in seeds)
    assert len({*seeds}) > len(seeds) - 5


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("size", [1, 128, 300])
def test_codes_are_close_relative_to_each_element(signed, size):
    generator = torch.Generator().manual_seed(0)
    values = torch.exp2(12 * torch.rand(size, generator=generator) - 14)
    values = values * torch.randn(size, generator=generator).sign() if signed else values
    scales = scales_of(values, signed)
    codes = encode(values, scales, None, signed)
    again = decode(codes, scales, signed)
    assert ((again - values) / values).abs().max() <= (1 / 16 if signed else 1 / 32)
    # what was decoded is encoded exactly, so checkpoints in float32 lose nothing
    assert torch.equal(scales_of(again, signed), scales)
    assert torch.equal(encode(again, scales, None, signed), codes)


def test_small_second_moments_do_not_become_zero():
    values = torch.tensor([1.0, 1e-3, 1e-9, 0.0])
    scales = scales_of(values, False)
    assert (decode(encode(values, scales, None, False), scales, False) > 0).all()


def test_a_block_of_zeros_stays_zero():
    for signed in (True, False):
        values, scales = torch.zeros(130), torch.zeros(2)
        assert not decode(encode(values, scales, None, signed), scales, signed).any()


@pytest.mark.parametrize("signed", [True, False])
def test_codes_have_no_bias(signed):
    values = torch.linspace(0.001, 1, 128) * (torch.tensor([1.0, -1.0]).repeat(64) if signed else 1)
    scales, total, steps = scales_of(values, signed), 0.0, 3000
    for step in range(steps):
        noise = Noise([values], [values], float(step_seed(1, step)))
        bits = noise.bits(0, dropped_bits(signed))[0]
        total = total + decode(encode(values, scales, bits, signed), scales, signed)
    step_size = values.abs() / (8 if signed else 16)
    assert ((total / steps - values).abs() <= 4 * 0.5 * step_size / steps**0.5 + 1e-6).all()


def test_master_weights_notice_that_somebody_wrote_to_a_parameter():
    kept, master = [torch.tensor([1.0, 2.0], dtype=torch.bfloat16)], [torch.tensor([1.001, 7.0])]
    assert MasterWeights().load(kept, (master,), torch.float32)[0].tolist() == pytest.approx([1.001, 2.0])


def test_a_compensation_keeps_what_rounding_loses():
    kept, lost = [torch.tensor([1.0], dtype=torch.bfloat16)], [torch.zeros(1, dtype=torch.bfloat16)]
    for step in range(1000):
        noise = Noise([torch.ones(1)], [kept[0]], float(step_seed(0, step)))
        loaded = Compensated().load(kept, (lost,), torch.float32)
        loaded += 1e-5
        Compensated().store(kept, (lost,), loaded, noise, 0)
    assert (kept[0].double() + lost[0].double()).item() == pytest.approx(1.01, abs=5e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_compensation_is_not_used_after_somebody_wrote_to_the_parameter(dtype):
    limits = torch.tensor([math.inf, -math.inf, math.nan, 3.4e38, 65520.0])
    values = torch.cat([torch.randn(2000, generator=torch.Generator().manual_seed(0)).exp(), limits])
    kept, lost = [values.to(dtype)], [torch.zeros(len(values), dtype=dtype)]
    for random in (None, Noise([values], [kept[0]], float(step_seed(0, 1)))):
        Compensated().store(kept, (lost,), Tensors([values.clone()]), random, 0)
        (loaded,) = Compensated().load(kept, (lost,), torch.float32)
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(loaded[:2000], values[:2000], rtol=2 * unit**2, atol=0, msg="all are used")
        assert torch.equal(loaded[2000:].isfinite(), kept[0][2000:].isfinite())
        for written in (0.0, 3.0e-3, 1e4):
            kept[0].fill_(written)
            (loaded,) = Compensated().load(kept, (lost,), torch.float32)
            assert ((loaded - kept[0]).abs() <= max(2 * unit * written, 2.0**-24)).all()
        kept[0].copy_(values)


def test_interpolation_uses_the_exact_weight_unless_somebody_wrote_to_it():
    param, target = torch.full((2,), 100.0, dtype=torch.bfloat16), torch.zeros(2)
    param[1] = 0.0
    for companion, exact in ((torch.full((2,), -0.2).bfloat16(), 99.8), (torch.full((2,), 99.8), 99.8)):
        key = "master" if companion.dtype == torch.float32 else "compensation"
        weights = param.clone()
        values = {"z": target, key: companion}
        move_towards("z", [weights], {weights: values}, 0.5)
        whole = values[key].float() + (weights.float() if key == "compensation" else 0)
        assert whole.tolist() == pytest.approx([exact / 2, 0.0], abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_to_nearest_is_that_of_a_conversion(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20000, generator=generator) * torch.randn(20000, generator=generator).exp()
    limits = torch.tensor([0.0, -0.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 2.0**-24, 6e-8, 65504.0, math.inf])
    values = torch.cat([values, limits, -limits])
    assert torch.equal(round_to(dtype, values), values.to(dtype).float())


NAN_BITS = (0x7FFFFFFF, -1, 0x7FC00000, 0x7FFF8000, -(1 << 22), 0x7FC00001)
"""NaN as arithmetic makes them: of CUDA, the same negated, of CPUs, and with other payloads."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [None, 0, 1, 0x1234, 0xFFFF])
def test_what_is_not_finite_stays_so(dtype, bits):
    drawn = None if bits is None else torch.tensor(bits, dtype=torch.int32)
    nan = torch.tensor(NAN_BITS, dtype=torch.int32).view(torch.float32)
    assert round_to(dtype, nan, drawn).isnan().all()
    infinite = torch.tensor([math.inf, -math.inf])
    assert torch.equal(round_to(dtype, infinite, drawn), infinite)
