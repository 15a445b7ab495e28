from __future__ import annotations

import logging
import re

import pytest
import torch

import compiled_optim as co
from compiled_optim.backends import Availability, for_device
from compiled_optim.diagnostics.units import recompile_reason
from compiled_optim.engine.sorting import make_buckets
from tests.helpers import SMALL, parameters, run_python, train


def fresh_rule():
    """Return a rule that no other test has compiled."""

    class Fresh(co.SGD):
        @staticmethod
        def update(p, g, *, lr):
            p -= lr * g

    return Fresh


def with_gradients(params):
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def test_before_and_after_the_first_step():
    params = parameters(SMALL)
    optimizer = co.AdamW(params)
    before = optimizer.explain()
    assert (before.mode, before.backends, before.calls_per_step) == ("compiled", ("cpu",), 0)
    assert "no step has been made yet" in str(before)
    with_gradients(params)
    optimizer.step()
    after = optimizer.explain()
    assert (after.graphs, after.calls_per_step, after.recompiles, after.events) == (1, 1, 0, ())
    assert after.kernels > 0
    for text in ("AdamW[float32, table]", "compiled", "no guard events", "no recompiles"):
        assert text in str(after)
    (batch,) = after.batches
    elements = sum(param.numel() for param in params)
    assert (batch.tensors, batch.elements, batch.dtype, batch.calls) == (len(SMALL), elements, "float32", 1)
    assert (batch.device, batch.backend, batch.units) == ("cpu", "cpu", ("AdamW[float32, table]",))
    assert not after.advice


def test_explain_of_an_eager_optimizer():
    explanation = train(lambda p: co.SGD(p, compile=False), parameters(SMALL), 1).explain()
    assert (explanation.mode, explanation.backends) == ("eager", ("eager",))
    assert (explanation.graphs, explanation.compile_seconds, explanation.calls_per_step) == (0, 0, 1)
    assert explanation.units == ()


def test_warmup_compiles_everything_and_touches_nothing():
    params = parameters([(3, 4), (200, 200)])
    optimizer = fresh_rule()(params, max_grad_norm=1.0)
    optimizer.warmup()
    seconds = optimizer.explain().compile_seconds
    assert seconds > 0
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(params, parameters([(3, 4), (200, 200)]), strict=True))
    with_gradients(params)
    optimizer.step()
    explanation = optimizer.explain()
    assert explanation.compile_seconds == seconds, "the first step found everything compiled"
    assert explanation.graphs == 2  # the norm and the update


def test_module_as_params_brings_names():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    optimizer = co.AdamW(model, lr=0.5)
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


def test_where_units_came_from_and_why_they_were_recompiled():
    rule = fresh_rule()
    params = with_gradients(parameters([(3,), (4,)]))
    first, second = rule(params, momentum=0.9), rule(params, momentum=0.9)
    first.step()
    second.step()
    (compiled,), (found,) = first.explain().units, second.explain().units
    assert (compiled.source, found.source) == ("compiled now", "this process")
    assert compiled.seconds > 0
    assert (found.seconds, second.explain().compile_seconds) == (0, 0)
    assert compiled.kernels == first.explain().kernels
    params[0].data = params[0].data.double()
    params[0].grad = params[0].grad.double()
    first.step()
    explanation = first.explain()
    assert explanation.recompiles == 1
    assert [unit.reason for unit in explanation.units] == ["", "dtypes float32 → float64"]
    assert "recompiles:\n  Fresh[float64, table]: dtypes float32 → float64" in str(explanation)
    assert "2 compiled now" in str(explanation)
    assert "dtype changed from torch.float32 to torch.float64" in str(explanation)


def signature_of(batch="update", shapes=((3,),), dtype=torch.float32, **options):
    params = parameters(shapes, dtype)
    optimizer = co.Adam(params, **{"weight_decay": 0.1, **options})
    cpu = for_device("cpu")
    (bucket,) = make_buckets(
        optimizer, optimizer.param_groups, {}, params, lambda: ["weight"], lambda device: (cpu, False)
    )
    ((signature, _),) = getattr(bucket, batch).calls
    return signature


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"dtype": torch.bfloat16}, "dtypes float32 → bfloat16"),
        ({"amsgrad": True}, "states exp_avg, exp_avg_sq → exp_avg, exp_avg_sq, max_exp_avg_sq"),
        (
            {"weight_decay": 0},
            "flags decoupled_weight_decay=False, coupled_weight_decay=True → "
            "decoupled_weight_decay=False, coupled_weight_decay=False",
        ),
        ({"max_grad_norm": 1.0}, "scaled False → True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reasons(other, reason):
    assert recompile_reason(signature_of(**other), [signature_of()]) == reason
    # a compiled unit of another kind does not change the reason
    assert recompile_reason(signature_of(**other), [signature_of("norm"), signature_of()]) == reason


def test_advice():
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    optimizer = co.AdamW(model, compile=False)
    model[0](torch.ones(2)).sum().backward()
    model[1].requires_grad_(False)
    assert optimizer.explain().advice == (), "before the first step nothing is odd"
    optimizer.step()
    (told,) = optimizer.explain().advice
    assert told.startswith("4 parameters ('2.weight', '2.bias', '3.weight' and 1 more) never had a gradient")
    assert f"advice:\n  {told}" in str(optimizer.explain())
    model[2:](torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model[0](torch.ones(2)).sum().backward()
    optimizer.step()
    assert optimizer.explain().advice == (), "they had one once"


def test_advice_on_layout_and_float16():
    params = [torch.nn.Parameter(torch.ones(4, 6)[:, ::2]), *parameters([(3,)], torch.float16)]
    optimizer = co.SGD(with_gradients(params), compile=False)
    optimizer.step()
    half, scattered = optimizer.explain().advice
    assert "float16: without a gradient scaler" in half
    assert "not dense in memory" in scattered
    assert "1" in half.split(" in float16")[0]
    assert "0" in scattered.split(" not dense")[0]


def test_advice_on_the_environment(monkeypatch):
    monkeypatch.setenv("COMPILED_OPTIM_EAGER", "1")
    assert "COMPILED_OPTIM_EAGER is set" in co.AdamW(parameters([(3,)])).explain().advice[0]
    monkeypatch.setenv("COMPILED_OPTIM_EAGER", "0")
    assert co.AdamW(parameters([(3,)])).explain().advice == ()


def test_one_line_is_logged_before_compiling(caplog):
    params = with_gradients(parameters([(3,), (300, 200)]))
    optimizer = fresh_rule()(params)
    with caplog.at_level(logging.INFO, logger="compiled_optim"):
        optimizer.step()
        optimizer.step()
    (record,) = [record for record in caplog.records if record.name == "compiled_optim"]
    assert record.getMessage().startswith("compiling 1 unit for Fresh on cpu, about ")
    assert "; cached afterwards in " in record.getMessage()


BAR = """
import io, sys, torch, compiled_optim as co
class Terminal(io.StringIO):
    def isatty(self):
        return {terminal}
sys.stderr, stderr = Terminal(), sys.stderr
co.SGD([torch.nn.Parameter(torch.ones(n)) for n in (3, 40_000)], max_grad_norm=1.0).warmup()
print(repr(sys.stderr.getvalue()))
"""


def test_warmup_shows_a_bar_on_a_terminal_only():
    shown = eval(run_python(BAR.format(terminal=True)))
    # torch may print a warning after the name of a unit
    lines = shown.split("\r\x1b[K")
    assert re.match(r"SGD \[-{20}\] 0/2 \d+ s squared_norm\[float32, table\]", lines[1])
    assert re.match(r"SGD \[#{10}-{10}\] 1/2 \d+ s ", lines[2])
    assert re.match(r"SGD \[#{20}\] 2/2 \d+ s ready\n$", lines[3])
    assert "SGD" not in run_python(BAR.format(terminal=False))


def test_it_never_raises(monkeypatch):
    """explain() works even if the compiler is removed after compilation."""
    params = with_gradients(parameters([(3,)]))
    optimizer = co.SGD(params)
    optimizer.step()
    monkeypatch.setattr(type(for_device("cpu")), "available", lambda self: Availability(False, "no compiler"))
    explanation = optimizer.explain()
    assert explanation.mode == "compiled"
    assert explanation.backends == ()
    assert explanation.calls_per_step == 1
    assert "SGD cannot be compiled by backend 'cpu': no compiler" in explanation.advice
    assert "no backend available" in str(explanation)
