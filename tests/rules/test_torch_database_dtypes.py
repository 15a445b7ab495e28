"""torch's optimizer database: complex parameters, mixed dtypes, mixed devices, and default dtypes."""

import torch
from torch.nn import Parameter
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import TensorTracker
from torch.testing._internal.common_utils import set_default_dtype

from .torch_database import (
    STATEFUL,
    DatabaseTestCase,
    compiled_and_eager,
    configurations,
    ours,
    parameters,
    run,
    states,
    theirs,
)

NOT_ON_META = ("ASGD", "Adafactor", "Rprop")
"""The optimizers of torch.optim that read the value of a tensor, so that they cannot step meta parameters."""


class TestDtypes(DatabaseTestCase):
    @compiled_and_eager
    def test_complex(self, device, dtype, optim_info, compile):
        if not optim_info.optim_cls.takes_complex:
            params = parameters(torch.complex64)
            with self.assertRaisesRegex(RuntimeError, f"^{optim_info.name} does not support complex parameters"):  # noqa: PT027
                run(ours(optim_info, params, compile), params, range(1))
            return
        for kwargs in configurations(optim_info):
            params, twin_params = parameters(torch.complex64), parameters(torch.complex64)
            real_params = [Parameter(torch.view_as_real(param.detach()).clone()) for param in params]
            optimizer = ours(optim_info, params, compile, **kwargs)
            real_optimizer = ours(optim_info, real_params, compile, **kwargs)
            twin = theirs(optim_info, twin_params, **kwargs)
            for step in range(5):
                run(optimizer, params, [step])
                run(twin, twin_params, [step])
                for param, real_param in zip(params, real_params, strict=True):
                    real_param.grad = torch.view_as_real(param.grad)
                real_optimizer.step()
                self.assert_parity(params, twin_params)
                self.assert_same([torch.view_as_real(param) for param in params], real_params)
            self.assert_parity(states(optimizer, params), states(twin, twin_params))

    @compiled_and_eager
    def test_complex_2d(self, device, dtype, optim_info, compile):
        def rosenbrock(x, y):
            return ((1 - x) ** 2 + 100 * (y - x**2) ** 2).sum()

        for kwargs in configurations(optim_info) if optim_info.optim_cls.takes_complex else ():
            (a,) = parameters(torch.complex64, ((2,),))
            parts = [Parameter(part.detach().clone()) for part in (a.real, a.imag)]
            optimizer = ours(optim_info, [a], compile, **{**kwargs, "lr": 1e-3})
            by_parts = ours(optim_info, parts, compile, **{**kwargs, "lr": 1e-3})
            tracker = TensorTracker({"rtol": 2e-6, "atol": 1e-6})
            for _ in range(5):
                optimizer.zero_grad()
                rosenbrock(a.real, a.imag).backward()
                optimizer.step()
                for tensor in (a.grad.real, a.grad.imag, a.real, a.imag):
                    tracker.add(tensor)
                by_parts.zero_grad()
                rosenbrock(*parts).backward()
                for part in parts:
                    tracker.pop_check_set(part.grad, self)
                by_parts.step()
                for part in parts:
                    tracker.pop_check_set(part, self)
            assert tracker.all_popped()

    @compiled_and_eager
    def test_mixed_dtypes(self, device, dtype, optim_info, compile):
        def mixed():
            dtypes = [torch.float64, torch.float32, torch.complex64, torch.complex128]
            dtypes = dtypes if optim_info.optim_cls.takes_complex else dtypes[:2]
            return [param for dtype in dtypes for param in parameters(dtype)]

        pair = mixed(), mixed()
        optimizer, twin = ours(optim_info, pair[0], compile), theirs(optim_info, pair[1])
        run(optimizer, pair[0], range(20))
        run(twin, pair[1], range(20))
        self.assert_parity(*pair)
        self.assert_parity(states(optimizer, pair[0]), states(twin, pair[1]))

    @compiled_and_eager
    def test_mixed_devices(self, device, dtype, optim_info, compile):
        def mixed():
            return [*parameters(dtype), *(Parameter(param.detach().to("meta")) for param in parameters(dtype))]

        pair = mixed(), mixed() if optim_info.name not in NOT_ON_META else parameters(dtype)
        optimizer, twin = ours(optim_info, pair[0], compile), theirs(optim_info, pair[1])
        run(optimizer, pair[0], range(5))
        run(twin, pair[1], range(5))
        self.assert_parity(pair[0][:4], pair[1][:4])
        for param, twin_param in zip(*pair, strict=False):
            found, expected = optimizer.state.get(param, {}), twin.state.get(twin_param, {})
            assert {name: t.device for name, t in found.items()} == {n: t.device for n, t in expected.items()}

    @compiled_and_eager
    def test_step_counter_is_precise_whatever_the_default_dtype(self, device, dtype, optim_info, compile):
        for default in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            if optim_info.name == "ASGD" and default.itemsize < 4:
                continue  # torch rounds its learning rate to the default dtype
            pair = parameters(dtype), parameters(dtype)
            with set_default_dtype(default):
                optimizer = ours(optim_info, pair[0], compile, **STATEFUL[optim_info.name])
                twin = theirs(optim_info, pair[1], **STATEFUL[optim_info.name])
                run(optimizer, pair[0], range(2))
                run(twin, pair[1], range(2))
            self.assert_parity(*pair)
            self.assert_parity(states(optimizer, pair[0]), states(twin, pair[1]))


instantiate_device_type_tests(TestDtypes, globals(), only_for=("cpu",))
