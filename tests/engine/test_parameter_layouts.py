"""Tests of parameters of every dtype, shape and memory layout, and of parameters that share memory.

These are cases in which torch_npu's fused optimizers fail. Each is compared with torch.optim.
"""

from __future__ import annotations

import pytest
import torch

import compiled_optim as co
from tests.helpers import assert_close, parameters, train

from .pairs import OPTIMIZERS, Pair


@pytest.fixture(params=OPTIMIZERS)
def name(request):
    return request.param


def test_mixed_dtypes_in_one_group(name, compiled):
    params = [p for dtype in (torch.float32, torch.float64, torch.bfloat16) for p in parameters([(4, 3), (5,)], dtype)]
    pair = Pair(name, params, compiled)
    pair.steps(5)
    assert_close(pair.ours[:2], pair.theirs[:2], 2e-6)
    assert_close(pair.ours[2:4], pair.theirs[2:4], 1e-12)
    assert_close(pair.ours[4:], pair.theirs[4:], 2e-2)
    assert pair.optimizer.state[pair.ours[4]]["momentum_buffer" if name == "SGD" else "exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (1, 1, 1)], ids=str)
def test_tiny_parameters(name, compiled, shape):
    pair = Pair(name, parameters([shape]), compiled)
    pair.steps(4)
    pair.agree()
    assert pair.ours[0].shape == shape


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_parameters(name, compiled, dtype):
    params = [torch.nn.Parameter(torch.complex(*parameters([(3, 2), (3, 2)])).to(dtype)), *parameters([(4,)])]
    pair = Pair(name, params, compiled)
    for seed in range(4):
        grads = [torch.randn_like(p, requires_grad=False) for p in map(torch.Tensor.detach, pair.ours)]
        # conjugate bit: memory and values differ
        pair.step([grads[0].conj() if seed % 2 else grads[0], grads[1]])
    pair.agree(1e-6)


def strided_parameters():
    base = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    return {
        "transposed": base.clone().t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "columns": base.clone()[:, ::2],
        "rows": base.clone()[1::2],
        "permuted slice": torch.randn(4, 5, 6).permute(2, 0, 1)[::2],
        "offset": base.clone().view(-1)[3:20],
    }


@pytest.mark.parametrize("kind", strided_parameters())
@pytest.mark.parametrize("grad_kind", ["same", "contiguous", "transposed", "expanded"])
def test_layouts_of_parameters_and_gradients(name, compiled, kind, grad_kind):
    param = torch.nn.Parameter(strided_parameters()[kind].detach())
    strides = param.stride()
    pair = Pair(name, [param], compiled)
    pair.theirs[0].data = torch.empty_strided(param.shape, param.stride()).copy_(param.detach())
    for seed in range(3):
        values = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
        grad = {
            "same": torch.empty_strided(param.shape, param.stride()).copy_(values),
            "contiguous": values,
            "transposed": values.transpose(0, -1).contiguous().transpose(0, -1),
            "expanded": values.flatten()[:1].expand(param.shape),
        }[grad_kind]
        pair.step([grad])
    pair.agree()
    assert param.stride() == strides


def test_parameters_that_share_memory_are_updated_in_turn(name, compiled):
    def shared():
        base = torch.randn(40, generator=torch.Generator().manual_seed(0))
        return [torch.nn.Parameter(base[:20]), torch.nn.Parameter(base[10:30]), torch.nn.Parameter(base[30:])]

    ours, theirs = shared(), shared()
    train(lambda p: getattr(co, name)(p, **OPTIMIZERS[name], compile=compiled), ours, steps=4)
    train(lambda p: getattr(torch.optim, name)(p, **OPTIMIZERS[name], foreach=False), theirs, steps=4)
    assert_close(ours, theirs, 2e-6)


def test_parameter_listed_twice_warns_and_is_stepped_once(name, compiled):
    param, twin = parameters([(3,)]) + parameters([(3,)])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        twice = getattr(co, name)([param, param], **OPTIMIZERS[name], compile=compiled)
    once = getattr(torch.optim, name)([twin], **OPTIMIZERS[name])
    for optimizer, p in ((twice, param), (once, twin)):
        p.grad = torch.ones(3)
        optimizer.step()
    assert_close([param], [twin], 2e-6)
    with pytest.raises(ValueError, match="more than one parameter group"):
        getattr(co, name)([{"params": [param]}, {"params": [param]}])


def test_empty_parameters_with_an_offset(compiled):
    """Their storage has no bytes, and they need none."""
    empty = torch.nn.Parameter(torch.randn(3, 0)[1:])
    empty.grad = torch.zeros(2, 0)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    co.SGD([empty, weight], lr=0.5, compile=compiled).step()
    assert weight.tolist() == [0.5, 0.5]
