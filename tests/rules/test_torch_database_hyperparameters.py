"""torch's optimizer database: parameter groups, hyperparameters that change, schedulers, and a tensor as lr."""

import copy
import itertools

import pytest
import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests

from .torch_database import (
    DatabaseTestCase,
    both,
    compiled_and_eager,
    configurations,
    ours,
    parameters,
    run,
    states,
    theirs,
)

# hyperparameters of one optimizer, to be changed between steps
OWN = {
    "SGD": {"momentum": 0.5, "weight_decay": 0.2},
    "Adam": {"betas": (0.8, 0.9), "eps": 1e-3},
    "AdamW": {"betas": (0.8, 0.9), "eps": 1e-3},
    "Adadelta": {"rho": 0.5, "eps": 1e-3},
    "RMSprop": {"alpha": 0.9, "eps": 1e-3},
    "Adamax": {"betas": (0.8, 0.9), "eps": 1e-3},
    "Adagrad": {"lr_decay": 0.1, "eps": 1e-3},
    "Adafactor": {"beta2_decay": -0.5, "eps": (1e-3, 1e-2), "d": 2.0},
    "RAdam": {"betas": (0.8, 0.9), "decoupled_weight_decay": True},
    "Rprop": {"etas": (0.3, 1.7), "step_sizes": (1e-3, 0.1)},
    "NAdam": {"betas": (0.8, 0.9), "momentum_decay": 0.1, "decoupled_weight_decay": True},
    "ASGD": {"lambd": 0.1, "alpha": 0.5, "t0": 3.0},
}


def known(info, values):
    """Return the values of hyperparameters that an optimizer has. Rprop has no weight decay."""
    return {name: value for name, value in values.items() if info.name != "Rprop" or name != "weight_decay"}


class TestHyperparameters(DatabaseTestCase):
    @compiled_and_eager
    def test_schedulers_match_torch(self, device, dtype, optim_info, compile):
        for schedule, lr in itertools.product(optim_info.scheduler_inputs, (0.05, torch.tensor(0.05))):
            pair = parameters(dtype), parameters(dtype)
            rates = []
            for params, make in zip(pair, both(optim_info, compile), strict=True):
                optimizer = make([{"params": params[:1], "lr": copy.deepcopy(lr)}, {"params": params[1:]}])
                run(optimizer, params, range(20), [scheduler(optimizer) for scheduler in schedule])
                rates.append([group["lr"] for group in optimizer.param_groups])
            self.assert_same(*rates)
            self.assert_parity(*pair)

    @compiled_and_eager
    def test_tensor_lr(self, device, dtype, optim_info, compile):
        for kwargs, shape in itertools.product(configurations(optim_info), ((), (1,), (1, 1))):
            lr = torch.full(shape, 0.01)
            pair, twin_params = (parameters(dtype), parameters(dtype)), parameters(dtype)
            by_tensor = optim_info.optim_cls(pair[0], compile=compile, **{**kwargs, "lr": lr})
            by_number = ours(optim_info, pair[1], compile, **{**kwargs, "lr": lr.item()})
            twin = theirs(optim_info, twin_params, **{**kwargs, "lr": lr.item()})
            for steps in (range(3), range(3, 6)):
                run(by_tensor, pair[0], steps)
                run(by_number, pair[1], steps)
                run(twin, twin_params, steps)
                self.assert_same(*pair)
                self.assert_parity(pair[0], twin_params)
                # the optimizer keeps the tensor of the user and never writes to it; the next step uses its new value
                assert by_tensor.param_groups[0]["lr"] is lr
                lr.mul_(0.5)
                by_number.param_groups[0]["lr"] = twin.param_groups[0]["lr"] = lr.item()
            self.assert_same(lr, torch.full(shape, 0.01).mul_(0.5).mul_(0.5))

    @compiled_and_eager
    def test_param_groups(self, device, dtype, optim_info, compile):
        own_values = ({"lr": 0.05}, {"weight_decay": 0.3}, {"lr": 0.05, "weight_decay": 0.0})
        defaults = ({}, {"lr": 0.02}, {"lr": 0.02, "weight_decay": 0.1})
        for own, kwargs in itertools.product(own_values, defaults):
            own, kwargs = known(optim_info, own), known(optim_info, kwargs)
            pair = parameters(dtype), parameters(dtype)
            optimizers = []
            for params, make in zip(pair, both(optim_info, compile), strict=True):
                # params[2] has a gradient, but is in no group
                optimizers.append(make([{"params": params[0], **own}, {"params": [params[1], params[3]]}], **kwargs))
                run(optimizers[-1], params, range(10))
            self.assert_parity(*pair)
            self.assert_same(pair[0][2], parameters(dtype)[2])
            for name in known(optim_info, {"lr": None, "weight_decay": None}):
                first, second = ([group[name] for group in optimizer.param_groups] for optimizer in optimizers)
                assert first == second
                assert first[0] == own.get(name, second[1])

    @compiled_and_eager
    def test_group_values_changed_between_steps(self, device, dtype, optim_info, compile):
        changes = (
            {"lr": 0.05},
            {"weight_decay": 0.1},
            {"maximize": True},
            {"weight_decay": 0.0, "maximize": False},
            OWN[optim_info.name],
        )
        pair = parameters(dtype), parameters(dtype)
        optimizers = [make(params) for make, params in zip(both(optim_info, compile), pair, strict=True)]
        for number, change in enumerate(changes):
            for optimizer, params in zip(optimizers, pair, strict=True):
                optimizer.param_groups[0].update(known(optim_info, change))
                run(optimizer, params, range(3 * number, 3 * number + 3))
            # the parameter of one element comes close to zero, but its rounding errors do not
            self.assert_parity(*pair, scale=0.1)

    @compiled_and_eager
    def test_add_param_group_between_steps(self, device, dtype, optim_info, compile):
        pair = parameters(dtype), parameters(dtype)
        optimizer, twin = ours(optim_info, pair[0][:1], compile), theirs(optim_info, pair[1][:1])
        for opt, params in ((optimizer, pair[0]), (twin, pair[1])):
            run(opt, params, range(3))
            opt.add_param_group({"params": params[1], "lr": 0.05})
            run(opt, params, range(3, 6))
            opt.add_param_group({"params": params[2:]})
            run(opt, params, range(6, 9))
        self.assert_parity(*pair)
        self.assert_parity(states(optimizer, pair[0]), states(twin, pair[1]))
        with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
            optimizer.add_param_group({"params": pair[0][0]})
        with pytest.raises(TypeError, match="param_group must be a dict"):
            optimizer.add_param_group([parameters()[0]])
        assert len(optimizer.param_groups) == 3


instantiate_device_type_tests(TestHyperparameters, globals(), only_for=("cpu",))
