"""torch's optimizer database: keys, values, dtypes and names in the state that a user or a state dict sets."""

import copy

import pytest
import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests

from .torch_database import STATEFUL, DatabaseTestCase, both, compiled_and_eager, ours, parameters, run, states


class TestStateContents(DatabaseTestCase):
    @compiled_and_eager
    def test_keys_of_others_survive_loading_and_steps(self, device, dtype, optim_info, compile):
        params = parameters(dtype)
        optimizer = ours(optim_info, params, compile, **STATEFUL[optim_info.name])
        run(optimizer, params, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        of_group = {"initial_lr": 0.5, "tags": ["a", "b"], "nested": {"x": 1}}
        of_param = {"count": 3, "ema": torch.ones(10, 5), "nested": {"y": torch.zeros(2)}}
        saved["param_groups"][0].update(of_group)
        saved["state"][0].update(of_param)
        saved["state"]["everyone's"] = {"z": 1}
        optimizer.load_state_dict(saved)
        run(optimizer, params, range(2))
        found = optimizer.state_dict()
        self.assert_same({name: found["param_groups"][0][name] for name in of_group}, of_group)
        self.assert_same({name: found["state"][0][name] for name in of_param}, of_param)
        assert found["state"]["everyone's"] == {"z": 1}

    @compiled_and_eager
    def test_state_changed_by_hand_counts(self, device, dtype, optim_info, compile):
        pair = parameters(dtype), parameters(dtype)
        for make, params in zip(both(optim_info, compile), pair, strict=True):
            optimizer = make(params, **STATEFUL[optim_info.name])
            run(optimizer, params, range(3))
            for state in states(optimizer, params):
                state.update({name: value * 2 for name, value in state.items()})
            run(optimizer, params, range(3, 6))
            for state in states(optimizer, params):
                for name in state.keys() - {"step"}:
                    state[name].mul_(0.5)
            run(optimizer, params, range(6, 9))
            optimizer.state.clear()
            run(optimizer, params, range(9, 12))
        self.assert_parity(*pair)

    @compiled_and_eager
    def test_loading_casts_states_to_the_parameter_but_not_the_numbers(self, device, dtype, optim_info, compile):
        # float32 values stored as float64, so that the cast back is exact, and with other strides
        pair = parameters(dtype), parameters(dtype)
        reference, optimizer = (ours(optim_info, params, compile, **STATEFUL[optim_info.name]) for params in pair)
        run(reference, pair[0], range(6))
        run(optimizer, pair[1], range(3))
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            state.update({name: value.double() for name, value in state.items()})
            for name in state:
                if state[name].ndim == 2:
                    state[name] = state[name].t().contiguous().t()
        optimizer.load_state_dict(saved)
        for param in pair[1]:
            for name, value in optimizer.state[param].items():
                assert value.dtype == (torch.float64 if name in optimizer.number_names else dtype)
        run(optimizer, pair[1], range(3, 6))
        self.assert_same(*pair)

    @compiled_and_eager
    def test_named_parameters(self, device, dtype, optim_info, compile):
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 2))
        names = [name for name, _ in model.named_parameters()]
        from_module = ours(optim_info, model, compile)
        assert from_module.param_groups[0]["param_names"] == names
        params = list(model.parameters())
        named = ours(optim_info, model.named_parameters(), compile)
        in_groups = ours(
            optim_info,
            [{"params": [("a", params[0])], "lr": 0.5}, {"params": [("b", params[1]), ("c", params[2])]}],
            compile,
        )
        assert [group["param_names"] for group in in_groups.param_groups] == [["a"], ["b", "c"]]
        with pytest.raises(ValueError, match="cannot add param group without names"):
            in_groups.add_param_group({"params": [params[3]]})
        run(named, params, range(2))
        assert named.state_dict()["param_groups"][0]["param_names"] == names

        other_names = [("other." + name, param) for name, param in model.named_parameters()]
        unnamed_state = copy.deepcopy(named.state_dict())
        del unnamed_state["param_groups"][0]["param_names"]
        renamed = ["other." + name for name in names]
        # state dict, parameters of the optimizer, expected names: those of the state dict if it has any
        table = [
            (named.state_dict(), params, names),
            (named.state_dict(), other_names, names),
            (unnamed_state, other_names, renamed),
            (unnamed_state, params, None),
        ]
        before = copy.deepcopy((model.state_dict(), named.state_dict()))
        results = []
        for state_dict, target, expected in table:
            model.load_state_dict(before[0])
            optimizer = ours(optim_info, target, compile)
            optimizer.load_state_dict(copy.deepcopy(state_dict))
            assert optimizer.param_groups[0].get("param_names") == expected
            run(optimizer, params, range(2, 4))
            assert optimizer.state_dict()["param_groups"][0].get("param_names") == expected
            results.append(copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"])))
        # names do not affect the results
        for result in results[1:]:
            self.assert_same(result, results[0])


instantiate_device_type_tests(TestStateContents, globals(), only_for=("cpu",))
