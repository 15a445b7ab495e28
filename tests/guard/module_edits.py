"""What users do to the structure of a watched module, and what docs/guard.md says that the optimizer does then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune


def linear() -> nn.Linear:
    return nn.Linear(3, 3, bias=False)


class Net(nn.Module):
    """A ModuleList, a Sequential and a layer with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(3))
        self.seq = nn.Sequential(linear(), linear())
        self.head = nn.Linear(3, 3)


NAMES = ["layers.0.weight", "layers.1.weight", "layers.2.weight", "seq.0.weight", "seq.1.weight"]
NAMES += ["head.weight", "head.bias"]


@dataclass(frozen=True)
class Edit:
    """An edit of a Net, and what follows from it.

    ``names`` are the new names of parameters of the optimizer, by their old ones: several for one that was replaced by
    several, and none for one that was removed. ``kinds`` are the kinds of changes, which "raise" refuses. ``added`` are
    the names of parameters that are reported and not stepped.
    """

    edit: Callable[[Net], object]
    names: dict[str, Sequence[str]]
    kinds: Sequence[str] = ()
    added: Sequence[str] = ()
    fresh: Sequence[str] = ()
    prepare: Callable[[Net], object] = lambda net: None
    can_be_copied: bool = True


class Scaled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale


class Exp(nn.Module):
    """A parametrization with an inverse, so that the values of the parameter change."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.exp()

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.abs().log()


def wrap(net: Net) -> None:
    net.seq[0] = nn.Sequential(net.seq[0], linear())


def rename(net: Net) -> None:
    net.tail = net.head
    del net.head


def rename_parameter(net: Net) -> None:
    net.head.kernel = net.head.weight
    del net.head.weight


def swap(net: Net) -> None:
    net.layers[0], net.layers[2] = net.layers[2], net.layers[0]


def shift(net: Net) -> None:
    net.layers.pop(0)
    net.layers.append(linear())


def frozen(net: Net) -> None:
    net.layers.append(linear().requires_grad_(False))


def tie(net: Net) -> None:
    net.head.weight = net.layers[0].weight


def untie(net: Net) -> None:
    net.head.weight = nn.Parameter(torch.randn(3, 3))


def remove_parametrization(net: Net, keep_output: bool) -> None:
    parametrize.remove_parametrizations(net.head, "weight", leave_parametrized=keep_output)


def parametrize_exp(net: Net) -> None:
    parametrize.register_parametrization(net.head, "weight", Exp())


ORIGINAL = "head.parametrizations.weight.original"
BY_ONE = {"layers.0.weight": ["layers.1.weight"], "layers.1.weight": ["layers.2.weight"]}
BY_ONE |= {"layers.2.weight": ["layers.3.weight"]}
BACK_BY_ONE = {"layers.0.weight": [], "layers.1.weight": ["layers.0.weight"], "layers.2.weight": ["layers.1.weight"]}

EDITS = {
    "ModuleList.insert": Edit(lambda net: net.layers.insert(0, linear()), BY_ONE, added=["layers.0.weight"]),
    "ModuleList.append": Edit(lambda net: net.layers.append(linear()), {}, added=["layers.3.weight"]),
    "ModuleList.extend": Edit(
        lambda net: net.layers.extend([linear(), linear()]), {}, added=["layers.3.weight", "layers.4.weight"]
    ),
    "ModuleList.pop(0)": Edit(lambda net: net.layers.pop(0), BACK_BY_ONE, ["removed"]),
    "ModuleList.pop(-1)": Edit(lambda net: net.layers.pop(-1), {"layers.2.weight": []}, ["removed"]),
    "ModuleList del": Edit(
        lambda net: net.layers.__delitem__(1),
        {"layers.1.weight": [], "layers.2.weight": ["layers.1.weight"]},
        ["removed"],
    ),
    "ModuleList pop(0), append": Edit(shift, BACK_BY_ONE, ["removed"], ["layers.2.weight"]),
    "ModuleList[1] = ...": Edit(
        lambda net: net.layers.__setitem__(1, linear()), {}, ["replaced"], fresh=["layers.1.weight"]
    ),
    "ModuleList swap": Edit(swap, {"layers.0.weight": ["layers.2.weight"], "layers.2.weight": ["layers.0.weight"]}),
    "ModuleList reversed": Edit(
        lambda net: setattr(net, "layers", nn.ModuleList(reversed(net.layers))),
        {"layers.0.weight": ["layers.2.weight"], "layers.2.weight": ["layers.0.weight"]},
    ),
    "Sequential[1] = ...": Edit(lambda net: net.seq.__setitem__(1, linear()), {}, ["replaced"], fresh=["seq.1.weight"]),
    "Sequential del": Edit(
        lambda net: net.seq.__delitem__(0), {"seq.0.weight": [], "seq.1.weight": ["seq.0.weight"]}, ["removed"]
    ),
    "Sequential.pop": Edit(lambda net: net.seq.pop(1), {"seq.1.weight": []}, ["removed"]),
    "Sequential.insert": Edit(
        lambda net: net.seq.insert(0, linear()),
        {"seq.0.weight": ["seq.1.weight"], "seq.1.weight": ["seq.2.weight"]},
        added=["seq.0.weight"],
    ),
    "Sequential.append": Edit(lambda net: net.seq.append(linear()), {}, added=["seq.2.weight"]),
    "wrapped": Edit(wrap, {"seq.0.weight": ["seq.0.0.weight"]}, added=["seq.0.1.weight"]),
    "Identity": Edit(lambda net: net.seq.__setitem__(0, nn.Identity()), {"seq.0.weight": []}, ["removed"]),
    "renamed module": Edit(rename, {"head.weight": ["tail.weight"], "head.bias": ["tail.bias"]}),
    "renamed parameter": Edit(rename_parameter, {"head.weight": ["head.kernel"]}),
    "added, frozen": Edit(frozen, {}),
    "added to a module without parameters": Edit(
        lambda net: net.relu.register_parameter("slope", nn.Parameter(torch.ones(1))),
        {},
        added=["relu.slope"],
        prepare=lambda net: setattr(net, "relu", nn.ReLU()),
    ),
    "tied": Edit(tie, {"head.weight": []}, ["replaced"]),
    "untied": Edit(
        untie, {"layers.0.weight": ["layers.0.weight", "head.weight"]}, ["replaced"], (), ["head.weight"], tie
    ),
    "register_parametrization": Edit(
        lambda net: parametrize.register_parametrization(net.head, "weight", nn.Identity()), {"head.weight": [ORIGINAL]}
    ),
    "register_parametrization, with an inverse": Edit(parametrize_exp, {"head.weight": [ORIGINAL]}, ["storage"]),
    "register_parametrization, with parameters": Edit(
        lambda net: parametrize.register_parametrization(net.head, "weight", Scaled()),
        {"head.weight": [ORIGINAL]},
        added=["head.parametrizations.weight.0.scale"],
    ),
    "remove_parametrizations": Edit(
        lambda net: remove_parametrization(net, True), {ORIGINAL: ["head.weight"]}, ["storage"], prepare=parametrize_exp
    ),
    "remove_parametrizations, unparametrized": Edit(
        lambda net: remove_parametrization(net, False), {ORIGINAL: ["head.weight"]}, prepare=parametrize_exp
    ),
    "weight_norm": Edit(
        lambda net: parametrizations.weight_norm(net.head),
        {"head.weight": [f"{ORIGINAL}0", f"{ORIGINAL}1"]},
        ["replaced"],
        fresh=[f"{ORIGINAL}0", f"{ORIGINAL}1"],
    ),
    "remove weight_norm": Edit(
        lambda net: remove_parametrization(net, True),
        {f"{ORIGINAL}0": ["head.weight"], f"{ORIGINAL}1": []},
        ["replaced", "removed"],
        fresh=["head.weight"],
        prepare=lambda net: parametrizations.weight_norm(net.head),
    ),
    "spectral_norm": Edit(lambda net: parametrizations.spectral_norm(net.head), {"head.weight": [ORIGINAL]}),
    "orthogonal": Edit(
        lambda net: parametrizations.orthogonal(net.layers[0]),
        {"layers.0.weight": ["layers.0.parametrizations.weight.original"]},
        ["storage"],
    ),
    "prune": Edit(
        lambda net: prune.l1_unstructured(net.head, "weight", 0.5),
        {"head.weight": ["head.weight_orig"]},
        can_be_copied=False,
    ),
    "prune.remove": Edit(
        lambda net: prune.remove(net.head, "weight"),
        {"head.weight_orig": ["head.weight"]},
        ["storage"],
        prepare=lambda net: prune.l1_unstructured(net.head, "weight", 0.5),
    ),
    "torch.nn.utils.weight_norm": Edit(
        lambda net: nn.utils.weight_norm(net.head),
        {"head.weight": []},
        ["removed"],
        ["head.weight_g", "head.weight_v"],
        can_be_copied=False,
    ),
}
