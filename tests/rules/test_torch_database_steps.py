"""torch's optimizer database: with every configuration, a step gives the same result as in torch.optim."""

import copy
import itertools

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.testing._internal.common_device_type import instantiate_device_type_tests

from .torch_database import (
    SWITCHES,
    DatabaseTestCase,
    compiled_and_eager,
    configurations,
    ours,
    parameters,
    problem,
    run,
    states,
    theirs,
)


class TestSteps(DatabaseTestCase):
    @compiled_and_eager
    def test_every_configuration_matches_torch(self, device, dtype, optim_info, compile):
        for kwargs in configurations(optim_info):
            pair = parameters(dtype), parameters(dtype)
            optimizer = ours(optim_info, pair[0], compile, **kwargs)
            twin = theirs(optim_info, pair[1], **kwargs)
            for start in range(0, 20, 5):
                run(optimizer, pair[0], range(start, start + 5))
                run(twin, pair[1], range(start, start + 5))
                # the parameter of one element comes close to zero, but its rounding errors do not
                self.assert_parity(*pair, scale=0.1)
            self.assert_parity(states(optimizer, pair[0]), states(twin, pair[1]))
            assert optimizer.explain().mode == ("compiled" if compile else "eager")

    @compiled_and_eager
    def test_switches_make_no_difference(self, device, dtype, optim_info, compile):
        combinations = ({"foreach": True}, {"fused": True}, {"capturable": True}, {"foreach": False, "fused": False})
        for kwargs, switches in itertools.product(configurations(optim_info), combinations):
            plain = {name: value for name, value in kwargs.items() if name not in SWITCHES}
            pair = parameters(dtype), parameters(dtype)
            switched = ours(optim_info, pair[0], compile, **{**kwargs, **switches})
            run(switched, pair[0], range(3))
            run(ours(optim_info, pair[1], compile, **plain), pair[1], range(3))
            self.assert_same(*pair)
            # the values are saved, so that torch.optim finds them in a checkpoint
            assert switches.items() <= switched.state_dict()["param_groups"][0].items()
            switched.zero_grad(set_to_none=False)
            assert all((param.grad == 0).all() for param in pair[0])

    @compiled_and_eager
    def test_learning_goes_in_the_right_direction(self, device, dtype, optim_info, compile):
        cases = ((False, ()), (True, ()), *((True, schedule) for schedule in optim_info.scheduler_inputs))
        for kwargs, (contiguous, schedule) in itertools.product(configurations(optim_info), cases):
            params, closure = problem(dtype, contiguous)
            optimizer = ours(optim_info, params, compile, **kwargs)
            schedulers = [scheduler(optimizer) for scheduler in schedule]
            losses = []
            for _ in range(20):
                losses.append(optimizer.step(closure).item())
                for scheduler in schedulers:
                    scheduler.step(*[losses[-1]] if isinstance(scheduler, ReduceLROnPlateau) else [])
            last = closure().item()
            assert last > losses[0] if kwargs.get("maximize") else last < losses[0]

    @compiled_and_eager
    def test_closure(self, device, dtype, optim_info, compile):
        for kwargs in configurations(optim_info):
            params, closure = problem(dtype)
            twin_params, twin_closure = problem(dtype)
            optimizer, twin = ours(optim_info, params, compile, **kwargs), theirs(optim_info, twin_params, **kwargs)
            seen = []

            def watched(closure=closure, seen=seen):
                seen.append(torch.is_grad_enabled())
                return closure()

            # the closure runs with gradients enabled, and no_grad is in effect again after the step
            with torch.no_grad():
                loss = optimizer.step(watched)
                assert not torch.is_grad_enabled()
            assert seen == [True]
            self.assert_same(loss, twin.step(twin_closure))
            self.assert_parity(params, twin_params)
            assert optimizer.step(lambda: "loss") == "loss"
            assert optimizer.step() is None

    @compiled_and_eager
    def test_autograd_sees_that_a_step_changed_the_parameters(self, device, dtype, optim_info, compile):
        (param,) = parameters(dtype, ((3,),))
        loss = (param * param).sum()
        run(ours(optim_info, [param], compile), [param], range(1))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    @compiled_and_eager
    def test_step_without_gradients_is_no_op(self, device, dtype, optim_info, compile):
        for kwargs in configurations(optim_info):
            params = parameters(dtype)
            before = copy.deepcopy(params)
            optimizer = ours(optim_info, params, compile, **kwargs)
            for _ in range(2):
                assert optimizer.step() is None
            self.assert_same(params, before)
            assert optimizer.state_dict()["state"] == {}
            # the same after some steps: parameters, states and step counts do not change
            run(optimizer, params, range(2))
            optimizer.zero_grad()
            before = copy.deepcopy((params, states(optimizer, params)))
            optimizer.step()
            self.assert_same((params, states(optimizer, params)), before)

    @compiled_and_eager
    def test_gradients_that_come_and_go_match_torch(self, device, dtype, optim_info, compile):
        for kwargs in configurations(optim_info):
            pair = parameters(dtype), parameters(dtype)
            optimizer, twin = ours(optim_info, pair[0], compile, **kwargs), theirs(optim_info, pair[1], **kwargs)
            for step, places in enumerate(([0], [1], [0, 1], [1, 2], [0, 1, 2])):
                for opt, params in ((optimizer, pair[0]), (twin, pair[1])):
                    opt.zero_grad()
                    run(opt, [params[i] for i in places], [step])
                self.assert_parity(*pair)
            self.assert_parity(states(optimizer, pair[0]), states(twin, pair[1]))

    @compiled_and_eager
    def test_step_with_zero_gradients(self, device, dtype, optim_info, compile):
        for kwargs in configurations(optim_info):
            pair = parameters(dtype), parameters(dtype)
            before = copy.deepcopy(pair[0])
            optimizer, twin = ours(optim_info, pair[0], compile, **kwargs), theirs(optim_info, pair[1], **kwargs)
            for param in (*pair[0], *pair[1]):
                param.grad = torch.zeros_like(param)
            for _ in range(2):
                optimizer.step()
                twin.step()
            self.assert_parity(*pair)
            self.assert_parity(states(optimizer, pair[0]), states(twin, pair[1]))
            if not any(optimizer.defaults.get(name) for name in ("weight_decay", "lambd")):
                self.assert_same(pair[0], before)

    @compiled_and_eager
    def test_grad_scaler_skips_steps_as_with_torch(self, device, dtype, optim_info, compile):
        for fused in (False, True):
            pair = parameters(dtype), parameters(dtype)
            optimizers = ours(optim_info, pair[0], compile, fused=fused), theirs(optim_info, pair[1])
            for params, optimizer in zip(pair, optimizers, strict=True):
                scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
                for step in range(4):
                    optimizer.zero_grad()
                    factor = float("inf") if step == 2 else 1.0
                    scaler.scale(sum((param * param).sum() for param in params) * factor).backward()
                    scaler.step(optimizer)
                    scaler.update()
                assert scaler.get_scale() == 4.0
            assert all(param.isfinite().all() for param in pair[0])
            self.assert_parity(*pair)


instantiate_device_type_tests(TestSteps, globals(), only_for=("cpu",))
