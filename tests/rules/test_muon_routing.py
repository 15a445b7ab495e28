"""Muon(model): which parameter goes to Muon and which to AdamW, and that each is stepped by its own rule."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import compiled_optim as co
from tests.helpers import assert_close

ADAMW = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
OPTIONS = {"lr": 0.1, **{f"adamw_{name}": value for name, value in ADAMW.items()}}


class Transformer(nn.Module):
    """All kinds of parameters: embeddings, a fused projection, experts, a convolution, vectors, a scalar, a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.experts = nn.Parameter(torch.randn(3, 8, 8))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.conv(x.mT).mT
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.mT, -1) @ v)
        x = x + torch.einsum("...i,eij->...j", x, self.experts) * self.scale
        return self.head(self.norm(x))


def model(tied=False):
    torch.manual_seed(0)
    return Transformer(tied).double()


def train(net, *optimizers, steps=range(4)):
    for step in steps:
        tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(step))
        net(tokens).logsumexp(-1).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach() for param in net.parameters()]


def rules(optimizer):
    return {name: group["rule"] for group in optimizer.param_groups for name in group["param_names"]}


def muon_names(optimizer):
    return {name for name, rule in rules(optimizer).items() if rule == "muon"}


@pytest.mark.parametrize("tied", [False, True])
def test_the_usual_routes(tied):
    net = model(tied)
    optimizer = co.Muon(net, compile=False)
    assert rules(optimizer).keys() == dict(net.named_parameters()).keys()
    # with tied weights the head is an embedding, and nothing takes its place
    assert muon_names(optimizer) == {"qkv.weight", "out.weight"}
    muon, adamw = optimizer.explain().routes
    assert muon == "Muon: 2 tensors, 256 elements (matrix: qkv.weight, out.weight)"
    assert "embedding: embed.weight" in adamw
    assert "3 dimensions: experts, conv.weight" in adamw
    assert "scalar: scale" in adamw
    assert ("head: head.weight" in adamw) is not tied
    assert muon in str(optimizer.explain())


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        ({"head.weight": "muon", "qkv.*": "adamw"}, {"head.weight", "out.weight"}),
        (lambda name, param: "adamw" if "out" in name else None, {"qkv.weight"}),
        (
            {"experts": {"batch_dims": 1}, "conv.weight": {"flatten": True}},
            {"qkv.weight", "out.weight", "experts", "conv.weight"},
        ),
        ({"qkv.weight": {"split": 3}, "out.weight": {"rule": "adamw", "lr": 1e-5}}, {"qkv.weight"}),
    ],
)
def test_overrides(route, expected):
    optimizer = co.Muon(model(), route=route, compile=False)
    assert muon_names(optimizer) == expected
    assert any("chosen" in line for line in optimizer.explain().routes)


def test_wrong_overrides():
    with pytest.raises(ValueError, match=r"route names 'heads.*', but no parameter of Transformer"):
        co.Muon(model(), route={"heads.*": "muon"})
    with pytest.raises(ValueError, match=r"route sends out.weight to 'sgd'; use 'muon', 'adamw'"):
        co.Muon(model(), route={"out.weight": "sgd"})
    with pytest.raises(ValueError, match="Invalid rule of a group: 'sgd'"):
        co.Muon([{"params": [nn.Parameter(torch.ones(2, 2))], "rule": "sgd"}])


def test_flatten_and_batch_dims_leave_matrices_alone():
    net = model()
    optimizer = co.Muon(net, flatten=True, compile=False)
    assert {"conv.weight", "experts", "qkv.weight"} <= muon_names(optimizer)
    before = [param.detach().clone() for param in net.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(before, train(net, optimizer), strict=True))
    optimizer = co.Muon(model(), batch_dims=1, compile=False)
    (matrices,) = [group for group in optimizer.param_groups if "qkv.weight" in group["param_names"]]
    assert matrices["batch_dims"] == 0


def test_equals_two_optimizers_of_torch(compiled):
    ours, theirs = model(), model()
    optimizer = co.Muon(ours, **OPTIONS, compile=compiled)
    mine = muon_names(optimizer)
    named = dict(theirs.named_parameters())
    muon = torch.optim.Muon([param for name, param in named.items() if name in mine], lr=0.1)
    adamw = torch.optim.AdamW([param for name, param in named.items() if name not in mine], **ADAMW)
    assert_close(train(ours, optimizer), train(theirs, muon, adamw), 1e-10)
    states = {name: {*optimizer.state[param]} for name, param in ours.named_parameters()}
    assert states["out.weight"] == {"momentum_buffer"}
    assert states["out.bias"] == {"step", "exp_avg", "exp_avg_sq"}


def test_groups_may_name_their_rule():
    """As with a module, but by hand: a group for AdamW has its defaults."""
    weight, bias = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4))
    optimizer = co.Muon([{"params": [weight]}, {"params": [bias], "rule": "adamw", "lr": 0.5}], adamw_betas=(0.5, 0.6))
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.6)
    assert [line.split(":")[0] for line in optimizer.explain().routes] == ["Muon", "AdamW"]


@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle", "weights_only"])
def test_one_state_dict(how, tmp_path):
    whole = model()
    expected = train(whole, co.Muon(whole, **OPTIONS, compile=False), steps=range(6))
    net = model()
    optimizer = co.Muon(net, **OPTIONS, compile=False)
    train(net, optimizer, steps=range(3))
    if how in ("deepcopy", "pickle"):
        copied = copy.deepcopy if how == "deepcopy" else lambda value: pickle.loads(pickle.dumps(value))
        net, optimizer = copied((net, optimizer))
        assert len(optimizer.explain().routes) == 2
    else:
        saved = optimizer.state_dict()
        if how == "weights_only":
            torch.save(saved, tmp_path / "state.pt")
            saved = torch.load(tmp_path / "state.pt", weights_only=True)
        optimizer = co.Muon(net, compile=False)
        optimizer.load_state_dict(saved)
    assert_close(train(net, optimizer, steps=range(3, 6)), expected, 1e-12)


def test_a_checkpoint_of_other_routes_is_refused():
    net = model()
    optimizer = co.Muon(net, compile=False)
    train(net, optimizer)
    other = co.Muon(net, route={"qkv.weight": "adamw", "norm.weight": "adamw"}, compile=False)
    with pytest.raises(ValueError, match="group 0 has 2 parameters there and 1 here"):
        other.load_state_dict(optimizer.state_dict())


def test_schedules_clipping_and_average():
    """Both rules follow one schedule and one norm; nothing is compiled again."""
    results = []
    for compile in (True, False):
        net = model()
        optimizer = co.Muon(net, **OPTIONS, max_grad_norm=0.5, ema_decay=0.9, compile=compile)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.01], total_steps=8, cycle_momentum=False)
        for step in range(6):
            train(net, optimizer, steps=[step])
            schedule.step()
        assert optimizer.explain().recompiles == 0
        results.append([*net.parameters(), *(optimizer.state[p]["ema"] for p in net.parameters())])
        assert optimizer.last_grad_norm > 0
    assert_close(*results, 1e-7)


def test_follows_a_replaced_matrix():
    net = model()
    optimizer = co.Muon(net, **OPTIONS, compile=False)
    train(net, optimizer)
    net.out.weight = nn.Parameter(net.out.weight.detach().clone())
    train(net, optimizer)
    assert "momentum_buffer" in optimizer.state[net.out.weight]
    assert muon_names(optimizer) == {"qkv.weight", "out.weight"}
    assert len(optimizer.explain().events) == 1


def test_states_in_other_dtypes():
    """A dict names the states of both rules. Those that a group does not keep are left out there."""
    net = model().float()
    dtypes = {"momentum_buffer": torch.bfloat16, "exp_avg": torch.float16}
    optimizer = co.Muon(net, state_dtype=dtypes, compile=False)
    for tokens in [torch.zeros(1, 2, dtype=torch.long)] * 2:
        net(tokens).sum().backward()
        optimizer.step()
    assert optimizer.state[net.out.weight]["momentum_buffer"].dtype == torch.bfloat16
    assert optimizer.state[net.out.bias]["exp_avg"].dtype == torch.float16
    with pytest.raises(ValueError, match="state_dtype names the state 'sum'"):
        co.Muon(net, state_dtype={"sum": torch.bfloat16})


def test_compare_eager():
    net = model()
    optimizer = co.Muon(net, **OPTIONS)
    net(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    with optimizer.compare_eager() as comparison:
        optimizer.step()
    assert len(comparison.differences) > 0
    assert comparison.largest < 1e-12
