"""What an optimizer defines beyond its constructor: the formula, and what the formula needs.

docs/rules.md builds one step by step; ``contract`` refuses one that does not keep to it.
"""

from __future__ import annotations

from typing import Any

import torch

from compiled_optim.checks import check_usual
from compiled_optim.clip import Clip
from compiled_optim.lists import TensorList


class Rule:
    """The formula of an optimizer."""

    state_names: tuple[str, ...] = ()
    """The states the rule keeps for each parameter, all of which start at zero; see :meth:`initial_state`."""

    counts_steps = True
    """Whether the rule keeps ``step`` in the state. If not, ``scalars`` sees 1 on the first step and more later."""

    has_torch_switches = False
    """Whether torch.optim has an optimizer of this name, whose ``foreach``, ``fused`` ... are accepted and ignored."""

    rowwise = False
    """Whether ``update`` sees parameters of two and more dimensions by rows, as 2-D tensors."""

    max_grad_norm: float | None

    def check(self, group: dict[str, Any]) -> None:
        """Raise ValueError if a hyperparameter is out of range; this knows the usual ones, by torch's names."""
        check_usual(group)

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        """The states the rule keeps for each parameter in this group, and the value each starts at."""
        return dict.fromkeys(self.state_names, 0.0)

    def options(self, group: dict[str, Any]) -> dict[str, bool]:
        """What changes the formula rather than a number in it; each combination is compiled separately."""
        return {}

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, float]:
        """The numbers the formula needs in this step (1 on the first), computed in double precision on the host."""
        raise NotImplementedError

    def clips(self, group: dict[str, Any], dtype: torch.dtype) -> list[Clip]:
        """By which norms a group's gradients of one dtype are clipped before the update, one after the other."""
        return [Clip(self.max_grad_norm)] if self.max_grad_norm is not None else []

    @staticmethod
    def update(params: TensorList, grads: TensorList, **kwargs: Any) -> None:
        """The formula, over lists of 1-D tensors in place; states, scalars and options come by their names.

        Gradients must not be written to, and nothing may depend on a tensor's value in Python.
        """
        raise NotImplementedError
