"""Several edits of watched modules between two steps or over several steps, and what the record of modules holds."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import compiled_optim as co
from tests.helpers import params_of

from .module_edits import EDITS, Net, linear
from .test_module_edits import backward, names_in

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")


def watched(**options):
    net = Net()
    return net, co.SGD(net, lr=1.0, compile=False, **options)


def test_a_parameter_is_replaced_in_a_layer_that_moves():
    net, optimizer = watched()
    net.layers.insert(0, linear())
    net.layers[2].weight = nn.Parameter(torch.ones(3, 3))
    backward(net, 0)
    optimizer.step()
    assert names_in(optimizer)[:3] == ["layers.1.weight", "layers.2.weight", "layers.3.weight"]
    assert params_of(optimizer)[1] is net.layers[2].weight
    assert [event.split(":")[0] for event in optimizer.explain().events] == [
        "parameter 'layers.1.weight'",
        "parameter 'layers.0.weight'",
    ]


def test_all_layers_that_are_left_are_replaced():
    """Each new parameter comes into the group of the layer that it belongs to."""
    net = Net()
    groups = [{"params": [(f"layers.{i}.weight", net.layers[i].weight)], "lr": i + 1.0} for i in range(3)]
    optimizer = co.SGD(groups, lr=1.0, compile=False)
    optimizer.watch(net)
    net.layers.pop(0)
    for layer in net.layers:
        layer.weight = nn.Parameter(torch.zeros(3, 3))
    backward(net, 0)
    optimizer.step()
    assert [group["param_names"] for group in optimizer.param_groups] == [[], ["layers.0.weight"], ["layers.1.weight"]]
    assert torch.equal(net.layers[0].weight, -2 * net.layers[0].weight.grad)
    assert torch.equal(net.layers[1].weight, -3 * net.layers[1].weight.grad)


def test_a_parameter_is_set_again_in_a_layer_that_has_moved():
    net, optimizer = watched()
    net.layers[1].weight = None
    optimizer.step()
    net.layers.insert(0, nn.Identity())
    optimizer.step()
    net.layers[2].weight = nn.Parameter(torch.ones(3, 3))
    net.layers[0].weight = nn.Parameter(torch.ones(3, 3))  # another layer is now where the first one was
    optimizer.step()
    assert names_in(optimizer)[-1] == "layers.2.weight"
    assert params_of(optimizer)[-1] is net.layers[2].weight
    assert len(params_of(optimizer)) == 7
    assert any("'layers.0.weight': added" in event for event in optimizer.explain().events)


def test_an_edit_and_its_reverse_are_no_change():
    net, optimizer = watched(on_realloc="raise")
    before = names_in(optimizer)
    layer = net.layers.pop(0)
    net.layers.insert(0, layer)
    bias = net.head.bias
    net.head.bias = None
    net.head.bias = bias
    optimizer.step()
    assert names_in(optimizer) == before
    assert optimizer.explain().events == ()


@pytest.mark.parametrize("container", ["layers", "seq"])
def test_an_edit_after_one_that_was_reversed(container):
    """``pop`` and ``del`` give the container a new dict of its layers, also if the names are those of before."""
    net, optimizer = watched()
    layers = net.get_submodule(container)
    count = len(layers)
    layers.append(linear())
    del layers[-1]
    for _ in range(2):  # with and without a step in between
        layers.insert(0, linear())
        optimizer.step()
    names = [name for name in names_in(optimizer) if name.startswith(container)]
    assert names == [f"{container}.{i + 2}.weight" for i in range(count)]


def test_a_removed_layer_comes_back():
    """The same object is a new parameter, because the optimizer has dropped its state."""
    net, optimizer = watched()
    layer = net.layers.pop(-1)
    optimizer.step()
    net.layers.append(layer)
    optimizer.step()
    assert params_of(optimizer)[-1] is layer.weight
    assert names_in(optimizer)[-1] == "layers.2.weight"


def test_several_watched_modules():
    one, two = Net(), Net()
    groups = [{"params": list(one.named_parameters("one"))}, {"params": list(two.named_parameters("two"))}]
    optimizer = co.SGD(groups, lr=1.0, compile=False)
    optimizer.watch(one)
    optimizer.watch(two)
    one.layers.insert(0, linear())
    two.head.weight = nn.Parameter(torch.ones(3, 3))
    two.seq.append(one.seq.pop(1))  # a layer moves to the other module
    backward(nn.ModuleList([one, two]), 0)
    optimizer.step()
    names = [*(f"one.layers.{i}.weight" for i in (1, 2, 3)), "one.seq.0.weight", "one.seq.2.weight"]
    assert optimizer.param_groups[0]["param_names"] == [*names, "one.head.weight", "one.head.bias"]
    assert optimizer.param_groups[0]["params"][4] is two.seq[2].weight
    assert optimizer.param_groups[1]["params"][5] is two.head.weight
    events = [event.split(":")[0] for event in optimizer.explain().events]
    assert events == ["parameter 'two.head.weight'", "parameter 'Net.layers.0.weight'"]


def test_edits_one_after_the_other_give_names_that_are_unique_and_right():
    """All pairs of edits, with and without a step in between."""
    pairs = 0
    for first in EDITS.values():
        for second in EDITS.values():
            for steps in (False, True):
                torch.manual_seed(0)
                net = Net()
                first.prepare(net)
                optimizer = co.SGD(net, lr=1.0, compile=False)
                try:
                    first.edit(net)
                    if steps:
                        optimizer.step()
                    second.edit(net)
                except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
                    continue  # the second edit needs what the first has changed
                optimizer.step()
                names = names_in(optimizer)
                assert len({*names}) == len(names)
                assert [id(net.get_parameter(name)) for name in names] == [id(param) for param in params_of(optimizer)]
                pairs += 1
    assert pairs > 1500


def test_removed_layers_are_not_kept_alive():
    net, optimizer = watched()
    layer = weakref.ref(net.layers[1])
    del net.layers[1]
    optimizer.step()
    gc.collect()
    assert layer() is None
