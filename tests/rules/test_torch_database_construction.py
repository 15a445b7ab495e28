"""torch's optimizer database: constructor arguments that are errors, refused options and gradients, and repr."""

import copy
import re
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import Parameter
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import OptimizerErrorEnum

from .torch_database import DatabaseTestCase, compiled_and_eager, configurations, ours, parameters, run, theirs

# error inputs of the database for which our classes raise another error, or none (None)
OF_FUSED = {
    "`fused` and `foreach` cannot be `True` together": None,
    "`fused` does not support `differentiable`": NotImplementedError,
}
OF_ADAM = {
    "lr as Tensor doesn't work with foreach & not capturable": None,
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True": None,
    **OF_FUSED,
}
OTHERWISE = {"Adam": OF_ADAM, "AdamW": OF_ADAM, "Adagrad": OF_FUSED}


def error_inputs(info, dtype):
    """Return the error inputs for the CPU and for CUDA; those for CUDA are made with fake tensors."""
    with FakeTensorMode():
        cuda = info.optim_error_inputs_func("cuda", dtype)
    for error in cuda:
        error.optimizer_error_input.params = None
    return [*info.optim_error_inputs_func("cpu", dtype), *cuda]


class TestConstruction(DatabaseTestCase):
    @compiled_and_eager
    def test_constructor_errors(self, device, dtype, optim_info, compile):
        otherwise = {}
        for error in error_inputs(optim_info, dtype):
            case = error.optimizer_error_input
            params = [Parameter(torch.ones(1, 1))] if case.params is None else case.params
            raised = None
            with warnings.catch_warnings():
                # the database lists the warning about duplicate parameters as an error
                warnings.simplefilter("error")
                try:
                    optimizer = ours(optim_info, params, compile, **case.kwargs)
                    if error.error_on == OptimizerErrorEnum.STEP_ERROR and case.params is not None:
                        optimizer.step()
                except Exception as exception:
                    raised = exception
            if error.error_on == OptimizerErrorEnum.STEP_ERROR and case.params is None:
                continue  # the same on the CPU
            if not (isinstance(raised, error.error_type) and re.search(error.error_regex, str(raised))):
                otherwise[case.desc] = raised and type(raised)
        assert otherwise == OTHERWISE.get(optim_info.name, {})

    @compiled_and_eager
    def test_what_works_here_and_not_in_torch_computes_the_same(self, device, dtype, optim_info, compile):
        working = [desc for desc, instead in OTHERWISE.get(optim_info.name, {}).items() if instead is None]
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
        with pytest.raises(RuntimeError, match=f"{optim_info.name} does not support sparse gradients"):
            optimizer.step()
        self.assert_same(params, before)
        assert optimizer.state_dict()["state"] == {}

    @compiled_and_eager
    def test_optimizer_can_be_printed(self, device, dtype, optim_info, compile):
        for kwargs in configurations(optim_info, ["cpu"]):
            params = parameters(dtype)
            optimizer, twin = ours(optim_info, params, compile, **kwargs), theirs(optim_info, params, **kwargs)
            # ours also has the switches that torch.optim lacks: "capturable" in SGD, "fused" in Adadelta and RMSprop
            assert set(repr(twin).splitlines()) <= set(repr(optimizer).splitlines())
            run(optimizer, params, range(1))
            assert optim_info.name in repr(optimizer)


instantiate_device_type_tests(TestConstruction, globals(), only_for=("cpu",))
