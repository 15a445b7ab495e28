"""Cases in which torch_npu's fused optimizers fail, each compared with torch.optim."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch

import compiled_optim as co
from tests.helpers import SMALL, assert_close, copies, gradients, parameters, train

OPTIMIZERS = {
    "SGD": dict(lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "Adam": dict(lr=0.1, weight_decay=0.01),
    "AdamW": dict(lr=0.1, amsgrad=True),
}


class Pair:
    """One of our optimizers and torch's, stepped side by side."""

    def __init__(self, name, params, compiled=True, groups=None, **options):
        self.ours, self.theirs = params, copies(params)
        options = {**OPTIMIZERS[name], **options}
        split = groups or (lambda ps: ps)
        self.optimizer = getattr(co, name)(split(self.ours), **options, compile=compiled)
        self.reference = getattr(torch.optim, name)(split(self.theirs), **options)

    def step(self, grads):
        for param, twin, grad in zip(self.ours, self.theirs, grads, strict=True):
            param.grad = grad
            twin.grad = None if grad is None else grad.clone()
        self.optimizer.step()
        self.reference.step()

    def steps(self, count=3, seed=1, mask=lambda step, i: True):
        for step, grads in enumerate(gradients(self.ours, count, seed)):
            self.step([grad if mask(step, i) else None for i, grad in enumerate(grads)])

    def agree(self, tolerance=2e-6):
        assert_close(self.ours, self.theirs, tolerance)


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


def test_gradient_that_appears_later(name, compiled):
    pair = Pair(name, parameters(SMALL), compiled)
    pair.steps(6, mask=lambda step, i: i != 1 or step >= 3)
    pair.agree()


def test_gradient_that_goes_away_leaves_parameter_and_step_alone(name, compiled):
    pair = Pair(name, parameters(SMALL), compiled)
    pair.steps(6, mask=lambda step, i: i != 1 or step < 3)
    pair.agree()
    if name != "SGD":
        assert [int(pair.optimizer.state[p]["step"]) for p in pair.ours] == [6, 3, 6, 6, 6, 6, 6]


def test_no_gradients_at_all(name, compiled):
    params = parameters(SMALL)
    optimizer = getattr(co, name)(params, **OPTIMIZERS[name], compile=compiled)
    assert optimizer.step() is None
    assert_close(params, parameters(SMALL), 0)
    assert not optimizer.state


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(name, compiled, set_to_none):
    pair = Pair(name, parameters(SMALL), compiled)
    pair.steps(2)
    for optimizer in (pair.optimizer, pair.reference):
        optimizer.zero_grad(set_to_none)
        optimizer.step()
    assert all((p.grad is None) == set_to_none for p in pair.ours)
    pair.agree()


def test_add_param_group_after_steps(name, compiled):
    pair = Pair(name, parameters(SMALL), compiled)
    pair.steps(3)
    for optimizer, params in ((pair.optimizer, pair.ours), (pair.reference, pair.theirs)):
        params += parameters([(6,), (2, 2)], seed=5)
        optimizer.add_param_group({"params": params[-2:], "lr": 0.05})
    pair.steps(3, seed=2)
    pair.agree()


def test_groups_with_their_own_hyperparameters(name, compiled):
    def groups(params):
        return [{"params": params[::2], "lr": 0.01}, {"params": params[1::2], "weight_decay": 0.3, "maximize": True}]

    pair = Pair(name, parameters(SMALL), compiled, groups=groups)
    pair.steps(4)
    pair.agree()


def test_lr_tensor_changed_in_place(name, compiled):
    pair = Pair(name, parameters(SMALL), compiled, lr=torch.tensor(0.1))
    for seed in range(4):
        pair.steps(1, seed=seed)
        for optimizer in (pair.optimizer, pair.reference):
            optimizer.param_groups[0]["lr"].mul_(0.5)
    pair.agree()


def test_tensor_betas(compiled):
    pair = Pair("AdamW", parameters(SMALL), compiled, betas=(torch.tensor(0.8), torch.tensor(0.95)))
    pair.steps(3)
    pair.agree()


def test_closure_runs_with_grad_and_its_loss_is_returned(name, compiled):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = getattr(co, name)([param], **OPTIMIZERS[name], compile=compiled)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() == 3.0
    assert (param < 1).all()


def test_autograd_notices_that_parameters_changed(name, compiled):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = getattr(co, name)([weight], **OPTIMIZERS[name], compile=compiled)
    loss = (weight * weight).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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
        # a pending conjugation: memory and values differ
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


def test_gradient_with_a_pending_negation(name, compiled):
    pair = Pair(name, parameters([(5,)]), compiled)
    grad = torch.randn(5, dtype=torch.complex64).conj().imag
    assert grad.is_neg()
    pair.step([grad])
    pair.agree()


def test_gradients_are_never_written(name, compiled):
    params = parameters(SMALL)
    optimizer = getattr(co, name)(params, **OPTIMIZERS[name], maximize=True, max_grad_norm=0.1, compile=compiled)
    for grads in gradients(params, 2):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        assert all(torch.equal(param.grad, grad) for param, grad in zip(params, grads, strict=True))


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


def continue_both(optimizer, params, other, other_params, steps=3):
    for opt, ps in ((optimizer, params), (other, other_params)):
        for grads in gradients(ps, steps, seed=9):
            for param, grad in zip(ps, grads, strict=True):
                param.grad = grad
            opt.step()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_by_themselves(name, compiled, how):
    params = parameters(SMALL)
    optimizer = train(
        lambda p: getattr(co, name)(p, **OPTIMIZERS[name], compile=compiled, on_realloc="raise"), params, 3
    )
    clone = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    clone_params = clone.param_groups[0]["params"]
    assert clone.on_realloc == "raise"
    assert clone.compile == compiled
    continue_both(optimizer, params, clone, clone_params)
    assert_close(clone_params, params, 0)
    assert all(a is not b for a, b in zip(params, clone_params, strict=True))


def test_state_of_another_layout_is_fitted(compiled):
    pair = Pair("AdamW", [torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))], compiled)
    pair.steps(2)
    checkpoint = pair.optimizer.state_dict()
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        checkpoint["state"][0][key] = checkpoint["state"][0][key].contiguous()
    pair.optimizer.load_state_dict(checkpoint)
    pair.steps(2, seed=3)
    pair.agree()


def test_replaced_and_edited_states_are_used(compiled):
    pair = Pair("AdamW", parameters([(5,), (3, 2)]), compiled)
    pair.steps(2)
    for optimizer, params in ((pair.optimizer, pair.ours), (pair.reference, pair.theirs)):
        optimizer.state[params[0]]["exp_avg"] = torch.full((5,), 0.25)
        optimizer.state[params[1]]["exp_avg_sq"].data = torch.full((3, 2), 0.5)
        optimizer.state[params[0]]["step"] = torch.tensor(7.0)
        optimizer.state[params[1]]["step"] = torch.tensor(7.0)
    pair.steps(1)
    pair.agree()
    for optimizer, params in ((pair.optimizer, pair.ours), (pair.reference, pair.theirs)):
        for param in params:
            optimizer.state[param]["step"] = torch.tensor(11.0)
    pair.steps(1)
    pair.agree()


def test_step_counter_edited_in_place_is_honoured(compiled):
    pair = Pair("AdamW", parameters([(5,)]), compiled)
    pair.steps(2)
    for optimizer, params in ((pair.optimizer, pair.ours), (pair.reference, pair.theirs)):
        optimizer.state[params[0]]["step"].fill_(50)
    pair.steps(2)
    pair.agree()
    assert int(pair.optimizer.state[pair.ours[0]]["step"]) == 52


def test_state_dict_step_tensors_are_not_shared(compiled):
    optimizer = train(lambda p: co.AdamW(p, compile=compiled), parameters(SMALL), 2)
    steps = [state["step"] for state in optimizer.state_dict()["state"].values()]
    assert len({step.data_ptr() for step in steps}) == len(steps)


def test_torch_switches_are_accepted_without_effect(name, compiled):
    pair = Pair(name, parameters(SMALL), compiled)
    switched = getattr(co, name)(
        copies(pair.ours), **OPTIMIZERS[name], foreach=True, fused=True, capturable=True, compile=compiled
    )
    params = switched.param_groups[0]["params"]
    for grads in gradients(params, 3):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        switched.step()
        switched.zero_grad(set_to_none=False)
    pair.steps(3)
    assert_close(params, pair.ours, 0)
    with pytest.raises(NotImplementedError, match=r"use torch\.optim"):
        getattr(co, name)(params, differentiable=True)


def test_changed_options_change_the_formula(compiled):
    """Momentum switched on, weight decay switched on, amsgrad switched on, in the middle of training."""
    pair = Pair("SGD", parameters(SMALL), compiled, momentum=0, dampening=0, weight_decay=0)
    pair.steps(2)
    for change in ({"momentum": 0.9}, {"weight_decay": 0.1}, {"nesterov": True}, {"maximize": True}):
        for optimizer in (pair.optimizer, pair.reference):
            optimizer.param_groups[0].update(change)
        pair.steps(2)
    pair.agree()


def test_runs_inside_other_contexts(compiled):
    """Autocast, inference mode, a default dtype and device of the user's: none of them leaks into the step."""
    pair = Pair("AdamW", parameters(SMALL), compiled)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            pair.optimizer.step()
            for params in (pair.ours, pair.theirs):
                for param in params:
                    param.grad = torch.ones_like(param)
            pair.optimizer.step()
            pair.reference.step()
    finally:
        torch.set_default_dtype(torch.float32)
    pair.agree()


def test_no_warnings(name, compiled):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch's own compiler stack uses deprecated parts of torch
        warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
        train(lambda p: getattr(co, name)(p, **OPTIMIZERS[name], compile=compiled), parameters(SMALL), 2)
