"""torch's own optimizer database, ``torch.testing._internal.common_optimizers``, drives our classes.

The database lists constructor arguments, erroneous ones and schedulers for each of torch's optimizers, and torch's
test_optim puts its classes through them. Here ours go through the same, compiled and eager, beside the class of the
same name in torch.optim.

What does not apply to us, and why:

* Errors that are none here, or other ones (``OTHERWISE``; ``test_constructor_errors`` keeps that table exact):

  - "lr as a Tensor is not supported for capturable=False and foreach=True", and the same of betas: hyperparameters
    reach a step as numbers in either case, and ``foreach`` and ``capturable`` have no effect;
  - "`fused` and `foreach` cannot be `True` together": neither has an effect, so they cannot clash;
  - "`fused` does not support `differentiable`": ``differentiable=True`` alone is a NotImplementedError here.

* ``differentiable`` configurations, and torch's tests of second-order steps: see above.
* Sparse gradients (``supports_sparse``, ``metadata_for_sparse``, which torch.optim.SGD has): refused, for all three.
* Configurations for CUDA, XPU and MPS: they differ by ``capturable`` and by tensors for lr and betas, all of which
  also work on the CPU, so they are run here, without ``capturable`` for torch, which refuses it on the CPU.
* Decorators, skips and tolerances of the database: they belong to tests of torch's implementations.
* Tests that compare torch's implementations or their memory (foreach against for-loop, fused against for-loop, fused
  with ``found_inf``, peak memory of foreach, defaults changed to foreach, tensors too large for a foreach kernel): we
  have one implementation. ``foreach`` and ``fused`` must make no difference, which is tested.
* Tests on several GPUs, of CUDA graphs, and of state dicts that move between CPU and GPU: no such device here. What is
  left of mixed devices is CPU and meta.
"""

import copy
import io
import itertools
import pickle
import re
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    OptimizerInfo,
    TensorTracker,
    optim_db,
    optims,
)
from torch.testing._internal.common_utils import TestCase, parametrize, set_default_dtype

import compiled_optim as co

TORCH_INFOS = {info.name: info for info in optim_db}
INFOS = [
    OptimizerInfo(
        cls,
        optim_inputs_func=info.optim_inputs_func,
        optim_error_inputs_func=info.optim_error_inputs_func,
        scheduler_inputs=info.scheduler_inputs,
        not_og_supported_flags=info.not_og_supported_flags,
        supported_impls=(),
        has_capturable_arg=True,
    )
    for cls, info in ((cls, TORCH_INFOS[cls.__name__]) for cls in (co.SGD, co.Adam, co.AdamW))
]

SWITCHES = {"foreach", "fused", "capturable", "differentiable"}

# error inputs of the database and what ours do instead of that error: None if it just works
OF_ADAM = {
    "lr as Tensor doesn't work with foreach & not capturable": None,
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True": None,
    "`fused` and `foreach` cannot be `True` together": None,
    "`fused` does not support `differentiable`": NotImplementedError,
}
OTHERWISE = {"SGD": {}, "Adam": OF_ADAM, "AdamW": OF_ADAM}

# flags of torch's optimizers that came later than the first checkpoints, beside those that the database names
OLDER_FLAGS = ("amsgrad", "nesterov", "decoupled_weight_decay")

# enough momentum, decay and state for the tests that need only one configuration with state
STATEFUL = {"SGD": {"momentum": 0.9, "weight_decay": 0.1}, "Adam": {"weight_decay": 0.1}, "AdamW": {}}

TOLERANCE = {torch.float32: 2e-6, torch.complex64: 2e-6, torch.float64: 1e-12, torch.complex128: 1e-12}


def saved_and_loaded(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


# the ways a state dict or a whole optimizer gets from one place to another
STATE_DICT_ROUTES = {
    "as it is": lambda saved: saved,
    "deepcopy": copy.deepcopy,
    "torch.save": lambda saved: saved_and_loaded(saved, weights_only=True),
}
OPTIMIZER_ROUTES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": lambda value: saved_and_loaded(value, weights_only=False),
}


def compiled_and_eager(test):
    """Run a test for each optimizer, eager and compiled."""
    return optims(INFOS, dtypes=[torch.float32])(parametrize("compile", [False, True])(test))


def configurations(info, devices=("cpu", "cuda", "mps")):
    """The constructor arguments of the database: those for the CPU, then what other devices have beyond them."""
    kwargs = [case.kwargs for device in devices for case in info.optim_inputs_func(device)]
    return list({repr(each): each for each in kwargs}.values())


def error_inputs(info, dtype):
    """The error inputs for the CPU and for CUDA, whose sample tensors can be had only as fakes here."""
    with FakeTensorMode():
        cuda = info.optim_error_inputs_func("cuda", dtype)
    for error in cuda:
        error.optimizer_error_input.params = None
    return [*info.optim_error_inputs_func("cpu", dtype), *cuda]


def ours(info, params, compile, **kwargs):
    return info.optim_cls(params, compile=compile, **copy.deepcopy(kwargs))


def theirs(info, params, **kwargs):
    """torch.optim's class of the same name; tensors are copied, as schedulers write into a tensor lr."""
    kwargs = {name: value for name, value in copy.deepcopy(kwargs).items() if name not in SWITCHES}
    return TORCH_INFOS[info.name].optim_cls(params, **kwargs)


def both(info, compile):
    """Ours and torch's, as functions of parameters or groups and the constructor's arguments."""
    return partial(ours, info, compile=compile), partial(theirs, info)


def parameters(dtype=torch.float32, shapes=((10, 5), (10,), (), (0,))):
    """The same parameters on every call."""
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, dtype=dtype, generator=generator)) for shape in shapes]


def run(optimizer, params, steps, schedulers=()):
    """Steps with gradients that depend on the number of the step and nothing else."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, dtype=param.dtype, generator=generator).to(param.device)
        optimizer.step()
        for scheduler in schedulers:
            # a metric that never improves
            scheduler.step(*[1.0] if isinstance(scheduler, ReduceLROnPlateau) else [])


def states(optimizer, params):
    return [optimizer.state.get(param, {}) for param in params]


def problem(dtype, contiguous=True):
    """Two parameters, and a closure for the squared error of a linear map."""
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(shape, dtype=dtype, generator=generator) for shape in ((10, 5, 2), (10, 2), (5,)))
    params = [Parameter(t[..., 0].clone() if contiguous else t[..., 0]) for t in (weight, bias)]

    def closure():
        for param in params:
            param.grad = None
        loss = (params[0].mv(x) + params[1]).pow(2).sum()
        loss.backward()
        return loss

    return params, closure


class TestTorchDatabase(TestCase):
    def assert_same(self, actual, expected):
        """Equal to the bit, tensors in nested structures included."""
        self.assertEqual(actual, expected, rtol=0, atol=0)  # noqa: PT009

    def assert_parity(self, actual, expected, scale=0.0):
        """Equal but for rounding, in the norm of each tensor; nested structures, dtypes and shapes to the letter.

        What rounding is relative to is at least ``scale``.
        """
        if isinstance(expected, Tensor):
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
            size = max(expected.detach().norm().item(), scale)
            assert (actual.detach() - expected.detach()).norm().item() <= TOLERANCE[expected.dtype] * size
        elif isinstance(expected, dict):
            assert actual.keys() == expected.keys()
            for key in expected:
                # gradients of either sign cancel in an average: what is rounded is larger than what is left
                self.assert_parity(actual[key], expected[key], 0.1 if key in ("exp_avg", "momentum_buffer") else 0.0)
        elif isinstance(expected, list | tuple):
            for one, other in zip(actual, expected, strict=True):
                self.assert_parity(one, other, scale)
        else:
            assert actual == expected

    # ---- construction

    @compiled_and_eager
    def test_constructor_errors(self, device, dtype, optim_info, compile):
        otherwise = {}
        for error in error_inputs(optim_info, dtype):
            case = error.optimizer_error_input
            assert error.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
            params = [Parameter(torch.ones(1, 1))] if case.params is None else case.params
            raised = None
            with warnings.catch_warnings():
                # the one about duplicates is listed as an error
                warnings.simplefilter("error")
                try:
                    ours(optim_info, params, compile, **case.kwargs)
                except Exception as exception:
                    raised = exception
            if not (isinstance(raised, error.error_type) and re.search(error.error_regex, str(raised))):
                otherwise[case.desc] = raised and type(raised)
        assert otherwise == OTHERWISE[optim_info.name]

    @compiled_and_eager
    def test_what_works_here_and_not_in_torch_computes_the_same(self, device, dtype, optim_info, compile):
        working = [desc for desc, instead in OTHERWISE[optim_info.name].items() if instead is None]
        for error in error_inputs(optim_info, dtype):
            case = error.optimizer_error_input
            if case.desc in working:
                pair = parameters(dtype), parameters(dtype)
                run(ours(optim_info, pair[0], compile, **case.kwargs), pair[0], range(5))
                run(theirs(optim_info, pair[1], **case.kwargs), pair[1], range(5))
                self.assert_parity(*pair)

    @compiled_and_eager
    def test_differentiable_is_refused(self, device, dtype, optim_info, compile):
        with pytest.raises(NotImplementedError, match="differentiable=True is not supported"):
            ours(optim_info, parameters(), compile, differentiable=True)

    @compiled_and_eager
    def test_sparse_gradients_are_refused(self, device, dtype, optim_info, compile):
        dense, sparse = params = parameters(dtype, ((3,), (4, 2)))
        before = copy.deepcopy(params)
        dense.grad, sparse.grad = torch.ones(3), torch.ones(4, 2).to_sparse()
        optimizer = ours(optim_info, params, compile)
        with pytest.raises(RuntimeError, match=f"{optim_info.name} does not support sparse gradients, .*SparseAdam"):
            optimizer.step()
        self.assert_same(params, before)
        assert optimizer.state_dict()["state"] == {}

    @compiled_and_eager
    def test_optimizer_can_be_printed(self, device, dtype, optim_info, compile):
        for kwargs in configurations(optim_info, ["cpu"]):
            params = parameters(dtype)
            optimizer, twin = ours(optim_info, params, compile, **kwargs), theirs(optim_info, params, **kwargs)
            # ours has "capturable" in SGD too
            assert set(repr(twin).splitlines()) <= set(repr(optimizer).splitlines())
            run(optimizer, params, range(1))
            assert optim_info.name in repr(optimizer)

    # ---- steps

    @compiled_and_eager
    def test_every_configuration_matches_torch(self, device, dtype, optim_info, compile):
        for kwargs in configurations(optim_info):
            pair = parameters(dtype), parameters(dtype)
            optimizer = ours(optim_info, pair[0], compile, **kwargs)
            twin = theirs(optim_info, pair[1], **kwargs)
            for start in range(0, 20, 5):
                run(optimizer, pair[0], range(start, start + 5))
                run(twin, pair[1], range(start, start + 5))
                self.assert_parity(*pair)
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
            # kept, for torch.optim to find in a checkpoint
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
    def test_closure(self, device, dtype, optim_info, compile):
        for kwargs in configurations(optim_info):
            params, closure = problem(dtype)
            twin_params, twin_closure = problem(dtype)
            optimizer, twin = ours(optim_info, params, compile, **kwargs), theirs(optim_info, twin_params, **kwargs)
            seen = []

            def watched(closure=closure, seen=seen):
                seen.append(torch.is_grad_enabled())
                return closure()

            # a caller's no_grad does not reach into the closure, and is still there after the step
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
            # after steps too: neither parameters nor states nor step counts move
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
            if optimizer.defaults["weight_decay"] == 0:
                self.assert_same(pair[0], before)

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
                # the tensor is the user's: never copied, never written; what they write counts from the next step on
                assert by_tensor.param_groups[0]["lr"] is lr
                lr.mul_(0.5)
                by_number.param_groups[0]["lr"] = twin.param_groups[0]["lr"] = lr.item()
            self.assert_same(lr, torch.full(shape, 0.01).mul_(0.5).mul_(0.5))

    @compiled_and_eager
    def test_complex(self, device, dtype, optim_info, compile):
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

        for kwargs in configurations(optim_info):
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
            dtypes = (torch.float64, torch.float32, torch.complex64, torch.complex128)
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

        pair = mixed(), mixed()
        if compile:
            with pytest.raises(co.BackendUnavailableError, match=r"'meta'.*compile=False"):
                ours(optim_info, pair[0], compile)
            return
        optimizer, twin = ours(optim_info, pair[0], compile), theirs(optim_info, pair[1])
        run(optimizer, pair[0], range(5))
        run(twin, pair[1], range(5))
        self.assert_parity(pair[0][:4], pair[1][:4])
        for param, twin_param in zip(*pair, strict=True):
            found, expected = optimizer.state.get(param, {}), twin.state.get(twin_param, {})
            assert {name: t.device for name, t in found.items()} == {n: t.device for n, t in expected.items()}

    @compiled_and_eager
    def test_step_counter_is_precise_whatever_the_default_dtype(self, device, dtype, optim_info, compile):
        for default in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            pair = parameters(dtype), parameters(dtype)
            optimizer = ours(optim_info, pair[0], compile, **STATEFUL[optim_info.name])
            twin = theirs(optim_info, pair[1], **STATEFUL[optim_info.name])
            with set_default_dtype(default):
                run(optimizer, pair[0], range(2))
                run(twin, pair[1], range(2))
            self.assert_parity(*pair)
            self.assert_parity(states(optimizer, pair[0]), states(twin, pair[1]))

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

    # ---- parameter groups

    @compiled_and_eager
    def test_param_groups(self, device, dtype, optim_info, compile):
        own_values = ({"lr": 0.05}, {"weight_decay": 0.3}, {"lr": 0.05, "weight_decay": 0.0})
        defaults = ({}, {"lr": 0.02}, {"lr": 0.02, "weight_decay": 0.1})
        for own, kwargs in itertools.product(own_values, defaults):
            pair = parameters(dtype), parameters(dtype)
            optimizers = []
            for params, make in zip(pair, both(optim_info, compile), strict=True):
                # the last parameter but one has a gradient but is nobody's
                optimizers.append(make([{"params": params[0], **own}, {"params": [params[1], params[3]]}], **kwargs))
                run(optimizers[-1], params, range(10))
            self.assert_parity(*pair)
            self.assert_same(pair[0][2], parameters(dtype)[2])
            for name in ("lr", "weight_decay"):
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
            {"momentum": 0.5, "weight_decay": 0.2} if optim_info.name == "SGD" else {"betas": (0.8, 0.9), "eps": 1e-3},
        )
        pair = parameters(dtype), parameters(dtype)
        optimizers = [make(params) for make, params in zip(both(optim_info, compile), pair, strict=True)]
        for number, change in enumerate(changes):
            for optimizer, params in zip(optimizers, pair, strict=True):
                optimizer.param_groups[0].update(change)
                run(optimizer, params, range(3 * number, 3 * number + 3))
            self.assert_parity(*pair)

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

    # ---- state dicts

    @compiled_and_eager
    def test_state_is_as_torchs(self, device, dtype, optim_info, compile):
        for kwargs in configurations(optim_info):
            pair = parameters(dtype), parameters(dtype)
            optimizer, twin = ours(optim_info, pair[0], compile, **kwargs), theirs(optim_info, pair[1], **kwargs)
            run(optimizer, pair[0], range(2))
            run(twin, pair[1], range(2))
            # as in torch, a parameter that needs no state is not in the state
            assert {} not in list(optimizer.state.values())
            self.assert_parity(optimizer.state_dict()["state"], twin.state_dict()["state"])
            # torch counts in each parameter's own step tensor
            steps = [state["step"] for state in optimizer.state_dict()["state"].values() if "step" in state]
            assert len({step.data_ptr() for step in steps}) == len(steps)

    @compiled_and_eager
    @parametrize("named", [False, True])
    def test_loaded_state_continues_the_run(self, device, dtype, optim_info, compile, named):
        def optimizer_of(params, kwargs):
            listed = [(f"p{i}", param) for i, param in enumerate(params)] if named else params
            return ours(optim_info, listed, compile, **kwargs)

        # into an optimizer that is new, and into one that has stepped (on other gradients)
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
                # a group that is listed twice looks the same twice
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
            # what was saved counts, not what the second was constructed with
            second = make_second(params, **{**kwargs, "lr": 123.0})
            run(reference, expected, range(8))
            run(first, params, range(4))
            second.load_state_dict(route(first.state_dict()))
            run(second, params, range(4, 8))
            self.assert_parity(params, expected)
            self.assert_parity(states(second, params), states(reference, expected))

    def check_older_state_dict(self, optim_info, compile, kwargs):
        """Load a state dict made before there were some flags, and compare with what torch makes of it."""
        pair = parameters(), parameters()
        optimizer, twin = ours(optim_info, pair[0], compile, **kwargs), theirs(optim_info, pair[1], **kwargs)
        for opt, params in ((optimizer, pair[0]), (twin, pair[1])):
            run(opt, params, range(3))
            old = copy.deepcopy(opt.state_dict())
            for flag in (*optim_info.not_og_supported_flags, *OLDER_FLAGS):
                old["param_groups"][0].pop(flag, None)
            opt.load_state_dict(old)
            run(opt, params, range(3, 6))
        # what is None in one and False in the other is off in both
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
        # as it was in the run that made the state dict, whatever the constructor was told now
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
    def test_loading_casts_states_to_the_parameter_but_not_the_step(self, device, dtype, optim_info, compile):
        # float32 values in double, so that the cast loses nothing, and in another order of dimensions
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
                assert value.dtype == (torch.float64 if name == "step" else dtype)
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
        # what is loaded, into what, and the names afterwards: those in the state dict, else those that were there
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
        # names change nothing else
        for result in results[1:]:
            self.assert_same(result, results[0])

    # ---- hooks

    @compiled_and_eager
    def test_state_dict_hooks(self, device, dtype, optim_info, compile):
        params = parameters(dtype)
        optimizer = ours(optim_info, params, compile, **STATEFUL[optim_info.name])
        run(optimizer, params, range(1))
        plain = optimizer.state_dict()

        def mark(optimizer):
            optimizer.state["mark"] = 1

        def unmark(optimizer, state_dict):
            state_dict["marked"] = state_dict["state"].pop("mark", None)

        pre = optimizer.register_state_dict_pre_hook(mark)
        assert optimizer.state_dict()["state"]["mark"] == 1
        # a mark in the state is nobody's parameter, and in no one's way
        run(optimizer, params, range(1))
        plain = {**plain, "state": {i: {**optimizer.state[param]} for i, param in enumerate(params)}}
        post = optimizer.register_state_dict_post_hook(unmark)
        self.assert_same(optimizer.state_dict(), {**plain, "marked": 1})
        pre.remove()
        del optimizer.state["mark"]
        self.assert_same(optimizer.state_dict(), {**plain, "marked": None})
        post.remove()
        self.assert_same(optimizer.state_dict(), plain)

    @compiled_and_eager
    def test_state_dict_post_hook_may_return_anything(self, device, dtype, optim_info, compile):
        params = parameters(dtype)
        optimizer = ours(optim_info, params, compile, **STATEFUL[optim_info.name])
        run(optimizer, params, range(1))
        calls = []
        optimizer.register_state_dict_post_hook(lambda opt, state_dict: calls.append("last"))
        optimizer.register_state_dict_post_hook(lambda opt, state_dict: {"mine": sorted(state_dict)}, prepend=True)
        assert optimizer.state_dict() == {"mine": ["param_groups", "state"]}
        assert calls == ["last"]

    @compiled_and_eager
    def test_load_state_dict_hooks(self, device, dtype, optim_info, compile):
        params = parameters(dtype)
        optimizer = ours(optim_info, params, compile, **STATEFUL[optim_info.name])
        run(optimizer, params, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        calls = []

        def replace_lr(optimizer, state_dict):
            calls.append("replace lr")
            state_dict = copy.deepcopy(state_dict)
            state_dict["param_groups"][0]["lr"] = 0.25
            return state_dict

        handles = [
            optimizer.register_load_state_dict_pre_hook(replace_lr),
            optimizer.register_load_state_dict_pre_hook(lambda opt, sd: calls.append("first"), prepend=True),
            optimizer.register_load_state_dict_post_hook(lambda opt: calls.append(opt.param_groups[0]["lr"])),
            optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("loaded"), prepend=True),
        ]
        optimizer.load_state_dict(saved)
        assert calls == ["first", "replace lr", "loaded", 0.25]
        assert saved["param_groups"][0]["lr"] != 0.25
        for handle in handles:
            handle.remove()
        optimizer.load_state_dict(saved)
        assert len(calls) == 4
        self.assert_same(optimizer.state_dict(), saved)
        run(optimizer, params, range(2, 4))

    @compiled_and_eager
    def test_step_hooks_and_their_order(self, device, dtype, optim_info, compile):
        params, closure = problem(dtype)
        optimizer = ours(optim_info, params, compile)
        bystander = ours(optim_info, parameters(dtype), compile)
        calls = []

        def note(what):
            def hook(opt, args, kwargs):
                # args holds the optimizer too
                calls.append((what, opt is optimizer, len(args), sorted(kwargs)))

            return hook

        handles = [
            register_optimizer_step_post_hook(note("global post")),
            optimizer.register_step_post_hook(note("post")),
            optimizer.register_step_post_hook(note("second post")),
            optimizer.register_step_pre_hook(note("pre")),
            register_optimizer_step_pre_hook(note("global pre")),
        ]
        order = ["global pre", "pre", "post", "second post", "global post"]
        try:
            optimizer.step()
            assert calls == [(what, True, 1, []) for what in order]
            calls.clear()
            optimizer.step(closure=closure)
            assert calls == [(what, True, 1, ["closure"]) for what in order]
            calls.clear()
            bystander.step()
            assert calls == [(what, False, 1, []) for what in ("global pre", "global post")]
        finally:
            for handle in handles:
                handle.remove()
        calls.clear()
        optimizer.step()
        assert calls == []

    @compiled_and_eager
    def test_step_hooks_see_and_change_the_step(self, device, dtype, optim_info, compile):
        params, closure = problem(dtype)
        optimizer = ours(optim_info, params, compile)
        start = copy.deepcopy(params)
        seen = SimpleNamespace()

        def before(opt, args, kwargs):
            seen.before = copy.deepcopy(params)
            return args, {"closure": closure}

        def after(opt, args, kwargs):
            seen.after = copy.deepcopy(params)
            seen.kwargs = kwargs

        pre, post = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
        assert optimizer.step() > 0
        self.assert_same(seen.before, start)
        self.assert_same(seen.after, params)
        assert not any(torch.equal(a, b) for a, b in zip(seen.before, seen.after, strict=True))
        assert seen.kwargs == {"closure": closure}
        pre.remove()
        post.remove()
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: "nonsense")
        with pytest.raises(RuntimeError, match="must return None or a tuple"):
            optimizer.step()

    # ---- copies

    @compiled_and_eager
    def test_copies_continue_the_run(self, device, dtype, optim_info, compile):
        for kwargs, route in itertools.product(configurations(optim_info), OPTIMIZER_ROUTES.values()):
            params = parameters(dtype)
            optimizer = ours(optim_info, params, compile, **kwargs, on_realloc="raise")
            # before its first step, and in mid-training
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
        # weight decay: in the cases of the database, gradients are scaled only where there is some
        optimizer = ours(optim_info, params, compile, weight_decay=0.1, max_grad_norm=1.0)
        run(optimizer, params, range(3))
        for route in OPTIMIZER_ROUTES.values():
            copied = public(route(optimizer))
            assert copied.keys() == public(optimizer).keys()
            # keyed by tensors, which compare by identity
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
            # a backend is a service: the copy's is the same one, with all that was compiled
            assert copied.backend is optimizer.backend
            run(copied, copied_params, range(2, 4))
            run(optimizer, params, range(2, 4))
            self.assert_same(copied_params, params)
            assert copied.explain().backends == (name,)


instantiate_device_type_tests(TestTorchDatabase, globals(), only_for=("cpu",))
