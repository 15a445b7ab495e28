"""Tests of ``torch.distributed.checkpoint`` in one process: a checkpoint is loaded more than once.

tests/distributed covers several processes.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import compiled_optim as co
from catalog import CATALOG
from tests.helpers import assert_close, assert_same_state

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def train(net, optimizer, steps):
    for step in range(steps):
        net(torch.full((1, 3), 1.0 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def load(net, optimizer, folder):
    weights, states = get_state_dict(net, optimizer)
    saved = {"model": weights, "optimizer": states}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])


@pytest.mark.parametrize("name", CATALOG)
def test_a_checkpoint_is_loaded_twice(name, tmp_path):
    net = model()
    optimizer = getattr(co, name)(net.parameters(), **CATALOG[name].typical, compile=False)
    train(net, optimizer, 2)
    before = optimizer.state_dict()
    weights, states = get_state_dict(net, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path)
    for _ in range(2):
        train(net, optimizer, 1)
        load(net, optimizer, tmp_path)
        assert_same_state(optimizer.state_dict(), before)


def test_a_resumed_run_equals_that_of_torch(tmp_path):
    nets = []
    for make, place in ((co.AdamW, tmp_path / "ours"), (torch.optim.AdamW, tmp_path / "theirs")):
        net = model()
        optimizer = make(net.parameters(), lr=0.1)
        train(net, optimizer, 2)
        weights, states = get_state_dict(net, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=place)
        train(net, optimizer, 3)
        load(net, optimizer, place)
        train(net, optimizer, 2)
        nets.append(net)
    assert_close(list(nets[0].parameters()), list(nets[1].parameters()), 1e-6)
