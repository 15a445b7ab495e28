"""``compiled_optim.npu``: scripts written for torch_npu, with one import line changed."""

from __future__ import annotations

import inspect

import pytest
import torch

import compiled_optim as co
from compiled_optim import npu
from tests.helpers import assert_close, copies, gradients, parameters, run_python

NAMES = [name for name in npu.__all__ if name != "NpuFusedOptimizer"]

# the constructor calls of torch_npu's documentation
EXAMPLES = {
    "NpuFusedSGD": dict(lr=0.01, momentum=0.9, weight_decay=0.001),
    "NpuFusedAdamW": dict(eps=1e-8, betas=(0.9, 0.999), lr=2e-3, weight_decay=0.05),
    "NpuFusedAdamP": dict(eps=1e-5, betas=(0.9, 0.999), lr=2e-3, weight_decay=0.05),
    "NpuFusedLamb": dict(lr=0.01, eps=1e-5),
    "NpuFusedBertAdam": dict(lr=0.01, warmup=0.1, t_total=20, max_grad_norm=-1),
}

# and the rest of them: mixed float32 and float16, the last parameter without a gradient
EXAMPLE = """
import torch
from compiled_optim.npu import {name}

def create_params_and_grads(device):
    shapes = [(2, 3), (4, 3), (2, 3), (4, 3), (5, 3), (6, 3), (2, 3)]
    halves = (2, 3, 5)
    params = []
    for i, shape in enumerate(shapes):
        values = torch.arange(shape[0] * shape[1]).reshape(shape)
        params.append((values.half() if i in halves else values.float()).to(device))
    for p in params[:-1]:
        p.requires_grad = True
        p.grad = p.clone().detach() / 100.
    return params

params = create_params_and_grads("{device}")
fused_opt = {name}(params, compile={compile}, **{options})
with torch.no_grad():
    fused_opt.step()
results = [p.detach().cpu() for p in params]
"""


def example(name, device, compiled):
    return EXAMPLE.format(name=name, device=device, compile=compiled, options=EXAMPLES[name])


def expected(name):
    """Return the result of the same step by the plain optimizer, which test_rules.py tests, on float64 copies."""
    namespace: dict[str, object] = {}
    exec(EXAMPLE.split("params = create")[0].format(name=name), namespace)
    params = [p.detach().double() for p in namespace["create_params_and_grads"]("cpu")]
    for p in params[:-1]:
        p.grad = p / 100.0
    getattr(co, name.removeprefix("NpuFused"))(params, **EXAMPLES[name], compile=False).step()
    return params


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_on_the_cpu(name, compiled):
    namespace: dict[str, object] = {}
    exec(example(name, "cpu", compiled), namespace)
    for result, reference in zip(namespace["results"], expected(name), strict=True):
        torch.testing.assert_close(result.double(), reference, rtol=1e-3, atol=1e-6)
    assert torch.equal(namespace["results"][-1], torch.arange(6.0).reshape(2, 3)), "no gradient, no step"


def test_examples_on_an_npu_device(tmp_path):
    """Tensors of device type npu in CPU memory: eager steps run there, and compile=True says what is missing."""
    code = ["import torch", "from tests import npu_device", "npu_device.install()"]
    for name in EXAMPLES:
        code += [
            example(name, "npu", False),
            f"torch.save(results, {str(tmp_path / name)!r})",
            "assert params[0].device.type == 'npu'",
            "assert all(v.device.type == 'npu' for k, v in fused_opt.state[params[0]].items() if k != 'step')",
        ]
    code += [
        "from compiled_optim import BackendUnavailableError",
        "try:",
        "    NpuFusedBertAdam(params)",
        "except BackendUnavailableError as error:",
        "    print(error)",
    ]
    message = run_python("\n".join(code))
    assert "torch_npu is not installed" in message
    assert "compile=False" in message
    for name in EXAMPLES:
        for result, reference in zip(torch.load(tmp_path / name), expected(name), strict=True):
            torch.testing.assert_close(result.double(), reference, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_same_arguments_and_units_as_the_plain_optimizer(name):
    fused, plain = getattr(npu, name), getattr(co, name.removeprefix("NpuFused"))
    assert issubclass(fused, plain)
    ours, theirs = (list(inspect.signature(cls).parameters.values()) for cls in (fused, plain))
    assert [p.name for p in ours] == [p.name for p in theirs]
    if name != "NpuFusedSGD":
        assert [p.default for p in ours] == [p.default for p in theirs]
    params = parameters([(2, 3)])
    assert fused(params, lr=0.1).program({**fused(params, lr=0.1).param_groups[0]}) == plain(params, lr=0.1).program(
        plain(params, lr=0.1).param_groups[0]
    )


def test_the_nine_optimizers_of_torch_npu_are_there():
    assert len(NAMES) == 9


def test_sgd_requires_lr():
    with pytest.raises(TypeError, match="lr"):
        npu.NpuFusedSGD(parameters([(2,)]))


@pytest.mark.parametrize("norm_type", [2, 1, float("inf")])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_grad_norm_fused(norm_type, max_norm):
    params = parameters([(3, 4), (5,)])
    twins = copies(params)
    optimizer = npu.NpuFusedAdamW(params, compile=False)
    assert optimizer.clip_grad_norm_fused_(1.0) == 0, "no gradients yet"
    for param, twin, grad in zip(params, twins, next(gradients(params, 1)), strict=True):
        param.grad, twin.grad = grad.clone(), grad.clone()
    norm = optimizer.clip_grad_norm_fused_(max_norm, norm_type)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(twins, max_norm, norm_type))
    assert_close([p.grad for p in params], [p.grad for p in twins], 1e-6)


def test_clip_grad_norm_fused_does_not_overflow_in_float16():
    param = torch.nn.Parameter(torch.zeros(4000, dtype=torch.float16))
    optimizer = npu.NpuFusedSGD([param], lr=0.1, compile=False)
    param.grad = torch.full_like(param, 100.0)
    assert optimizer.clip_grad_norm_fused_(1.0).item() == pytest.approx(100 * 4000**0.5, rel=1e-3)
    assert param.grad.float().norm().item() == pytest.approx(1.0, rel=1e-2)


def test_what_the_grad_scaler_of_torch_npu_does():
    """The scaler unscales each tensor of grads_all_group_combined in place, float16 tensors too."""
    params = parameters([(3,)]) + parameters([(4,)], torch.float16) + parameters([(2,)])
    optimizer = npu.NpuFusedLamb(params, compile=False)
    params[0].grad, params[1].grad = torch.full((3,), 8.0), torch.full((4,), 8.0, dtype=torch.float16)
    assert optimizer.is_fused_optimizer
    if not optimizer.is_params_grads_combined:
        optimizer._maybe_init_combined_params_and_grads()
    for grad in optimizer.grads_all_group_combined:
        grad.mul_(0.125)
    assert [p.grad[0].item() for p in params[:2]] == [1.0, 1.0]


def test_zero_grad_zeroes_by_default_and_sets_to_none_on_request():
    params = parameters([(3,)])
    optimizer = npu.NpuFusedAdam(params, compile=False)
    params[0].grad = torch.ones(3)
    optimizer.zero_grad()
    assert torch.equal(params[0].grad, torch.zeros(3))
    optimizer.zero_grad(set_to_none=True)
    assert params[0].grad is None
