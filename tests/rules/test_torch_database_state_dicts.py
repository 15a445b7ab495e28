"""torch's optimizer database: state dicts continue a run, here and in torch.optim, and from older versions."""

import copy
import itertools

import pytest
import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import parametrize

from .torch_database import (
    STATE_DICT_ROUTES,
    STATEFUL,
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

# flags that older versions of torch.optim did not have, in addition to those in the database
OLDER_FLAGS = ("amsgrad", "nesterov", "decoupled_weight_decay")


class TestStateDicts(DatabaseTestCase):
    @compiled_and_eager
    def test_state_is_as_torchs(self, device, dtype, optim_info, compile):
        for kwargs in configurations(optim_info):
            pair = parameters(dtype), parameters(dtype)
            optimizer, twin = ours(optim_info, pair[0], compile, **kwargs), theirs(optim_info, pair[1], **kwargs)
            run(optimizer, pair[0], range(2))
            run(twin, pair[1], range(2))
            # as in torch, a parameter without state has no entry
            assert {} not in list(optimizer.state.values())
            self.assert_parity(optimizer.state_dict()["state"], twin.state_dict()["state"])
            # as in torch, each parameter has its own step tensor
            steps = [state["step"] for state in optimizer.state_dict()["state"].values() if "step" in state]
            assert len({step.data_ptr() for step in steps}) == len(steps)

    @compiled_and_eager
    @parametrize("named", [False, True])
    def test_loaded_state_continues_the_run(self, device, dtype, optim_info, compile, named):
        def optimizer_of(params, kwargs):
            listed = [(f"p{i}", param) for i, param in enumerate(params)] if named else params
            return ours(optim_info, listed, compile, **kwargs)

        # load into a new optimizer, or into one that has stepped with other gradients
        steps_before = 2 if named else 0
        for kwargs in configurations(optim_info):
            reference_params = parameters(dtype)
            reference = optimizer_of(reference_params, kwargs)
            run(reference, reference_params, range(8))
            for route in STATE_DICT_ROUTES.values():
                first_params, second_params = parameters(dtype), parameters(dtype)
                first, second = optimizer_of(first_params, kwargs), optimizer_of(second_params, kwargs)
                run(first, first_params, range(4))
                run(second, second_params, range(100, 100 + steps_before))
                with torch.no_grad():
                    for target, source in zip(second_params, first_params, strict=True):
                        target.copy_(source)
                second.load_state_dict(route(first.state_dict()))
                self.assert_same(second.state_dict(), first.state_dict())
                run(second, second_params, range(4, 8))
                self.assert_same(second_params, reference_params)
                self.assert_same(second.state_dict(), reference.state_dict())
                # a group that is listed twice is saved twice
                second.param_groups.extend(second.param_groups)
                self.assert_same(*second.state_dict()["param_groups"])

    @compiled_and_eager
    @parametrize("from_torch", [False, True])
    def test_state_dicts_are_exchanged_with_torch(self, device, dtype, optim_info, compile, from_torch):
        makers = both(optim_info, compile)
        make_first, make_second = reversed(makers) if from_torch else makers
        for kwargs, route in itertools.product(configurations(optim_info, ["cpu"]), STATE_DICT_ROUTES.values()):
            params, expected = parameters(dtype), parameters(dtype)
            first, reference = make_first(params, **kwargs), theirs(optim_info, expected, **kwargs)
            # the saved lr replaces the one of the constructor
            second = make_second(params, **{**kwargs, "lr": 123.0})
            run(reference, expected, range(8))
            run(first, params, range(4))
            second.load_state_dict(route(first.state_dict()))
            run(second, params, range(4, 8))
            self.assert_parity(params, expected)
            self.assert_parity(states(second, params), states(reference, expected))

    def check_older_state_dict(self, optim_info, compile, kwargs):
        """Load a state dict without the flags that older versions did not have, and compare with torch."""
        pair = parameters(), parameters()
        optimizer, twin = ours(optim_info, pair[0], compile, **kwargs), theirs(optim_info, pair[1], **kwargs)
        for opt, params in ((optimizer, pair[0]), (twin, pair[1])):
            run(opt, params, range(3))
            old = copy.deepcopy(opt.state_dict())
            for flag in (*optim_info.not_og_supported_flags, *OLDER_FLAGS):
                old["param_groups"][0].pop(flag, None)
            opt.load_state_dict(old)
            run(opt, params, range(3, 6))
        # a flag may be None here and False in torch, or the reverse: both mean off
        flags = [name for name, value in twin.param_groups[0].items() if value is None or isinstance(value, bool)]
        on = [{name for name in flags if opt.param_groups[0][name]} for opt in (optimizer, twin)]
        assert on[0] == on[1]
        self.assert_parity(*pair)

    @compiled_and_eager
    def test_can_load_older_state_dict(self, device, dtype, optim_info, compile):
        for kwargs in configurations(optim_info, ["cpu"]):
            if not any(value is True for value in kwargs.values()):
                self.check_older_state_dict(optim_info, compile, kwargs)

    @compiled_and_eager
    def test_flag_that_an_older_state_dict_lacks_is_off(self, device, dtype, optim_info, compile):
        # it was off in the run that saved the state dict, and the value of the constructor does not matter
        for kwargs in configurations(optim_info, ["cpu"]):
            if any(value is True for value in kwargs.values()):
                self.check_older_state_dict(optim_info, compile, kwargs)

    @compiled_and_eager
    def test_can_load_steps_that_are_no_tensors(self, device, dtype, optim_info, compile):
        for kwargs, number in itertools.product(configurations(optim_info), (int, float)):
            pair = parameters(dtype), parameters(dtype)
            reference, optimizer = (ours(optim_info, params, compile, **kwargs) for params in pair)
            run(reference, pair[0], range(6))
            run(optimizer, pair[1], range(3))
            saved = copy.deepcopy(optimizer.state_dict())
            for state in saved["state"].values():
                if "step" in state:
                    state["step"] = number(state["step"])
            optimizer.load_state_dict(saved)
            run(optimizer, pair[1], range(3, 6))
            self.assert_same(*pair)
            self.assert_same(optimizer.state_dict(), reference.state_dict())

    @compiled_and_eager
    def test_state_dict_of_another_model_is_refused(self, device, dtype, optim_info, compile):
        params = parameters(dtype)
        optimizer = ours(optim_info, params, compile, **STATEFUL[optim_info.name])
        run(optimizer, params, range(2))
        before = copy.deepcopy(optimizer.state_dict())
        fewer = copy.deepcopy(before)
        fewer["param_groups"][0]["params"].pop()
        more = copy.deepcopy(before)
        more["param_groups"].append(more["param_groups"][0])
        for wrong, message in ((fewer, "doesn't match the size"), (more, "different number of parameter groups")):
            with pytest.raises(ValueError, match=message):
                optimizer.load_state_dict(wrong)
        self.assert_same(optimizer.state_dict(), before)


instantiate_device_type_tests(TestStateDicts, globals(), only_for=("cpu",))
