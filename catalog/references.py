"""Reference formulas in float64 NumPy for the optimizers that torch.optim does not have.

They follow the papers and the specification, not the code of the package. They process one tensor at a time and use
Python branches. Each formula takes the parameters and gradients as lists of arrays, a dict of states for each tensor,
the step count (1 in the first step), the learning rate and the hyperparameters. It returns the new parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]
Arrays = Sequence[Array]
Memory = dict[str, Any]
Memories = Sequence[Memory]


class Formula(torch.optim.Optimizer):
    """An optimizer with one parameter group that computes a reference formula.

    It keeps a float64 copy of the parameters, and copies the result into the parameters after each step.
    """

    def __init__(
        self, params: Iterable[Tensor], formula: Callable[..., list[Array]], lr: float = 0.1, **options: Any
    ) -> None:
        super().__init__(params, {"lr": lr})
        self.sign = -1.0 if options.pop("maximize", False) else 1.0
        self.formula, self.hyperparameters = formula, options
        self.values = [array(param) for param in self.param_groups[0]["params"]]
        self.memories: list[Memory] = [{} for _ in self.values]
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Compute one step with the formula."""
        group = self.param_groups[0]
        grads = [self.sign * array(param.grad) for param in group["params"]]
        self.steps += 1
        self.values = self.formula(self.values, grads, self.memories, self.steps, group["lr"], **self.hyperparameters)
        for param, value in zip(group["params"], self.values, strict=True):
            param.copy_(torch.from_numpy(np.asarray(value)))


def array(tensor: Tensor) -> Array:
    """Return a float64 copy of a tensor."""
    return tensor.detach().cpu().double().numpy().copy()


def moments(memory: Memory, g: Array, b1: float, b2: float) -> tuple[Array, Array]:
    """Update and return the averages of the gradient and of its square."""
    memory["m"] = b1 * memory.get("m", 0.0) + (1 - b1) * g
    memory["v"] = b2 * memory.get("v", 0.0) + (1 - b2) * g * g
    return memory["m"], memory["v"]


def lamb(
    ps: Arrays, gs: Arrays, memories: Memories, t: int, lr: float, betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6, weight_decay: float = 0.0, adam: bool = False, use_global_grad_norm: bool = False,
) -> list[Array]:  # fmt: skip
    """Compute LAMB of the specification: no bias correction, the weight norm clamped to 10."""
    if use_global_grad_norm:
        total = math.sqrt(sum(float((g * g).sum()) for g in gs))
        if total > 1:
            gs = [g / total for g in gs]
    results = []
    for p, g, memory in zip(ps, gs, memories, strict=True):
        m, v = moments(memory, g, *betas)
        u = m / (np.sqrt(v) + eps) + weight_decay * p
        weight_norm = min(float(np.sqrt((p * p).sum())), 10.0)
        step_norm = float(np.sqrt((u * u).sum()))
        trust = 1.0 if adam or weight_norm == 0 or step_norm == 0 else weight_norm / step_norm
        results.append(p - lr * trust * u)
    return results


def lion(
    ps: Arrays, gs: Arrays, memories: Memories, t: int, lr: float, betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
) -> list[Array]:  # fmt: skip
    """Compute Lion of the paper."""
    results = []
    for p, g, memory in zip(ps, gs, memories, strict=True):
        m = memory.get("m", 0.0)
        results.append(p - lr * (np.sign(betas[0] * m + (1 - betas[0]) * g) + weight_decay * p))
        memory["m"] = betas[1] * m + (1 - betas[1]) * g
    return results


def adan(
    ps: Arrays, gs: Arrays, memories: Memories, t: int, lr: float,
    betas: tuple[float, float, float] = (0.98, 0.92, 0.99), eps: float = 1e-8, weight_decay: float = 0.0,
) -> list[Array]:  # fmt: skip
    """Compute Adan of the paper, with the bias corrections of its published code. The paper's betas are 1 - beta."""
    a1, a2, a3 = (1 - beta for beta in betas)
    results = []
    for p, g, memory in zip(ps, gs, memories, strict=True):
        change = g - memory["g"] if "g" in memory else np.zeros_like(g)
        memory["g"] = g
        memory["m"] = (1 - a1) * memory.get("m", 0.0) + a1 * g
        memory["v"] = (1 - a2) * memory.get("v", 0.0) + a2 * change
        memory["n"] = (1 - a3) * memory.get("n", 0.0) + a3 * (g + (1 - a2) * change) ** 2
        m, v, n = (memory[name] / (1 - (1 - a) ** t) for name, a in (("m", a1), ("v", a2), ("n", a3)))
        results.append((p - lr / (np.sqrt(n) + eps) * (m + (1 - a2) * v)) / (1 + lr * weight_decay))
    return results


def bert_schedule(name: str, x: float, warmup: float) -> float:
    """Return the factor of the learning rate after the fraction ``x`` of all steps."""
    if x < warmup:
        return x / warmup
    if name == "warmup_constant":
        return 1.0
    if name == "warmup_linear":
        return max((x - 1) / (warmup - 1), 0)
    if name == "warmup_cosine":
        return 0.5 * (1 + math.cos(math.pi * x))
    assert name == "warmup_poly"
    return math.sqrt(1 - x) if x <= 1 else 0.0


def bert_adam(
    ps: Arrays, gs: Arrays, memories: Memories, t: int, lr: float, warmup: float = -1, t_total: int = -1,
    schedule: str = "warmup_linear", b1: float = 0.9, b2: float = 0.999, e: float = 1e-6, weight_decay: float = 0.01,
    max_grad_norm: float = 1.0,
) -> list[Array]:  # fmt: skip
    """Compute BertAdam: Adam without bias correction, with a schedule and clipping by the norm of all gradients."""
    if max_grad_norm > 0:
        norm = math.sqrt(sum(float((g * g).sum()) for g in gs))
        coefficient = max_grad_norm / (norm + 1e-6)
        if coefficient < 1:
            gs = [g * coefficient for g in gs]
    if t_total != -1:
        lr = lr * bert_schedule(schedule, (t - 1) / t_total, warmup)
    results = []
    for p, g, memory in zip(ps, gs, memories, strict=True):
        m, v = moments(memory, g, b1, b2)
        results.append(p - lr * (m / (np.sqrt(v) + e) + weight_decay * p))
    return results


def rmsprop_tf(
    ps: Arrays, gs: Arrays, memories: Memories, t: int, lr: float, alpha: float = 0.9, eps: float = 1e-10,
    weight_decay: float = 0.0, momentum: float = 0.0, centered: bool = False, decoupled_decay: bool = False,
    lr_in_momentum: bool = True,
) -> list[Array]:  # fmt: skip
    """Compute RMSprop of TensorFlow: the average starts at one, and epsilon is inside the square root."""
    results = []
    for p, g, memory in zip(ps, gs, memories, strict=True):
        if weight_decay and decoupled_decay:
            p = p * (1 - weight_decay)
        elif weight_decay:
            g = g + weight_decay * p
        sq = memory["sq"] = memory.get("sq", 1.0) + (1 - alpha) * (g * g - memory.get("sq", 1.0))
        inside = sq + eps
        if centered:
            ga = memory["ga"] = memory.get("ga", 0.0) + (1 - alpha) * (g - memory.get("ga", 0.0))
            inside = sq - ga * ga + eps
        step = g / np.sqrt(inside)
        if not momentum:
            results.append(p - lr * step)
        elif lr_in_momentum:
            memory["buf"] = momentum * memory.get("buf", 0.0) + lr * step
            results.append(p - memory["buf"])
        else:
            memory["buf"] = momentum * memory.get("buf", 0.0) + step
            results.append(p - lr * memory["buf"])
    return results


def adamp_view(p: Array, g: Array, step: Array, eps: float, delta: float) -> tuple[str | None, Array]:
    """Return the view in which the step is projected, or None, and the step after the projection."""
    for kind, shape in (("channel", (p.shape[0], -1)), ("layer", (1, -1))):
        rows, grows, srows = p.reshape(shape), g.reshape(shape), step.reshape(shape)
        norm = np.sqrt((rows * rows).sum(1))
        cosine = np.abs((rows * grows).sum(1)) / (np.sqrt((grows * grows).sum(1)) + eps) / (norm + eps)
        if cosine.max() < delta / math.sqrt(rows.shape[1]):
            unit = rows / (norm + eps)[:, None]
            return kind, (srows - unit * (unit * srows).sum(1)[:, None]).reshape(p.shape)
    return None, step


def adamp(
    ps: Arrays, gs: Arrays, memories: Memories, t: int, lr: float, betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8, weight_decay: float = 0.0, delta: float = 0.1, wd_ratio: float = 0.1, nesterov: bool = False,
) -> list[Array]:  # fmt: skip
    """Compute AdamP of the paper; ``memory["fired"]`` is the view in which the step was projected."""
    results = []
    for p, g, memory in zip(ps, gs, memories, strict=True):
        b1, b2 = betas
        m, v = moments(memory, g, b1, b2)
        denominator = np.sqrt(v) / math.sqrt(1 - b2**t) + eps
        step = (b1 * m + (1 - b1) * g if nesterov else m) / denominator
        memory["fired"] = None
        if p.ndim > 1 and p.size:
            memory["fired"], step = adamp_view(p, g, step, eps, delta)
        ratio = wd_ratio if memory["fired"] else 1.0
        results.append(p * (1 - lr * weight_decay * ratio) - lr / (1 - b1**t) * step)
    return results


def sgdp(
    ps: Arrays, gs: Arrays, memories: Memories, t: int, lr: float, momentum: float = 0.0, dampening: float = 0.0,
    weight_decay: float = 0.0, nesterov: bool = False, eps: float = 1e-8, delta: float = 0.1, wd_ratio: float = 0.1,
) -> list[Array]:  # fmt: skip
    """Compute SGDP of the published code, which projects the momentum itself unless Nesterov momentum is used."""
    results = []
    for p, g, memory in zip(ps, gs, memories, strict=True):
        memory["b"] = momentum * memory.get("b", 0.0) + (1 - dampening) * g
        step = g + momentum * memory["b"] if nesterov else memory["b"]
        memory["fired"] = None
        if p.ndim > 1 and p.size:
            memory["fired"], step = adamp_view(p, g, step, eps, delta)
        if not nesterov:
            memory["b"] = step
        ratio = wd_ratio if memory["fired"] else 1.0
        results.append(p * (1 - lr * weight_decay * ratio / (1 - momentum)) - lr * step)
    return results


def lars(
    ps: Arrays, gs: Arrays, memories: Memories, t: int, lr: float, momentum: float = 0.0, dampening: float = 0.0,
    weight_decay: float = 0.0, nesterov: bool = False, trust_coeff: float = 0.001, eps: float = 1e-8,
    trust_clip: bool = False, always_adapt: bool = False,
) -> list[Array]:  # fmt: skip
    """Compute LARS of the paper, with the learning rate outside of the momentum as in published code."""
    results = []
    for p, g, memory in zip(ps, gs, memories, strict=True):
        if weight_decay or always_adapt:
            weight_norm, grad_norm = float(np.sqrt((p * p).sum())), float(np.sqrt((g * g).sum()))
            ratio = 1.0
            if weight_norm > 0 and grad_norm > 0:
                ratio = trust_coeff * weight_norm / (grad_norm + weight_norm * weight_decay + eps)
            if trust_clip:
                ratio = min(ratio / lr, 1.0)
            g = (g + weight_decay * p) * ratio
        if momentum:
            memory["b"] = momentum * memory["b"] + (1 - dampening) * g if "b" in memory else g
            g = g + momentum * memory["b"] if nesterov else memory["b"]
        results.append(p - lr * g)
    return results


def schedule_free(
    ps: Arrays, gs: Arrays, memories: Memories, t: int, lr: float, beta: float, weight_decay: float, warmup_steps: int,
    r: float, weight_lr_power: float, normalized: Callable[[Array, Memory], Array],
) -> list[Array]:  # fmt: skip
    """Compute Schedule-Free of the paper, with x, y and z of each tensor; ``ps`` and the results are y."""
    lr = lr * min(t / warmup_steps, 1.0) if warmup_steps else lr
    results = []
    for p, g, memory in zip(ps, gs, memories, strict=True):
        memory["lr_max"] = max(lr, memory.get("lr_max", -1.0))
        weight = t**r * memory["lr_max"] ** weight_lr_power
        memory["sum"] = memory.get("sum", 0.0) + weight
        c = weight / memory["sum"] if memory["sum"] else 0.0
        x, z = memory.get("x", p), memory.get("z", p)
        memory["z"] = z - lr * (normalized(g, memory) + weight_decay * p)
        memory["x"] = (1 - c) * x + c * memory["z"]
        results.append(beta * memory["x"] + (1 - beta) * memory["z"])
    return results


def schedule_free_adamw(
    ps: Arrays, gs: Arrays, memories: Memories, t: int, lr: float, betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8, weight_decay: float = 0.0, warmup_steps: int = 0, r: float = 0.0, weight_lr_power: float = 2.0,
) -> list[Array]:  # fmt: skip
    """Compute Schedule-Free AdamW of the paper."""

    def normalized(g: Array, memory: Memory) -> Array:
        memory["v"] = betas[1] * memory.get("v", 0.0) + (1 - betas[1]) * g * g
        return np.asarray(g / (np.sqrt(memory["v"] / (1 - betas[1] ** t)) + eps))

    return schedule_free(ps, gs, memories, t, lr, betas[0], weight_decay, warmup_steps, r, weight_lr_power, normalized)


def schedule_free_sgd(
    ps: Arrays, gs: Arrays, memories: Memories, t: int, lr: float, momentum: float = 0.9, weight_decay: float = 0.0,
    warmup_steps: int = 0, r: float = 0.0, weight_lr_power: float = 2.0,
) -> list[Array]:  # fmt: skip
    """Compute Schedule-Free SGD of the paper."""
    rest = weight_decay, warmup_steps, r, weight_lr_power
    return schedule_free(ps, gs, memories, t, lr, momentum, *rest, lambda g, memory: g)


def prodigy(
    ps: Arrays, gs: Arrays, memories: Memories, t: int, lr: float, betas: tuple[float, float] = (0.9, 0.999),
    beta3: float | None = None, eps: float = 1e-8, weight_decay: float = 0.0, decouple: bool = True,
    use_bias_correction: bool = False, safeguard_warmup: bool = False, d0: float = 1e-6, d_coef: float = 1.0,
    growth_rate: float = math.inf,
) -> list[Array]:  # fmt: skip
    """Compute Prodigy of the paper (its Adam form), with the estimate of all tensors in ``memories[0]``."""
    b1, b2 = betas
    b3 = math.sqrt(b2) if beta3 is None else beta3
    first = memories[0]
    d, d_max, numerator = first.get("d", d0), first.get("d_max", d0), b3 * first.get("numerator", 0.0)
    step = d * lr * (math.sqrt(1 - b2**t) / (1 - b1**t) if use_bias_correction else 1.0)
    denominator = 0.0
    gs = [g if decouple else g + weight_decay * p for p, g in zip(ps, gs, strict=True)]
    for p, g, memory in zip(ps, gs, memories, strict=True):
        memory.setdefault("p0", p)
        moments(memory, d * g, b1, b2)
        memory["s"] = b3 * memory.get("s", 0.0) + d / d0 * (d if safeguard_warmup else step) * g
        numerator += d / d0 * step * float((g * (memory["p0"] - p)).sum())
        denominator += float(np.abs(memory["s"]).sum())
    d_hat = d_coef * numerator / denominator if denominator else 0.0  # without gradients
    if d == d0:
        d = max(d, d_hat)
    d_max = max(d_max, d_hat)
    d = min(d_max, d * growth_rate)
    first.update(d=d, d_max=d_max, numerator=numerator)
    results = []
    for p, memory in zip(ps, memories, strict=True):
        decayed = p * (1 - weight_decay * step) if decouple else p
        results.append(decayed - step * memory["m"] / (np.sqrt(memory["v"]) + d * eps))
    return results


def muon(
    ps: Arrays, gs: Arrays, memories: Memories, step: int, lr: float, *, momentum: float = 0.95, decay: float = 0.1,
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315), iterations: int = 5, rms: bool = False,
) -> list[Array]:  # fmt: skip
    """Muon of Jordan et al. with Nesterov momentum; with ``rms``, the learning rate of Liu et al. (2025)."""
    a, b, c = coefficients
    found = []
    for p, g, memory in zip(ps, gs, memories, strict=True):
        m = memory["m"] = momentum * memory.get("m", 0.0) + (1 - momentum) * g
        x = momentum * m + (1 - momentum) * g
        rows, columns = x.shape
        x = (x.T if rows > columns else x) / np.linalg.norm(x)
        for _ in range(iterations):
            square = x @ x.T
            x = a * x + (b * square + c * square @ square) @ x
        rate = 0.2 * math.sqrt(max(rows, columns)) if rms else math.sqrt(max(1, rows / columns))
        found.append((1 - lr * decay) * p - lr * rate * (x.T if rows > columns else x))
    return found
