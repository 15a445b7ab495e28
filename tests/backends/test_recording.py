"""What a generated function does is recorded, or the reason why it cannot be."""

from __future__ import annotations

import pytest

from compiled_optim.backends.recording import CannotRecord, Extent, _check_calls, _extent

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
    "kernel": ("cpp_fused_0(a, b)", None),
    "allocation": ("b = empty_strided_cpu((2,), (1,), torch.float32)", None),
    "library": ("extern_kernels.mm(a, b, out=c)", r"it calls extern_kernels\.mm"),
    "fallback": ("torch.ops.aten.sort.default(a)", r"it calls torch\.ops\.aten\.sort\.default"),
    "branch": ("if a:\n        pass", "it contains the statement If"),
}


@pytest.mark.parametrize(("line", "reason"), CALLS.values(), ids=CALLS)
def test_other_calls_are_refused(line, reason, tmp_path):
    module = tmp_path / "generated.py"
    module.write_text(f"def call(args):\n    a, b, c = args\n    args.clear()\n    {line}\n    return ()\n")
    namespace = {"__file__": str(module)}
    if reason is None:
        _check_calls(namespace, {"cpp_fused_0": None})
    else:
        with pytest.raises(CannotRecord, match=reason):
            _check_calls(namespace, {"cpp_fused_0": None})
