"""The formulas of the optimizers torch does not have, in NumPy and float64, one tensor at a time, branches and all.

Written from the papers' and the specification's formulas, not from the package. Each takes lists of arrays, the step
count after it was incremented, and the hyperparameters; ``memory`` is a dict for each tensor that it keeps states in.
"""

from __future__ import annotations

import math

import numpy as np


def moments(memory, g, b1, b2):
    memory["m"] = b1 * memory.get("m", 0.0) + (1 - b1) * g
    memory["v"] = b2 * memory.get("v", 0.0) + (1 - b2) * g * g
    return memory["m"], memory["v"]


def lamb(
    ps, gs, memories, t, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, adam=False, use_global_grad_norm=False
):
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


def lion(ps, gs, memories, t, lr, betas=(0.9, 0.99), weight_decay=0.0):
    results = []
    for p, g, memory in zip(ps, gs, memories, strict=True):
        m = memory.get("m", 0.0)
        results.append(p - lr * (np.sign(betas[0] * m + (1 - betas[0]) * g) + weight_decay * p))
        memory["m"] = betas[1] * m + (1 - betas[1]) * g
    return results


def adan(ps, gs, memories, t, lr, betas=(0.98, 0.92, 0.99), eps=1e-8, weight_decay=0.0):
    """The paper's algorithm, with the bias corrections of its published code; its betas are one minus these."""
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


def bert_schedule(name, x, warmup):
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
    ps, gs, memories, t, lr, warmup=-1, t_total=-1, schedule="warmup_linear", b1=0.9, b2=0.999, e=1e-6,
    weight_decay=0.01, max_grad_norm=1.0,
):  # fmt: skip
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
    ps, gs, memories, t, lr, alpha=0.9, eps=1e-10, weight_decay=0.0, momentum=0.0, centered=False,
    decoupled_decay=False, lr_in_momentum=True,
):  # fmt: skip
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


def adamp_view(p, g, step, eps, delta):
    """The view in which the projection fires, and the step after it."""
    for kind, shape in (("channel", (p.shape[0], -1)), ("layer", (1, -1))):
        rows, grows, srows = p.reshape(shape), g.reshape(shape), step.reshape(shape)
        norm = np.sqrt((rows * rows).sum(1))
        cosine = np.abs((rows * grows).sum(1)) / (np.sqrt((grows * grows).sum(1)) + eps) / (norm + eps)
        if cosine.max() < delta / math.sqrt(rows.shape[1]):
            unit = rows / (norm + eps)[:, None]
            return kind, (srows - unit * (unit * srows).sum(1)[:, None]).reshape(p.shape)
    return None, step


def adamp(
    ps, gs, memories, t, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, delta=0.1, wd_ratio=0.1, nesterov=False
):  # fmt: skip
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
