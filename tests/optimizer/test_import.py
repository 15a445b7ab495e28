"""Importing the package and using an optimizer do not change global settings of the user's program."""

from __future__ import annotations

from tests.helpers import run_python

SETTINGS = """
import torch, logging, warnings
def settings():
    import torch._dynamo.config, torch._inductor.config, torch._functorch.config
    configs = (torch._dynamo.config, torch._inductor.config, torch._functorch.config)
    return (
        [{k: repr(v) for k, v in config.get_config_copy().items()} for config in configs],
        torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype(),
        torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
        torch.get_rng_state().tolist(), logging.getLogger().level, list(warnings.filters),
        torch.get_float32_matmul_precision(),
    )
"""


def test_import_brings_nothing_but_the_package_and_tabulate():
    """The import does not load a compiler and takes a fraction of the time of ``import torch``."""
    code = """
import sys, torch
before = set(sys.modules)
import compiled_optim
roots = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(roots - sys.stdlib_module_names - {"wcwidth"}))  # tabulate takes it where it is installed
assert not any(name.startswith(("torch._inductor", "torch._dynamo")) for name in sys.modules)
"""
    assert run_python(code) == "['compiled_optim', 'tabulate']\n"


def test_construction_and_eager_steps_import_no_compiler():
    """torch.optim imports parts of torch._inductor, but not the compiler."""
    code = """
import sys, torch, compiled_optim as co
param = torch.nn.Parameter(torch.ones(2))
param.grad = torch.ones(2)
co.AdamW([param])
co.AdamW([param], compile=False).step()
assert "torch._inductor.compile_fx" not in sys.modules
"""
    run_python(code)


def test_a_compiled_step_changes_no_setting():
    code = (
        SETTINGS
        + """
before = settings()
import compiled_optim as co
assert settings() == before
params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 40000)]
for param in params:
    param.grad = torch.ones_like(param)
optimizer = co.AdamW(params, max_grad_norm=1.0)
for _ in range(2):
    optimizer.step()
optimizer.explain()
after = settings()
for old, new in zip(before[0], after[0]):
    assert old == new, {k: (old.get(k), v) for k, v in new.items() if old.get(k) != v}
assert after == before
"""
    )
    run_python(code)
