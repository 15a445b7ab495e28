"""The first step of a container with warm caches: it compiles nothing and needs no compiler.

``examples/Containerfile`` fills the directory ``TORCHINDUCTOR_CACHE_DIR`` while the image is built, and runs this
script in the image. It prints where each unit came from, and fails if one was compiled.

Without containers: set ``TORCHINDUCTOR_CACHE_DIR`` to a directory of your own, run
``python -m compiled_optim warmup --optimizer adamw``, then ``python examples/warm_start.py``.
"""

from __future__ import annotations

import sys

import torch

import compiled_optim as co


def main() -> None:
    """Make a step and report where its code came from."""
    model = torch.nn.Linear(8, 1)
    optimizer = co.AdamW(model)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    explanation = optimizer.explain()
    for unit in explanation.units:
        print(f"{unit.name}: {unit.source}")
    compiled = [unit.name for unit in explanation.units if unit.source == "compiled now"]
    if compiled:
        sys.exit(f"compiled in the first step: {', '.join(compiled)}; run the warmup in the image build")
    imported = [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]
    print(f"parts of the compiler that were imported: {', '.join(imported) or 'none'}")


if __name__ == "__main__":
    main()
