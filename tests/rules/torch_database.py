"""Tests of our classes with torch's own optimizer database, ``torch.testing._internal.common_optimizers``.

The database lists constructor arguments, invalid arguments and schedulers for each optimizer of torch.optim, and
torch's test_optim.py uses it. The tests here use it for every class that torch.optim has too, compiled and eager, and
compare each with the class of the same name in torch.optim.

What does not apply to us, and why:

* Inputs for which our classes raise no error, or another one. They are listed in ``OTHERWISE`` in
  test_torch_database_construction.py, and ``test_constructor_errors`` keeps that table exact:

  - "lr as a Tensor is not supported for capturable=False and foreach=True", and the same of betas: hyperparameters
    reach a step as numbers in either case, and ``foreach`` and ``capturable`` have no effect;
  - "`fused` and `foreach` cannot be `True` together": neither has an effect, so they cannot clash;
  - "`fused` does not support `differentiable`": ``differentiable=True`` alone is a NotImplementedError here.

* ``differentiable`` configurations, and torch's tests of second-order steps: see above.
* torch.optim.LBFGS, which needs the loss several times a step, SparseAdam, for sparse gradients, and Muon, which is not
  elementwise: there are no classes of these names here.
* Complex parameters for Adafactor: torch refuses them in a step, and so do we.
* Sparse gradients (``supports_sparse``, ``metadata_for_sparse``, which torch.optim.SGD and Adagrad have): refused, for
  all classes.
* States before the first step, which torch.optim.Adagrad creates in its constructor: we create them in the first step.
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
import pickle
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db, optims
from torch.testing._internal.common_utils import TestCase, parametrize

import compiled_optim as co
from catalog import CATALOG

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
    for cls, info in ((getattr(co, name), TORCH_INFOS[name]) for name, entry in CATALOG.items() if entry.in_torch)
]

SWITCHES = {"foreach", "fused", "capturable", "differentiable"}

# options for the tests that need only one configuration, but with all states
STATEFUL = {name: entry.typical for name, entry in CATALOG.items()}

TOLERANCE = {torch.float32: 2e-6, torch.complex64: 2e-6, torch.float64: 1e-12, torch.complex128: 1e-12}


def saved_and_loaded(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


# the ways to copy or save and load a state dict or a whole optimizer
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
    """Return the constructor arguments of the database: those for the CPU, then those only other devices have."""
    kwargs = [case.kwargs for device in devices for case in info.optim_inputs_func(device)]
    return list({repr(each): each for each in kwargs}.values())


def ours(info, params, compile, **kwargs):
    return info.optim_cls(params, compile=compile, **copy.deepcopy(kwargs))


def theirs(info, params, **kwargs):
    """Return an optimizer of torch.optim; tensor arguments are copied, because schedulers write to a tensor lr."""
    kwargs = {name: value for name, value in copy.deepcopy(kwargs).items() if name not in SWITCHES}
    return TORCH_INFOS[info.name].optim_cls(params, **kwargs)


def both(info, compile):
    """Return two functions that construct our optimizer and torch's from parameters or groups and options."""
    return partial(ours, info, compile=compile), partial(theirs, info)


def parameters(dtype=torch.float32, shapes=((10, 5), (10,), (), (4, 3, 2))):
    """Return new parameters, with the same values on every call.

    None is empty, because torch.optim.Adafactor cannot step such a parameter; see test_parity.py.
    """
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, dtype=dtype, generator=generator)) for shape in shapes]


def run(optimizer, params, steps, schedulers=()):
    """Take steps with gradients that depend only on the number of the step."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, dtype=param.dtype, generator=generator).to(param.device)
        optimizer.step()
        for scheduler in schedulers:
            # a metric that never improves
            scheduler.step(*[1.0] if isinstance(scheduler, ReduceLROnPlateau) else [])


def states(optimizer, params):
    """Return the states of parameters that were stepped. torch.optim.Adagrad has states before the first step too."""
    found = [optimizer.state.get(param, {}) for param in params]
    return [values if values.get("step") != 0 else {} for values in found]


def problem(dtype, contiguous=True):
    """Return two parameters, and a closure that computes the squared error of a linear map."""
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


class DatabaseTestCase(TestCase):
    """Test case that compares nested structures of tensors, bit for bit or up to rounding."""

    def assert_same(self, actual, expected):
        """Assert that two nested structures of tensors are equal bit for bit."""
        self.assertEqual(actual, expected, rtol=0, atol=0)  # noqa: PT009

    def assert_parity(self, actual, expected, scale=0.0):
        """Assert that two nested structures have the same keys, dtypes and shapes, and tensors equal up to rounding.

        The norm of a difference is compared with the norm of the expected tensor, or with ``scale`` if that is larger.
        """
        if isinstance(expected, Tensor):
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
            size = max(expected.detach().norm().item(), scale)
            assert (actual.detach() - expected.detach()).norm().item() <= TOLERANCE[expected.dtype] * size
        elif isinstance(expected, dict):
            assert actual.keys() == expected.keys()
            for key in expected:
                # gradients of opposite signs cancel in an average, but their rounding errors do not
                self.assert_parity(actual[key], expected[key], 0.1 if key in ("exp_avg", "momentum_buffer") else 0.0)
        elif isinstance(expected, list | tuple):
            for one, other in zip(actual, expected, strict=True):
                self.assert_parity(one, other, scale)
        else:
            assert actual == expected
