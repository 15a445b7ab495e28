"""The options ``cautious`` and ``decoupled_weight_decay``, which any rule may have.

The reference takes the update of torch.optim, or of a formula from a paper, without weight decay: these optimizers then
do not depend on the parameters. It masks that update as Liang et al. (2024) do, and applies weight decay by itself.
"""

from __future__ import annotations

from itertools import chain

import pytest
import torch

import compiled_optim as co
from catalog import CATALOG
from tests.helpers import LARGE, SMALL, assert_close, gradients, parameters

LR, DECAY, STEPS = 0.05, 0.2, 8
CASES = [
    ("AdamW", {}),
    ("AdamW", {"maximize": True}),
    ("SGD", {"momentum": 0.9, "decoupled_weight_decay": True}),
    ("RMSprop", {"decoupled_weight_decay": True}),
    ("Lion", {}),
    ("Adan", {}),
]


def stepped(optimizer, params, seed=1):
    for grads in gradients(params, STEPS, seed):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        yield grads
        optimizer.step()


def expected(name, options, params, cautious):
    """Return the parameters after all steps, from the updates of the reference on parameters of its own."""
    options = {key: value for key, value in options.items() if key != "decoupled_weight_decay"}
    decay = {"weight_decay": 0.0} if CATALOG[name].in_torch else {}
    twins, sign = parameters([p.shape for p in params], torch.float64), -1 if options.get("maximize") else 1
    reference = CATALOG[name].reference(twins, lr=LR, **decay, **options)
    truth = [param.detach().double() for param in params]
    before = None
    for grads in chain(stepped(reference, twins), [None]):
        now = [twin.detach().clone() for twin in twins]
        if before is not None:
            for i, (old, new, grad) in enumerate(zip(before[0], now, before[1], strict=True)):
                u = old - new
                if cautious and u.numel():
                    mask = (u * sign * grad > 0).double()
                    u = u * mask / mask.mean().clamp(min=1e-3)
                if name == "Adan":  # its decay divides, after the update
                    truth[i] = (truth[i] - u) / (1 + LR * DECAY)
                else:
                    truth[i] = truth[i] * (1 - LR * DECAY) - u
        before = now, grads
    return truth


@pytest.mark.parametrize("cautious", [True, False])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_agrees_with_the_reference(name, options, cautious, compiled):
    params = parameters(SMALL, torch.float64)
    truth = expected(name, options, params, cautious)
    optimizer = getattr(co, name)(
        params, lr=LR, weight_decay=DECAY, cautious=cautious, **options, compile=compiled and name in ("AdamW", "SGD")
    )
    for _ in stepped(optimizer, params):
        pass
    assert_close(params, truth, 1e-11)


@pytest.mark.parametrize("options", [{}, {"layout": "flat", "compile": False}])
def test_float32_in_chunks_and_flat_buffers(options):
    params = parameters([*SMALL[:2], *LARGE])
    truth = expected("AdamW", {}, params, True)
    optimizer = co.AdamW(params, lr=LR, weight_decay=DECAY, cautious=True, **options)
    for _ in stepped(optimizer, params):
        pass
    assert_close(params, truth, 5e-6)
    assert not optimizer.explain().advice


def test_groups_choose_for_themselves(compiled):
    """One group is cautious, one is not; and a change of the option makes another program."""
    params = parameters([(40,), (40,)], torch.float64)
    plain, masked = (expected("AdamW", {}, params, cautious) for cautious in (False, True))
    groups = [{"params": params[:1]}, {"params": params[1:], "cautious": True}]
    optimizer = co.AdamW(groups, lr=LR, weight_decay=DECAY, compile=compiled)
    for _ in stepped(optimizer, params):
        pass
    assert_close(params, [plain[0], masked[1]], 1e-11)
    optimizer.param_groups[0]["cautious"] = True
    start = params[0].detach().clone()
    params[0].grad = -1e-12 * optimizer.state[params[0]]["exp_avg"].sign()  # against every element of the update
    params[1].grad = None
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), start * (1 - LR * DECAY), rtol=1e-12, atol=0)


REFUSED = [
    ("Lamb", {"cautious": True}, "Lamb does not support cautious=True here: its formula sums over each tensor"),
    (
        "AdamW",
        {"cautious": True, "max_grad_norm_per_parameter": 1.0},
        "AdamW does not support cautious=True here: each",
    ),
    ("ScheduleFreeSGD", {"cautious": True}, "ScheduleFreeSGD does not support cautious=True: its state 'z'"),
    (
        "ScheduleFreeSGD",
        {"decoupled_weight_decay": True},
        "ScheduleFreeSGD does not support decoupled_weight_decay=True",
    ),
    ("Rprop", {"decoupled_weight_decay": True}, "Rprop does not support decoupled_weight_decay=True: it has no weight"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_what_is_refused(name, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        getattr(co, name)(parameters([(3,)]), **options)
