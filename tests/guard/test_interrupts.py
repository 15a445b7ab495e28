"""A KeyboardInterrupt at any moment of a step leaves each parameter as before the step or as after it.

Value, states and step count of a parameter belong together. Groups and names are those before or those after. The next
step continues from there. Set GUARD_INTERRUPTS=all for all cases and moments; by default each line is interrupted once.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.engine.flat_layout import CHUNKS
from tests.backends.recording_backend import RecordingBackend
from tests.helpers import assert_close, params_of

from .interrupts import moments, moments_of

ALL = os.environ.get("GUARD_INTERRUPTS") == "all"


class Net(nn.Module):
    """Two dtypes, so that there are two buckets, and a parameter that is not dense."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(3, generator=generator))
        self.b = nn.Parameter(torch.randn(2, generator=generator, dtype=torch.float64))
        self.c = nn.Parameter(torch.randn(4, 6, generator=generator)[:, ::2])
        self.d = nn.Parameter(torch.randn(5, generator=generator))


def moved(net: Net) -> None:
    net.a.data = net.a.data.clone()


def replaced(net: Net) -> None:
    net.a = nn.Parameter(torch.ones(3))


def removed(net: Net) -> None:
    net.b = None


def cast(net: Net) -> None:
    net.c.data = net.c.data.double()
    net.c.grad = None


def renamed(net: Net) -> None:
    net.e = net.d
    del net.d


def all_of_them(net: Net) -> None:
    for change in (moved, removed, cast, renamed):
        change(net)
    net.e = nn.Parameter(torch.ones(5))
    net.f = nn.Parameter(torch.ones(1))


def skipped(net: Net) -> None:
    net.a.grad = None


def nothing(net: Net) -> None:
    pass


CASES = {
    "first": (0, nothing),
    "ordinary": (2, nothing),
    "a gradient is None": (2, skipped),
    "moved": (2, moved),
    "replaced": (2, replaced),
    "removed": (2, removed),
    "cast": (2, cast),
    "renamed": (2, renamed),
    "all of them": (2, all_of_them),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.1, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},  # does not count steps
    "NAdam": {"lr": 0.1},  # keeps a number in addition to the count
}


class Content(NamedTuple):
    """The value and the states of a parameter."""

    value: Tensor
    states: dict[str, Tensor]

    def tensors(self) -> list[Tensor]:
        return [self.value, *self.states.values()]

    def equals(self, other: Content) -> bool:
        """Return whether both are the same bit for bit, apart from a conversion to a wider dtype."""
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        return self.states.keys() == other.states.keys() and all(torch.equal(a.double(), b.double()) for a, b in pairs)


def content(optimizer, param) -> Content:
    states = optimizer.state.get(param) or {}
    return Content(param.detach().clone(), {name: states[name].clone() for name in sorted(states)})


def contents(optimizer, params) -> dict[Tensor, Content]:
    return {param: content(optimizer, param) for param in params}


def backward(net, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in net.parameters():
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)


def prepared(name, case, compiled, clip, layout=None):
    """Return a module and an optimizer that is about to make the step of a case."""
    steps, change = CASES[case]
    net = Net()
    optimizer = getattr(co, name)(net, **OPTIMIZERS[name], compile=compiled, max_grad_norm=clip, layout=layout)
    for seed in range(steps):
        backward(net, seed)
        optimizer.step()
    if change is not skipped:
        change(net)
    backward(net, 7)
    if change is skipped:
        change(net)
    return net, optimizer


def torch_step(name, clip, before: dict[Tensor, Content]) -> dict[Tensor, Content]:
    """Return what a step of torch.optim makes of these parameters, with their current gradients."""
    twins = {param: nn.Parameter(old.value.clone()) for param, old in before.items()}
    twin = getattr(torch.optim, name)(twins.values(), **OPTIMIZERS[name], foreach=False)
    for param, old in before.items():
        twins[param].grad = None if param.grad is None else param.grad.clone()
        if old.states:
            twin.state[twins[param]] = {
                key: state.clone() if state.ndim == 0 else state.to(param.dtype, copy=True)
                for key, state in old.states.items()
            }
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(twins.values(), clip)
    twin.step()
    return {param: content(twin, twins[param]) for param in before}


def assert_is(actual: Content, expected: Content) -> None:
    assert actual.states.keys() == expected.states.keys()
    assert_close(actual.tensors(), expected.tensors(), 2e-6)


def names_in(optimizer):
    return list(optimizer.param_groups[0]["param_names"])


def interrupt_everywhere(name, case, compiled, clip, layout=None):
    """Interrupt the step of a case at all moments, one after the other, and check what is left."""
    for _ in range(2):  # the second time, all caches are filled
        net, optimizer = prepared(name, case, compiled, clip, layout)
        seen = moments_of(optimizer.step)
    names_after = names_in(optimizer)
    first = {moment: number for number, moment in reversed([*enumerate(seen)])}
    for number in range(len(seen)) if ALL else sorted(first.values()):
        net, optimizer = prepared(name, case, compiled, clip, layout)
        held = dict(zip(names_in(optimizer), params_of(optimizer), strict=True))
        ids = [id(param) for param in params_of(optimizer)]
        kept = [net.get_parameter(each) for each in names_after]
        before = contents(optimizer, {**dict.fromkeys(held.values()), **dict.fromkeys(kept)})
        after = torch_step(name, clip, {param: before[param] for param in kept})
        grad_mode = torch.is_grad_enabled()
        try:
            with moments(lambda at, _, number=number: at == number):
                optimizer.step()
        except KeyboardInterrupt:
            pass
        where = seen[number]
        assert torch.is_grad_enabled() == grad_mode, where
        found = names_in(optimizer), [id(param) for param in params_of(optimizer)]
        assert found in ((list(held), ids), (names_after, [id(param) for param in kept])), where
        try:
            for param in params_of(optimizer):
                if not content(optimizer, param).equals(before[param]):
                    assert_is(content(optimizer, param), after[param])
            backward(net, 8)
            expected = torch_step(name, clip, contents(optimizer, kept))
            optimizer.step()
            assert names_in(optimizer) == names_after
            assert params_of(optimizer) == kept
            for param in kept:
                assert_is(content(optimizer, param), expected[param])
        except Exception as error:
            error.add_note(f"interrupted at moment {number}, {where}")
            raise


@pytest.mark.parametrize("case", CASES if ALL else ["first", "ordinary", "a gradient is None", "all of them"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled(name, case):
    interrupt_everywhere(name, case, True, 1.0 if name == "AdamW" else None)


@pytest.mark.parametrize("case", CASES if ALL else ["first", "ordinary"])
def test_eager(case):
    """Here an interrupt inside the formula leaves a part of a step, as in torch.optim, so there is none."""
    interrupt_everywhere("AdamW", case, False, None)


@pytest.mark.parametrize("case", CASES if ALL else ["first", "ordinary", "a gradient is None", "all of them"])
@pytest.mark.parametrize("name", OPTIMIZERS if ALL else ["AdamW"])
def test_flat(name, case):
    interrupt_everywhere(name, case, False, 1.0 if name == "AdamW" else None, "flat")


def test_between_two_chunks_of_a_flat_buffer():
    """A parameter may lie in two chunks, so the others follow before the exception is raised."""
    param = nn.Parameter(torch.ones(CHUNKS[-1] + 5))
    optimizer = co.AdamW([param], **OPTIMIZERS["AdamW"], compile=False, layout="flat")
    param.grad = torch.ones_like(param)
    optimizer.step()
    expected = torch_step("AdamW", None, contents(optimizer, [param]))
    (bucket,) = optimizer._stepper._plan.buckets
    first, second = bucket._update.calls
    left = [KeyboardInterrupt]

    def interrupted_once(grads):
        for error in left:
            left.clear()
            raise error
        return second.call(grads)

    bucket._update.calls = [first, second._replace(call=interrupted_once)]
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert_is(content(optimizer, param), expected[param])


def test_between_two_calls_of_a_step():
    """A backend may need several calls for a list. Parameters of the first are counted, others are not."""

    class Backend(RecordingBackend):
        limit = 1

    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = co.AdamW(params, **OPTIMIZERS["AdamW"], backend=Backend())
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = contents(optimizer, params)
    expected = torch_step("AdamW", None, before)
    (bucket,) = optimizer._stepper._plan.buckets
    first, second = bucket._update.calls

    def interrupted(grads):
        raise KeyboardInterrupt

    bucket._update.calls = [first, second._replace(call=interrupted)]
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert_is(content(optimizer, params[0]), expected[params[0]])
    assert content(optimizer, params[1]).equals(before[params[1]])
    expected = torch_step("AdamW", None, contents(optimizer, params))
    optimizer.step()
    for param in params:
        assert_is(content(optimizer, param), expected[param])


def test_grad_mode_is_restored_if_the_end_of_a_step_is_interrupted():
    """Also if gradients were disabled before."""
    _, optimizer = prepared("SGD", "ordinary", False, None)
    last = len(moments_of(optimizer.step)) - 1
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode), moments(lambda number, _: number == last):
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            assert torch.is_grad_enabled() == grad_mode
