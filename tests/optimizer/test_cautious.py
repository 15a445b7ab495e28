"""The options ``cautious`` and ``decoupled_weight_decay``, which any rule may have.

The reference takes the update of torch.optim, or of a formula from a paper, from the parameters of each step. It masks
that update as Liang et al. (2024) do, and applies weight decay by itself, except where the formula includes it.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

import compiled_optim as co
from catalog import CATALOG
from catalog.references import Formula, array, muon
from compiled_optim.errors import RuleError
from tests.helpers import LARGE, SMALL, assert_close, gradients, parameters

LR, DECAY, STEPS = 0.05, 0.2, 8
BETAS = (0.85, 0.99)
"""With 0.9, an element of the momentum is zero except for rounding, and the sign of that is masked or not."""

CASES = [
    ("AdamW", {}),
    ("AdamW", {"maximize": True}),
    ("SGD", {"momentum": 0.9, "decoupled_weight_decay": True}),
    ("RMSprop", {"decoupled_weight_decay": True}),
    ("Lion", {}),
    ("Adan", {}),
]
WITH_SUMS = [
    ("Lamb", {"weight_decay": DECAY}),
    ("Lars", {"weight_decay": DECAY, "momentum": 0.9, "trust_coeff": 0.5}),
    ("AdamP", {"weight_decay": 0.0, "delta": 2.0}),
    ("SGDP", {"weight_decay": 0.0, "momentum": 0.9, "delta": 0.5}),
    ("Adafactor", {"weight_decay": 0.0}),
    ("Prodigy", {"weight_decay": 0.0, "d0": 0.1, "betas": BETAS}),
]
"""Rules whose formula sums over tensors. Where it includes weight decay, that is a part of the masked update."""


def stepped(optimizer, params, seed=1):
    for grads in gradients(params, STEPS, seed):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()


def masked(update, grad):
    """Return an update without the elements whose change has the sign of the gradient."""
    mask = (update * grad > 0).double()
    return update * mask / mask.mean().clamp(min=1e-3) if update.numel() else update


def without_decay(value, update):
    return value - update


def expected(reference, params, cautious, applied=without_decay, grads_of=None):
    """Return the parameters after all steps of a cautious optimizer.

    ``reference`` makes an optimizer of float64 parameters. ``applied`` returns the value after an update and weight
    decay. ``grads_of`` returns the gradient that the reference gets, from the value and the gradient.
    """
    twins = parameters([p.shape for p in params], torch.float64)
    optimizer = reference(twins)
    sign = -1 if optimizer.defaults.get("maximize") or getattr(optimizer, "sign", 1) < 0 else 1
    truth = [param.detach().double() for param in params]
    for grads in gradients(params, STEPS):
        for twin, value, grad in zip(twins, truth, grads, strict=True):
            twin.detach().copy_(value)
            twin.grad = grads_of(value, grad.double()) if grads_of else grad.double()
        if isinstance(optimizer, Formula):
            optimizer.values = [array(value) for value in truth]
        optimizer.step()
        for i, (twin, grad) in enumerate(zip(twins, grads, strict=True)):
            update = truth[i] - twin.detach()
            truth[i] = applied(truth[i], masked(update, sign * grad.double()) if cautious else update)
    return truth


def by_name(name, options, params, cautious):
    """Return the expected parameters for an optimizer of the catalog."""
    own = {key: value for key, value in options.items() if key != "decoupled_weight_decay"}
    if "weight_decay" in options:
        return expected(partial(CATALOG[name].reference, lr=LR, **own), params, cautious)
    no_decay = {"weight_decay": 0.0} if CATALOG[name].in_torch else {}

    def decayed(value, update):
        # Adan's decay divides, after the update
        return (value - update) / (1 + LR * DECAY) if name == "Adan" else value * (1 - LR * DECAY) - update

    return expected(partial(CATALOG[name].reference, lr=LR, **no_decay, **own), params, cautious, decayed)


@pytest.mark.parametrize("cautious", [True, False])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_agrees_with_the_reference(name, options, cautious, compiled):
    params = parameters(SMALL, torch.float64)
    truth = by_name(name, options, params, cautious)
    optimizer = getattr(co, name)(
        params, lr=LR, weight_decay=DECAY, cautious=cautious, **options, compile=compiled and name in ("AdamW", "SGD")
    )
    stepped(optimizer, params)
    assert_close(params, truth, 1e-11)


@pytest.mark.parametrize(("name", "options"), WITH_SUMS)
def test_rules_with_sums(name, options, compiled):
    """The sums of the mask are computed after those of the rule."""
    params = parameters([shape for shape in (*SMALL, *LARGE) if 0 not in shape], torch.float64)
    truth, plain = (by_name(name, options, params, cautious) for cautious in (True, False))
    compiled = compiled and name in ("AdamP", "Adafactor", "Lamb")  # by rows, by matrices, by tensors
    optimizer = getattr(co, name)(params, lr=LR, cautious=True, **options, compile=compiled)
    stepped(optimizer, params)
    assert_close(params, truth, 1e-10)
    if name != "Adafactor":  # it has no momentum, so each element of its update has the sign of the gradient
        assert max((a - b).abs().max() for a, b in zip(truth, plain, strict=True)) > 1e-3


@pytest.mark.parametrize(("name", "options"), WITH_SUMS[:1])
def test_rules_with_sums_in_flat_buffers(name, options):
    params = parameters([*SMALL[:2], *LARGE])
    truth = by_name(name, options, params, True)
    stepped(getattr(co, name)(params, lr=LR, cautious=True, **options, layout="flat", compile=False), params)
    assert_close(params, truth, 5e-6)


def test_muon():
    """Weight decay multiplies the parameters, and is not masked."""
    params = parameters([(6, 9), (9, 6), (20, 5)])
    reference = partial(Formula, formula=muon, lr=LR, decay=0.0)
    truth = expected(reference, params, True, lambda value, update: value * (1 - LR * DECAY) - update)
    stepped(co.Muon(params, lr=LR, weight_decay=DECAY, cautious=True, ns_dtype=torch.float32, compile=False), params)
    assert_close(params, truth, 1e-5)


def test_states_that_hold_weights_get_the_same_mask(compiled):
    """Schedule-Free updates z too. A step with the masked update as gradient, and without decay, is the same."""
    params = parameters(SMALL, torch.float64)
    truth = expected(
        partial(CATALOG["ScheduleFreeSGD"].reference, lr=LR, weight_decay=0.0),
        params,
        False,
        grads_of=lambda value, grad: masked(grad + 2 * value, grad),
    )
    stepped(co.ScheduleFreeSGD(params, lr=LR, weight_decay=2.0, cautious=True, compile=compiled), params)
    assert_close(params, truth, 1e-11)


@pytest.mark.parametrize("options", [{}, {"layout": "flat", "compile": False}])
def test_float32_in_chunks_and_flat_buffers(options):
    params = parameters([*SMALL[:2], *LARGE])
    truth = by_name("AdamW", {"betas": BETAS}, params, True)
    optimizer = co.AdamW(params, lr=LR, betas=BETAS, weight_decay=DECAY, cautious=True, **options)
    stepped(optimizer, params)
    assert_close(params, truth, 5e-6)
    assert not optimizer.explain().advice


def test_vectors_in_blocks_have_no_rows():
    """A vector in 8 bits is a matrix of blocks for compiled code. AdamP steps it like AdamW, without a projection."""
    params, others = parameters([(5000,)]), parameters([(5000,)])
    options = dict(lr=LR, weight_decay=0.0, cautious=True, state_dtype="8bit")
    stepped(co.AdamP(params, **options, delta=50.0), params)
    stepped(co.AdamW(others, **options), others)
    assert_close(params, others, 1e-6)


def test_groups_choose_for_themselves(compiled):
    """One group is cautious, one is not; and a change of the option makes another program."""
    params = parameters([(40,), (40,)], torch.float64)
    plain, chosen = (by_name("AdamW", {}, params, cautious) for cautious in (False, True))
    groups = [{"params": params[:1]}, {"params": params[1:], "cautious": True}]
    optimizer = co.AdamW(groups, lr=LR, weight_decay=DECAY, compile=compiled)
    stepped(optimizer, params)
    assert_close(params, [plain[0], chosen[1]], 1e-11)
    optimizer.param_groups[0]["cautious"] = True
    start = params[0].detach().clone()
    params[0].grad = -1e-12 * optimizer.state[params[0]]["exp_avg"].sign()  # against every element of the update
    params[1].grad = None
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), start * (1 - LR * DECAY), rtol=1e-12, atol=0)


REFUSED = [
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


class TwoUpdates(co.Optimizer):
    """A rule that subtracts two terms one after the other."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr}, **options)

    @staticmethod
    def update(p, g, buffer, *, lr):
        buffer += g
        p -= lr * g
        p -= lr * buffer


def test_a_rule_of_a_user_that_updates_twice_is_refused():
    params = parameters([(3,)])
    TwoUpdates(params)
    with pytest.raises(RuleError, match=r"TwoUpdates\.update cannot be cautious: it updates the parameters 2 times"):
        TwoUpdates(params, cautious=True)
