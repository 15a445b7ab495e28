"""Make the steps of one optimizer: keep its plan and guard, follow reallocated parameters, record events.

This module connects engine, guard and diagnostics. Every call takes the groups and states of the optimizer, because
both may be replaced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from compiled_optim import backends
from compiled_optim.backends import Backend
from compiled_optim.backends.registry import select
from compiled_optim.diagnostics.advice import advice
from compiled_optim.diagnostics.compare import Comparison, EagerTwin
from compiled_optim.diagnostics.explain import Explanation
from compiled_optim.diagnostics.progress import compile_units
from compiled_optim.diagnostics.units import UnitLog
from compiled_optim.engine.amp import UnconfirmedStep, is_overflow, unscale_unless_skipped
from compiled_optim.engine.buckets import Bucket
from compiled_optim.engine.flat_memory import FlatMemory, was_placed
from compiled_optim.engine.plan import Plan, clips_any
from compiled_optim.engine.rule import Group, Rule, all_params
from compiled_optim.engine.sharding import local_grads, redistributed
from compiled_optim.engine.sorting import make_buckets
from compiled_optim.engine.states import State, with_own_memory
from compiled_optim.engine.storage_options import (
    EIGHT_BIT,
    STORAGE_REMEDIES,
    check_storage,
    stored_options,
    uses_seed,
)
from compiled_optim.engine.tensor_types import has_dtensor, has_memory, is_fake, local_shard
from compiled_optim.errors import BackendUnavailableError, ReallocationError
from compiled_optim.guard.check import Guard, Match, same_objects
from compiled_optim.guard.event_log import EventLog
from compiled_optim.guard.moves import Saved
from compiled_optim.guard.tracker import Tracker
from compiled_optim.modes import is_fake_mode, is_traced
from compiled_optim.options import Settings

T = TypeVar("T")


class Stepper:
    """The plan, the guard and the records of one optimizer."""

    def __init__(self, rule: Rule, settings: Settings, unscales: bool = False) -> None:
        self._rule = rule
        self._name = type(rule).__name__
        self.settings = settings
        self.unscales = unscales
        """Whether a GradScaler has left unscaling to a step. From then on, programs unscale gradients in place."""
        self.unconfirmed: UnconfirmedStep | None = None
        """The last step, if the host does not know yet whether the device has skipped it."""
        self.tracker = Tracker(rule.number_names)
        self._memory = FlatMemory()
        self._checked: dict[int, tuple[Group, tuple[Any, ...]]] = {}
        """Groups by their ids, and the options about storage that were checked. User code may edit groups."""
        self._plan: Plan | None = None
        self._guard: Guard | None = None
        self._events = EventLog(self._name)
        self._unit_log = UnitLog()
        self._has_stepped = False
        self._changes_groups = type(rule).after_step is not Rule.after_step
        self._usable_devices: set[torch.device] = set()

    def discard_plan(self) -> None:
        """Discard the plan; the next step makes a new one."""
        self._plan = None

    def start_unscaling(self) -> None:
        """Unscale gradients in place from now on."""
        if not self.unscales:
            self.unscales, self._plan = True, None

    def skips_on_device(self, groups: Sequence[Group]) -> bool:
        """Return True if the updates of all parameters take ``found_inf``, so that the host need not read it."""
        # a skipped step must not change the groups
        if is_traced() or self._changes_groups:
            return False
        if self._plan is not None:
            return self._plan.skips_on_device
        devices = {param.device for param in all_params(groups)}
        return all(self.backend_for(device).skips_on_device for device in devices)

    def confirm_last_step(self, state: State) -> None:
        """Uncount the last step if the device has skipped it."""
        if self.unconfirmed is not None and not self.unconfirmed.confirm(state):
            self._plan = None
        self.unconfirmed = None

    def step(
        self,
        groups: Sequence[Group],
        state: State,
        state_was_accessed: bool,
        unscale: Tensor | None,
        found_inf: Tensor | None = None,
        only: Collection[Tensor] | None = None,
        is_first: bool = True,
    ) -> Tensor | None:
        """Make one step; return the norm of the gradients if they are clipped.

        With ``state_was_accessed`` the state is checked too, because user code may have changed it. If ``found_inf`` is
        not 0, the device skips the step. With ``only``, other parameters are left alone, even if they have gradients.
        Modules are checked only if this ``is_first`` step of an iteration.
        """
        if is_traced():
            return self._traced_step(groups, state, unscale, only)
        try:
            params = all_params(groups)
            plan, guard, match = self._plan, self._guard, Match.NONE
            if guard is None:
                grads = self._collect_grads(params, groups, only)
            elif guard.is_sharded:
                grads = self._collect_grads(params, groups, only)
                match = guard.match(params, grads)
            elif only is None:
                grads = [param.grad for param in params]
                match = guard.match(params, grads)
            else:
                match, grads = guard.match_some(params, only)
            if (
                plan is None
                or guard is None
                or (is_first and self.tracker.record.watches and not self.tracker.modules_unchanged())
                or match is Match.NONE
                or not plan.refresh(groups)
                or (state_was_accessed and not guard.state_holds(state))
            ):
                if only is not None:  # the parameters may be in another order
                    grads = self._collect_grads(params, groups, only)
                if any(map(is_fake, (*params, *grads))):
                    return self._traced_step(groups, state, unscale, only)
                make_plan = partial(self._make_plan, params, grads, groups, state, only)
                plan, grads = self.sync_params(groups, state, make_plan)
                match = Match.SOME
            plan.check_backends()
            if found_inf is not None and not plan.skips_on_device:  # parameters were moved to another device
                if is_overflow(found_inf):
                    plan.remove_unused_states()
                    self._plan = None
                    return None
                found_inf = None
            if found_inf is not None:
                self.unconfirmed = UnconfirmedStep(found_inf, plan.buckets)
            norm = plan.run(grads, match is Match.SOME, unscale, found_inf)
            if only is None and self._changes_groups:
                self.advance(groups, plan.sums())
            if unscale is not None and has_dtensor(params):
                factor = unscale_unless_skipped(unscale, found_inf)
                for grad in redistributed(all_params(groups)):
                    grad.mul_(factor.to(grad.device))
        except BaseException:
            if self._plan is not None:
                self._plan.remove_unused_states()
            self._plan = None
            raise
        self._has_stepped = True
        if self._memory.movers:
            self._plan = None
        return norm

    def advance(self, groups: Sequence[Group], sums: Sequence[float] = ()) -> None:
        """Write the entries of the groups that a step changes. ``sums`` are those over all parameters."""
        if self._changes_groups:
            for group in groups:
                group.update(self._rule.after_step(group, sums))

    def compared_step(
        self, comparison: Comparison, groups: Sequence[Group], state: State, unscale: Tensor | None
    ) -> Tensor | None:
        """Make one step compiled and eagerly, and record the differences."""
        if self.settings.on_realloc == "recompile":
            self.sync_params(groups, state, lambda: None)  # so that the current parameters are copied
        twin = EagerTwin(self._rule, groups, state, self.tracker.names(groups), unscale)
        norm = self.step(groups, state, True, unscale)
        twin.step()
        comparison.record(self.tracker.names(groups), all_params(groups), state, twin)
        return norm

    def warmup(self, groups: Sequence[Group], state: State, bar: bool) -> None:
        """Compile the units of a step in which every parameter has a gradient."""
        grads = [local_shard(param).detach() if has_memory(param) else None for param in all_params(groups)]
        self._compile(self._make_buckets(grads, groups, state), groups, bar)

    def explain(self, groups: Sequence[Group], state: State) -> Explanation:
        """Return a report on the plan, the compiled units and the events."""
        params = all_params(groups)
        in_use, problems = {}, []
        for device in dict.fromkeys(param.device for param in params):
            try:
                in_use[self.backend_for(device).name] = device
            except BackendUnavailableError as error:
                problems.append(str(error))
        names = dict(zip(params, self.tracker.names(groups), strict=True))
        units, events = self._unit_log.reports(), self._events.texts()
        found = [*problems, *advice(names, state, self._plan, units, self.unscales)]
        mode = "compiled" if self.settings.compile else "eager"
        routes = self._rule.routes(groups)
        return Explanation.from_plan(self._name, mode, [*in_use], self._plan, units, events, found, routes)

    def check_devices(self, devices: set[torch.device]) -> None:
        """Raise if the backend for one of these devices cannot be used here."""
        for device in devices - self._usable_devices:
            backend, layout = self.backend_for(device), self.settings.layout
            if layout is not None and layout not in backend.layouts:
                raise ValueError(
                    f"{self._name} cannot have layout={layout!r} for parameters on {device}: backend {backend.name!r} "
                    f"supports {' and '.join(map(repr, backend.layouts))}; use layout=None for its default"
                )
        self._usable_devices |= devices

    def check_storage(self, group: Group) -> None:
        """Raise if the options of a group about storage are out of range, or its devices do not support them.

        A rule counts steps from then on if they need it. What was checked is not checked again.
        """
        options = stored_options(group)
        if not any(options) or (id(group) in self._checked and self._checked[id(group)][1] == options):
            return
        rule, chosen = self._rule, group.get("state_dtype")
        check_storage(self._name, group, rule.state_names(group), rule.nonnegative)
        wanted = {*(chosen.values() if isinstance(chosen, Mapping) else (chosen,))} & {EIGHT_BIT}
        if uses_seed(group):
            wanted.add("stochastic")
        for device in {param.device for param in group["params"]}:
            backend = self.backend_for(device)
            refused = {*backend.refused_storages}
            if backend.whole_blocks and (rule.rowwise or rule.program(group).reduces):
                refused.add(EIGHT_BIT)
            for name in sorted(wanted & refused):
                option = f"state_dtype={name!r}" if name == EIGHT_BIT else "stochastic rounding"
                raise NotImplementedError(
                    f"{self._name} cannot have {option} for parameters on {device}: backend {backend.name!r} cannot "
                    f"compile it; use {STORAGE_REMEDIES[name]}"
                )
        if uses_seed(group):
            rule.counts_steps = True
        self._checked[id(group)] = group, options

    def backend_for(self, device: torch.device) -> Backend:
        """Return the backend for parameters on this device; raise if it cannot be used here."""
        if not self.settings.compile or device.type == "meta":  # nothing is computed on the meta device
            return backends.get("eager")
        return select(self._name, device, self.settings.backend)

    def sync_params(self, groups: Sequence[Group], state: State, then: Callable[[], T]) -> T:
        """Follow reallocated parameters, or raise ReallocationError; then call ``then``. Revert all if that raises.

        This is no context manager, because a KeyboardInterrupt inside ``contextlib`` would skip the revert.
        """
        self._note_own_moves()  # which are left if the revert below was interrupted
        self.tracker.note_addresses(list(filter(was_placed, all_params(groups))))
        found = self.tracker.find(groups)
        changes = found.changes
        if changes and self.settings.on_realloc == "raise":
            raise ReallocationError(changes)
        saved, record = Saved(groups, state), self.tracker.record
        try:
            self.tracker.apply(groups, state, found)
            result = then()
            self.tracker.note_addresses(self._memory.repointed)
            self.tracker.accept(groups, found)
            self._events.record(changes, found.added)
            self._memory.repointed.clear()
        except BaseException:
            self._plan = None
            saved.restore()
            self.tracker.record = record
            self._note_own_moves()
            raise
        return result

    def _note_own_moves(self) -> None:
        """Record the addresses of parameters that were moved into flat buffers. They are no changes."""
        self.tracker.note_addresses(self._memory.repointed)
        self._memory.repointed.clear()

    def _collect_grads(
        self, params: Sequence[Tensor], groups: Sequence[Group], only: Collection[Tensor] | None
    ) -> list[Tensor | None]:
        """Return the local gradients of all parameters; None for those that are not in ``only``."""
        grads = local_grads(params, lambda: self.tracker.names(groups))
        if only is None:
            return grads
        return [grad if param in only else None for param, grad in zip(params, grads, strict=True)]

    def _make_plan(
        self,
        params: list[Tensor],
        grads: list[Tensor | None],
        groups: Sequence[Group],
        state: State,
        only: Collection[Tensor] | None,
    ) -> tuple[Plan, list[Tensor | None]]:
        """Make a plan for the current parameters and gradients; return it with the local gradients."""
        # only if needed, because it may be a collective operation
        if has_dtensor(grads) or not same_objects(all_params(groups), params):
            params = all_params(groups)
            grads = self._collect_grads(params, groups, only)
        # a step of single parameters, during backward, would move them from buffer to buffer
        buckets = self._make_buckets(grads, groups, state, only is None)
        self._memory.assign(buckets, state)
        # compile before the state is changed, because compilation may fail
        self._compile(buckets, groups)
        plan = Plan(self._rule, groups, state, buckets, grads, self._memory)
        self._memory.settle(params, state, self._rule.number_names)
        plan.refresh(groups)
        # also parameters without a gradient: if one is reallocated, its state has to follow
        bound = list(filter(has_memory, params))
        self._guard = Guard(params, grads, state, bound, plan.skippable(grads), plan.states)
        self._plan = plan
        return plan, grads

    def _traced_step(
        self, groups: Sequence[Group], state: State, unscale: Tensor | None, only: Collection[Tensor] | None
    ) -> Tensor | None:
        """Run the eager formula, on FakeTensors or for a mode that records operations. No plan is kept.

        In a FakeTensorMode, parameters with memory do not change, so their state must not change either.
        """
        params = all_params(groups)
        grads = self._collect_grads(params, groups, only)
        fake: Any = next(filter(is_fake, (*params, *grads)), None)
        is_copy = (is_fake_mode() or fake is not None) and not any(map(is_fake, params))
        if is_copy:
            own: State = defaultdict(dict, {param: dict(values) for param, values in state.items()})
            state = with_own_memory(own, self._rule.number_names)
        self._check_storages(groups)
        with nullcontext() if fake is None else fake.fake_mode:
            eager = backends.get("eager")
            buckets = make_buckets(
                self._rule,
                groups,
                state,
                grads,
                partial(self.tracker.names, groups),
                lambda _: (eager, False),
                self.unscales,
            )
            plan = Plan(self._rule, groups, state, buckets, grads)
            plan.refresh(groups)
            norm = plan.run(grads, True, unscale)
        if only is None and not is_copy:
            self.advance(groups, () if fake is not None else plan.sums())
        self.discard_plan()
        return norm

    def _make_buckets(
        self, grads: Sequence[Tensor | None], groups: Sequence[Group], state: State, may_be_flat: bool = True
    ) -> list[Bucket]:
        self._check_storages(groups)
        stepped = () if self._plan is None else {id(entry.param) for entry in self._plan.entries}
        names = partial(self.tracker.names, groups)

        def backend_for(device: torch.device) -> tuple[Backend, bool]:
            backend = self.backend_for(device)
            return backend, may_be_flat and self.settings.layout_for(backend) == "flat"

        return make_buckets(self._rule, groups, state, grads, names, backend_for, self.unscales, stepped)

    def _check_storages(self, groups: Sequence[Group]) -> None:
        """Check the options about storage that user code has edited."""
        for group in groups:
            self.check_storage(group)
        self._checked = {id(group): self._checked[id(group)] for group in groups if id(group) in self._checked}

    def _compile(self, buckets: Sequence[Bucket], groups: Sequence[Group], bar: bool = False) -> None:
        clips = clips_any(self._rule, groups)
        batches = [batch for bucket in buckets for batch in bucket.batches(clips)]
        compile_units(self._name, batches, self._unit_log, self._has_stepped, bar)
