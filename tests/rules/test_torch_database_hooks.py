"""torch's optimizer database: hooks of state dicts and of steps."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_device_type import instantiate_device_type_tests

from .torch_database import STATEFUL, DatabaseTestCase, compiled_and_eager, ours, parameters, problem, run


class TestHooks(DatabaseTestCase):
    @compiled_and_eager
    def test_state_dict_hooks(self, device, dtype, optim_info, compile):
        params = parameters(dtype)
        optimizer = ours(optim_info, params, compile, **STATEFUL[optim_info.name])
        run(optimizer, params, range(1))
        plain = optimizer.state_dict()

        def mark(optimizer):
            optimizer.state["mark"] = 1

        def unmark(optimizer, state_dict):
            state_dict["marked"] = state_dict["state"].pop("mark", None)

        pre = optimizer.register_state_dict_pre_hook(mark)
        assert optimizer.state_dict()["state"]["mark"] == 1
        # a key of the state that is not a parameter does not affect a step
        run(optimizer, params, range(1))
        plain = {**plain, "state": {i: {**optimizer.state[param]} for i, param in enumerate(params)}}
        post = optimizer.register_state_dict_post_hook(unmark)
        self.assert_same(optimizer.state_dict(), {**plain, "marked": 1})
        pre.remove()
        del optimizer.state["mark"]
        self.assert_same(optimizer.state_dict(), {**plain, "marked": None})
        post.remove()
        self.assert_same(optimizer.state_dict(), plain)

    @compiled_and_eager
    def test_state_dict_post_hook_may_return_anything(self, device, dtype, optim_info, compile):
        params = parameters(dtype)
        optimizer = ours(optim_info, params, compile, **STATEFUL[optim_info.name])
        run(optimizer, params, range(1))
        calls = []
        optimizer.register_state_dict_post_hook(lambda opt, state_dict: calls.append("last"))
        optimizer.register_state_dict_post_hook(lambda opt, state_dict: {"mine": sorted(state_dict)}, prepend=True)
        assert optimizer.state_dict() == {"mine": ["param_groups", "state"]}
        assert calls == ["last"]

    @compiled_and_eager
    def test_load_state_dict_hooks(self, device, dtype, optim_info, compile):
        params = parameters(dtype)
        optimizer = ours(optim_info, params, compile, **STATEFUL[optim_info.name])
        run(optimizer, params, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        calls = []

        def replace_lr(optimizer, state_dict):
            calls.append("replace lr")
            state_dict = copy.deepcopy(state_dict)
            state_dict["param_groups"][0]["lr"] = 0.25
            return state_dict

        handles = [
            optimizer.register_load_state_dict_pre_hook(replace_lr),
            optimizer.register_load_state_dict_pre_hook(lambda opt, sd: calls.append("first"), prepend=True),
            optimizer.register_load_state_dict_post_hook(lambda opt: calls.append(opt.param_groups[0]["lr"])),
            optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("loaded"), prepend=True),
        ]
        optimizer.load_state_dict(saved)
        assert calls == ["first", "replace lr", "loaded", 0.25]
        assert saved["param_groups"][0]["lr"] != 0.25
        for handle in handles:
            handle.remove()
        optimizer.load_state_dict(saved)
        assert len(calls) == 4
        self.assert_same(optimizer.state_dict(), saved)
        run(optimizer, params, range(2, 4))

    @compiled_and_eager
    def test_step_hooks_and_their_order(self, device, dtype, optim_info, compile):
        params, closure = problem(dtype)
        optimizer = ours(optim_info, params, compile)
        bystander = ours(optim_info, parameters(dtype), compile)
        calls = []

        def note(what):
            def hook(opt, args, kwargs):
                # args also has the optimizer
                calls.append((what, opt is optimizer, len(args), sorted(kwargs)))

            return hook

        handles = [
            register_optimizer_step_post_hook(note("global post")),
            optimizer.register_step_post_hook(note("post")),
            optimizer.register_step_post_hook(note("second post")),
            optimizer.register_step_pre_hook(note("pre")),
            register_optimizer_step_pre_hook(note("global pre")),
        ]
        order = ["global pre", "pre", "post", "second post", "global post"]
        try:
            optimizer.step()
            assert calls == [(what, True, 1, []) for what in order]
            calls.clear()
            optimizer.step(closure=closure)
            assert calls == [(what, True, 1, ["closure"]) for what in order]
            calls.clear()
            bystander.step()
            assert calls == [(what, False, 1, []) for what in ("global pre", "global post")]
        finally:
            for handle in handles:
                handle.remove()
        calls.clear()
        optimizer.step()
        assert calls == []

    @compiled_and_eager
    def test_step_hooks_see_and_change_the_step(self, device, dtype, optim_info, compile):
        params, closure = problem(dtype)
        optimizer = ours(optim_info, params, compile)
        start = copy.deepcopy(params)
        seen = SimpleNamespace()

        def before(opt, args, kwargs):
            seen.before = copy.deepcopy(params)
            return args, {"closure": closure}

        def after(opt, args, kwargs):
            seen.after = copy.deepcopy(params)
            seen.kwargs = kwargs

        pre, post = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
        assert optimizer.step() > 0
        self.assert_same(seen.before, start)
        self.assert_same(seen.after, params)
        assert not any(torch.equal(a, b) for a, b in zip(seen.before, seen.after, strict=True))
        assert seen.kwargs == {"closure": closure}
        pre.remove()
        post.remove()
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: "nonsense")
        with pytest.raises(RuntimeError, match="must return None or a tuple"):
            optimizer.step()


instantiate_device_type_tests(TestHooks, globals(), only_for=("cpu",))
