"""What a user reads when a parameter was reallocated, pinned for every kind of change."""

from __future__ import annotations

import pickle
import re

import torch
from expecttest import TestCase
from torch import nn

import compiled_optim as co
from compiled_optim.guard.change import Description, compare


def refused(mutate, make=lambda: nn.Linear(3, 2), watch=True):
    """The message of the step after a mutation, addresses blanked out."""
    net = make()
    optimizer = co.AdamW(net if watch else net.parameters(), compile=False, on_realloc="raise")
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    mutate(net)
    try:
        optimizer.step()
    except co.ReallocationError as error:
        return re.sub(r"0x[0-9a-f]+", "0x...", str(error))
    raise AssertionError("no ReallocationError")


class TestMessages(TestCase):
    def test_storage(self):
        def mutate(net):
            net.weight.data = net.weight.data.clone()

        self.assertExpectedInline(
            refused(mutate),
            """\
a parameter was reallocated since the optimizer last saw it; nothing was updated
  parameter 'weight': storage changed from 0x... to 0x...
    likely by `p.data = ...`, a resized storage, or converting the model and back
two ways out:
  - convert or replace parameters before the optimizer is constructed; converting back does not help,
    because it allocates new storage
  - set optimizer.on_realloc = "recompile", the default: the optimizer follows every change and logs it""",
        )

    def test_storage_without_names(self):
        def mutate(net):
            net.weight.data = net.weight.data.clone()

        self.assertExpectedInline(
            refused(mutate, watch=False),
            """\
a parameter was reallocated since the optimizer last saw it; nothing was updated
  parameter 0 of group 0: storage changed from 0x... to 0x...
    likely by `p.data = ...`, a resized storage, or converting the model and back
two ways out:
  - convert or replace parameters before the optimizer is constructed; converting back does not help,
    because it allocates new storage
  - set optimizer.on_realloc = "recompile", the default: the optimizer follows every change and logs it""",
        )

    def test_dtype(self):
        self.assertExpectedInline(
            refused(lambda net: net.half()),
            """\
2 parameters were reallocated since the optimizer last saw them; nothing was updated
  parameter 'weight': dtype changed from torch.float32 to torch.float16
    likely by `model.half()`
  parameter 'bias': dtype changed from torch.float32 to torch.float16
    likely by `model.half()`
two ways out:
  - convert or replace parameters before the optimizer is constructed; converting back does not help,
    because it allocates new storage
  - set optimizer.on_realloc = "recompile", the default: the optimizer follows every change and logs it""",
        )

    def test_strides(self):
        def mutate(net):
            net.weight.data = net.weight.data.t().contiguous().t()

        self.assertExpectedInline(
            refused(mutate),
            """\
a parameter was reallocated since the optimizer last saw it; nothing was updated
  parameter 'weight': strides changed from (3, 1) to (1, 2)
    likely by `model.to(memory_format=...)`, or `p.data = ...` with a transposed tensor
two ways out:
  - convert or replace parameters before the optimizer is constructed; converting back does not help,
    because it allocates new storage
  - set optimizer.on_realloc = "recompile", the default: the optimizer follows every change and logs it""",
        )

    def test_memory_format(self):
        message = refused(lambda net: net.to(memory_format=torch.channels_last), lambda: nn.Conv2d(2, 3, 3, bias=False))
        self.assertExpectedInline(
            message,
            """\
a parameter was reallocated since the optimizer last saw it; nothing was updated
  parameter 'weight': strides changed from (18, 9, 3, 1) to (18, 1, 6, 2)
    likely by `model.to(memory_format=...)`, or `p.data = ...` with a transposed tensor
two ways out:
  - convert or replace parameters before the optimizer is constructed; converting back does not help,
    because it allocates new storage
  - set optimizer.on_realloc = "recompile", the default: the optimizer follows every change and logs it""",
        )

    def test_shape(self):
        def mutate(net):
            net.weight.data = torch.ones(5, 3)

        self.assertExpectedInline(
            refused(mutate),
            """\
a parameter was reallocated since the optimizer last saw it; nothing was updated
  parameter 'weight': shape changed from (2, 3) to (5, 3)
    likely by `p.data = ...` with a tensor of another shape
two ways out:
  - convert or replace parameters before the optimizer is constructed; converting back does not help,
    because it allocates new storage
  - set optimizer.on_realloc = "recompile", the default: the optimizer follows every change and logs it""",
        )

    def test_device_and_dtype(self):
        before = Description.from_tensor(torch.ones(2, 3))
        device = before._replace(device=torch.device("cuda", 0), dtype=torch.bfloat16)
        changes = [compare("parameter 'a'", before, device), compare("parameter 'b'", device, before)]
        self.assertExpectedInline(
            str(co.ReallocationError(changes)),
            """\
2 parameters were reallocated since the optimizer last saw them; nothing was updated
  parameter 'a': device changed from cpu to cuda:0 and dtype changed from torch.float32 to torch.bfloat16
    likely by `model.to('cuda:0')`
  parameter 'b': device changed from cuda:0 to cpu and dtype changed from torch.bfloat16 to torch.float32
    likely by `model.cpu()`
two ways out:
  - convert or replace parameters before the optimizer is constructed; converting back does not help,
    because it allocates new storage
  - set optimizer.on_realloc = "recompile", the default: the optimizer follows every change and logs it""",
        )

    def test_replaced(self):
        def mutate(net):
            net.weight = nn.Parameter(torch.ones(5, 3, dtype=torch.float64))

        self.assertExpectedInline(
            refused(mutate),
            """\
a parameter was reallocated since the optimizer last saw it; nothing was updated
  parameter 'weight': replaced by a new object: torch.float32 (2, 3) on cpu became torch.float64 (5, 3) on cpu
    likely by `module.weight = nn.Parameter(...)`, a new submodule, or load_state_dict(assign=True)
two ways out:
  - convert or replace parameters before the optimizer is constructed; converting back does not help,
    because it allocates new storage
  - set optimizer.on_realloc = "recompile", the default: the optimizer follows every change and logs it""",
        )

    def test_replaced_by_a_known_one(self):
        def mutate(net):
            net[1].weight = net[0].weight

        make = lambda: nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2)))  # noqa: E731
        self.assertExpectedInline(
            refused(mutate, make),
            """\
a parameter was reallocated since the optimizer last saw it; nothing was updated
  parameter '1.weight': replaced by parameter '0.weight', which the optimizer has already
    likely by `module.weight = other.weight`
two ways out:
  - convert or replace parameters before the optimizer is constructed; converting back does not help,
    because it allocates new storage
  - set optimizer.on_realloc = "recompile", the default: the optimizer follows every change and logs it""",
        )

    def test_removed(self):
        def mutate(net):
            net.bias = None

        self.assertExpectedInline(
            refused(mutate),
            """\
a parameter was reallocated since the optimizer last saw it; nothing was updated
  parameter 'bias': removed from its module; it was torch.float32 (2,) on cpu
    likely by `module.weight = None`, `del module.weight`, or a submodule taken out
two ways out:
  - convert or replace parameters before the optimizer is constructed; converting back does not help,
    because it allocates new storage
  - set optimizer.on_realloc = "recompile", the default: the optimizer follows every change and logs it""",
        )

    def test_many(self):
        make = lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))  # noqa: E731
        lines = refused(lambda net: net.double(), make).splitlines()
        self.assertExpectedInline(
            "\n".join([lines[0], *lines[-7:]]),
            """\
12 parameters were reallocated since the optimizer last saw them; nothing was updated
  parameter '4.bias': dtype changed from torch.float32 to torch.float64
    likely by `model.double()`
  ... and 2 more, in this exception's .changes
two ways out:
  - convert or replace parameters before the optimizer is constructed; converting back does not help,
    because it allocates new storage
  - set optimizer.on_realloc = "recompile", the default: the optimizer follows every change and logs it""",
        )

    def test_the_error_survives_pickling(self):
        change = compare("p", *(Description.from_tensor(torch.ones(n)) for n in (2, 3)))
        error = pickle.loads(pickle.dumps(co.ReallocationError([change])))
        assert error.changes == (change,)
