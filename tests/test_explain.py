from __future__ import annotations

import torch

import compiled_optim as co

from .helpers import SMALL, parameters, train


def test_before_and_after_the_first_step():
    params = parameters(SMALL)
    optimizer = co.AdamW(params)
    before = optimizer.explain()
    assert (before.mode, before.backends, before.calls_per_step) == ("compiled", ("cpu",), 0)
    assert "no step has been made yet" in str(before)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    after = optimizer.explain()
    assert (after.graphs, after.calls_per_step, after.recompiles, after.events) == (1, 2, 0, ())
    assert after.kernels > 0
    for text in ("AdamW[float32, serial×4]", "compiled", "no guard events"):
        assert text in str(after)


def test_eager():
    explanation = train(lambda p: co.SGD(p, compile=False), parameters(SMALL), 1).explain()
    assert (explanation.mode, explanation.backends) == ("eager", ("eager",))
    assert (explanation.graphs, explanation.compile_seconds, explanation.calls_per_step) == (0, 0, 1)


def test_warmup_compiles_everything_and_touches_nothing():
    class Fresh(co.SGD):
        """A rule no other test has compiled."""

        @staticmethod
        def update(params, grads, *, lr, **rest):
            torch._foreach_sub_(params, torch._foreach_mul(grads, lr))

    params = parameters([(3, 4), (200, 200)])
    optimizer = Fresh(params, max_grad_norm=1.0)
    optimizer.warmup()
    seconds = optimizer.explain().compile_seconds
    assert seconds > 0
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(params, parameters([(3, 4), (200, 200)]), strict=True))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    explanation = optimizer.explain()
    assert explanation.compile_seconds == seconds, "the first step found everything compiled"
    assert explanation.graphs == 4


def test_module_as_params_brings_names():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    optimizer = co.AdamW(model, lr=0.5)
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
