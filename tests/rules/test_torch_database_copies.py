"""torch's optimizer database: copies of an optimizer by deepcopy, pickle and torch.save."""

import copy
import itertools

from torch.testing._internal.common_device_type import instantiate_device_type_tests

from .torch_database import (
    OPTIMIZER_ROUTES,
    STATEFUL,
    DatabaseTestCase,
    compiled_and_eager,
    configurations,
    ours,
    parameters,
    run,
)


class TestCopies(DatabaseTestCase):
    @compiled_and_eager
    def test_copies_continue_the_run(self, device, dtype, optim_info, compile):
        for kwargs, route in itertools.product(configurations(optim_info), OPTIMIZER_ROUTES.values()):
            params = parameters(dtype)
            optimizer = ours(optim_info, params, compile, **kwargs, on_realloc="raise")
            # before the first step, and after three steps
            for start in (0, 3):
                copied, copied_params = route((optimizer, params))
                assert type(copied) is type(optimizer)
                self.assert_same(copied.state_dict(), optimizer.state_dict())
                before = copy.deepcopy(params)
                run(copied, copied_params, range(start, start + 3))
                self.assert_same(params, before)
                run(optimizer, params, range(start, start + 3))
                self.assert_same(copied_params, params)
                self.assert_same(copied.state_dict(), optimizer.state_dict())
                assert copied.explain().mode == optimizer.explain().mode
                assert copied.on_realloc == "raise"

    @compiled_and_eager
    def test_copies_have_all_public_attributes(self, device, dtype, optim_info, compile):
        def public(optimizer):
            return {name: value for name, value in vars(optimizer).items() if not name.startswith("_")}

        params = parameters(dtype)
        optimizer = ours(optim_info, params, compile, **STATEFUL[optim_info.name], max_grad_norm=1.0)
        run(optimizer, params, range(3))
        for route in OPTIMIZER_ROUTES.values():
            copied = public(route(optimizer))
            assert copied.keys() == public(optimizer).keys()
            # the keys of the state are tensors, which compare by identity
            unkeyed = {**public(optimizer), "state": list(optimizer.state.values())}
            self.assert_same({**copied, "state": list(copied["state"].values())}, unkeyed)

    @compiled_and_eager
    def test_copies_have_the_same_backend(self, device, dtype, optim_info, compile):
        name = "cpu" if compile else "eager"
        for route in OPTIMIZER_ROUTES.values():
            params = parameters(dtype)
            optimizer = ours(optim_info, params, compile, backend=name)
            run(optimizer, params, range(2))
            copied, copied_params = route((optimizer, params))
            # the copy shares the backend, and with it all compiled units
            assert copied.backend is optimizer.backend
            run(copied, copied_params, range(2, 4))
            run(optimizer, params, range(2, 4))
            self.assert_same(copied_params, params)
            assert copied.explain().backends == (name,)


instantiate_device_type_tests(TestCopies, globals(), only_for=("cpu",))
