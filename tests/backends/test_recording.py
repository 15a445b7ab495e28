"""What a generated function does is recorded, or the reason why it cannot be."""

from __future__ import annotations

import pytest

from compiled_optim.backends.recording import CPP, TRITON, CannotRecord, Extent, _check_calls, _extent

SIZES = ((7, 11), (5, 13))


@pytest.mark.parametrize(
    ("numbers", "extent"),
    [
        ((77, 65), Extent(1, (0, 1))),
        ((14, 10), Extent(2, (0,))),
        ((11, 13), Extent(1, (1,))),
        ((3, 3), Extent(3, ())),
        ((0, 0), Extent(0, (0, 1))),
    ],
)
def test_numbers_are_products_of_sizes(numbers, extent):
    assert _extent(numbers, SIZES) == extent


def test_a_number_that_is_no_product_of_sizes_is_refused():
    with pytest.raises(CannotRecord, match="it uses the numbers 8 and 6 for the sizes"):
        _extent((8, 6), SIZES)


CALLS = {
    "kernel": (CPP, "cpp_fused_0(a, b)", None),
    "allocation": (CPP, "b = empty_strided_cpu((2,), (1,), torch.float32)", None),
    "library": (CPP, "extern_kernels.mm(a, b, out=c)", r"it calls extern_kernels\.mm"),
    "fallback": (CPP, "torch.ops.aten.sort.default(a)", r"it calls torch\.ops\.aten\.sort\.default"),
    "branch": (CPP, "if a:\n        pass", "it contains the statement If"),
    "launch": (TRITON, "triton_poi_0.run(a, b, stream=get_raw_stream(0))", None),
    "device": (TRITON, "with torch.cuda._DeviceGuard(0):\n        torch.cuda.set_device(0)", None),
    "library on a GPU": (TRITON, "extern_kernels.mm(a, b, out=c)", r"it calls extern_kernels\.mm"),
}


@pytest.mark.parametrize(("form", "line", "reason"), CALLS.values(), ids=CALLS)
def test_other_calls_are_refused(form, line, reason, tmp_path):
    module = tmp_path / "generated.py"
    module.write_text(f"def call(args):\n    a, b, c = args\n    args.clear()\n    {line}\n    return ()\n")
    namespace = {"__file__": str(module), "cpp_fused_0": None, "triton_poi_0": None}
    if reason is None:
        _check_calls(namespace, form)
    else:
        with pytest.raises(CannotRecord, match=reason):
            _check_calls(namespace, form)
