"""Every scheduler of torch works with every optimizer, with a float or a tensor lr, without recompiles."""

from __future__ import annotations

import inspect
from itertools import product

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

import compiled_optim as co
from catalog import CATALOG
from tests.backends.test_recompiles import compilations
from tests.helpers import assert_close, gradients, parameters

STEPS = 12
SHAPES = [(8, 5), (7,), (3, 2, 3)]


def cycles_momentum(optimizer):
    """Return whether CyclicLR and OneCycleLR can cycle the momentum. They raise if the optimizer has none."""
    return bool(optimizer.defaults.keys() & {"momentum", "betas"})


SCHEDULERS = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda step: 0.9),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, step_size=3, gamma=0.5),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, milestones=[2, 7], gamma=0.3),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, factor=0.5, total_iters=4),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, total_iters=6),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, gamma=0.8),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, total_iters=8, power=2.0),  # down to lr = 0
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=5),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=3, T_mult=2),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(
        opt, base_lr=0.01, max_lr=0.1, step_size_up=4, cycle_momentum=cycles_momentum(opt)
    ),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(
        opt, max_lr=0.1, total_steps=STEPS + 1, cycle_momentum=cycles_momentum(opt)
    ),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1, factor=0.5),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, total_iters=4), lr_scheduler.ExponentialLR(opt, 0.7)], milestones=[4]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, factor=0.1, total_iters=3), lr_scheduler.ExponentialLR(opt, 0.9)], optimizer=opt
    ),
    "SWALR": lambda opt: swa_utils.SWALR(opt, swa_lr=0.01, anneal_epochs=6),
}


def test_every_scheduler_of_torch_has_an_entry():
    base = lr_scheduler.LRScheduler
    known = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base and not name.startswith("_")
    }
    assert SCHEDULERS.keys() == known


def hyperparameters(group):
    """Return the hyperparameters that schedulers change."""
    values = [group["lr"], *group.get("betas", ())[:1], group.get("momentum", 0)]
    return tuple(map(float, values))


def run(optimizer, params, schedule):
    """Step with a scheduler or with given hyperparameters. Return the hyperparameters of each step."""
    (group,) = optimizer.param_groups
    scheduler = schedule(optimizer) if callable(schedule) else None
    used = []
    for step, grads in enumerate(gradients(params, STEPS)):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        if scheduler is None:
            set_hyperparameters(group, schedule[step])
        used.append(hyperparameters(group))
        optimizer.step()
        if step == 0:
            warm = compilations()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        elif scheduler is not None:
            scheduler.step()
    assert compilations() == warm, "compiled after the first step"
    return used


def set_hyperparameters(group, values):
    lr, *betas, momentum = values
    group["lr"] = lr
    if betas:
        group["betas"] = (*betas, *group["betas"][1:])
    if "momentum" in group:
        group["momentum"] = momentum


@pytest.mark.parametrize("kind", ["number", "tensor"])
@pytest.mark.parametrize(("name", "scheduler"), list(product(CATALOG, SCHEDULERS)))
def test_a_scheduler_has_the_same_effect_as_on_torch_optim(name, scheduler, kind):
    def lr():
        return torch.tensor(0.05) if kind == "tensor" else 0.05

    entry = CATALOG[name]
    params = parameters(SHAPES)
    given = lr()
    optimizer = getattr(co, name)(params, **{**entry.typical, "lr": given})
    used = run(optimizer, params, SCHEDULERS[scheduler])
    assert optimizer.explain().recompiles == 0
    assert len(set(used)) > 1, "the scheduler must change something"
    if kind == "tensor":
        assert optimizer.param_groups[0]["lr"] is given, "filled in place"

    if entry.in_torch:
        theirs = parameters(SHAPES)
        reference = entry.reference(theirs, **{**entry.typical, "lr": lr()})
        assert used == run(reference, theirs, SCHEDULERS[scheduler])
        assert_close(params, theirs, 2e-6)
    else:
        # compare the schedule with that of a torch.optim optimizer with the same hyperparameters, and the steps with an
        # eager run in float64 with this schedule
        donor = {"betas": torch.optim.Adam, "momentum": torch.optim.SGD}
        make = next((make for key, make in donor.items() if key in optimizer.defaults), torch.optim.Adadelta)
        options = {"momentum": 0.9} if make is torch.optim.SGD else {}
        if make is torch.optim.Adam:
            options = {"betas": optimizer.defaults["betas"][:2]}
        theirs = parameters(SHAPES)
        assert used == run(make(theirs, lr=lr(), **options), theirs, SCHEDULERS[scheduler])
        exact = parameters(SHAPES, torch.float64)
        run(getattr(co, name)(exact, **entry.typical, compile=False), exact, used)
        assert_close(params, exact, 2e-6)


def test_bertadams_own_schedule_multiplies_a_schedulers():
    """A scheduler sets lr, and BertAdam multiplies it by the factor of its own warm-up and decay."""
    (param,) = params = parameters([(4,)])
    optimizer = co.BertAdam(params, lr=1.0, warmup=0.5, t_total=4, schedule="warmup_constant", max_grad_norm=-1)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = []
    for _ in range(4):
        param.grad = torch.ones(4)
        optimizer.step()
        rates.append(optimizer.get_lr()[0])
        scheduler.step()
    # get_lr() returns the value of the next step, before the scheduler changes lr
    assert rates == [0.5, 0.5, 0.25, 0.125]


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_scheduler_resumes_with_the_optimizer(kind):
    """Optimizer and scheduler, saved and loaded in the middle, give the results of an uninterrupted run."""

    def make(params):
        optimizer = co.AdamW(params, lr=torch.tensor(0.05) if kind == "tensor" else 0.05)
        return optimizer, SCHEDULERS["OneCycleLR"](optimizer)

    whole, halves = parameters(SHAPES), parameters(SHAPES)
    used = run(make(whole)[0], whole, SCHEDULERS["OneCycleLR"])
    resumed, saved = [], None
    for half in range(2):
        optimizer, scheduler = make(halves)
        if saved is not None:
            optimizer.load_state_dict(saved[0])
            scheduler.load_state_dict(saved[1])
        for grads in list(gradients(halves, STEPS))[half * STEPS // 2 : (half + 1) * STEPS // 2]:
            for param, grad in zip(halves, grads, strict=True):
                param.grad = grad
            resumed.append(hyperparameters(optimizer.param_groups[0]))
            optimizer.step()
            scheduler.step()
        saved = optimizer.state_dict(), scheduler.state_dict()
    assert resumed == used
    assert_close(halves, whole, 0)
