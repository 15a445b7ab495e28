"""The text of Inductor's Triton kernels, changed so that a driver can call them."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap

from compiled_optim.backends.recording import CannotRecord

MAX_WITH_ONE = re.compile(r"\(\(1\) \* \(\(1\) >= \((\w+)\)\) \+ \(\1\) \* \(\(\1\) > \(1\)\)\)")
"""The larger of 1 and a size, as Inductor writes it. A chunk has no empty rows, so it is the size. Triton cannot derive
from the expression that a row starts at a multiple of 16."""


def as_function(source: str, name: str) -> tuple[str, list[str]]:
    """Return the text of a kernel as a function of this name, and the names of its parameters.

    The number of the program becomes 0: the driver moves pointers instead.
    """
    text, found = re.subn(r"def \w+\(", f"def {name}(", source[source.find("@triton.jit") :], count=1)
    if not found:
        raise CannotRecord("its Triton source has no function")
    text = re.sub(r"tl\.program_id\(\d\)", "tl.full([], 0, tl.int32)", text)
    text = re.sub(r"tl\.num_programs\(\d\)", "tl.full([], 1, tl.int32)", text)
    text = MAX_WITH_ONE.sub(r"\1", text)
    (function,) = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    return text.strip(), [argument.arg for argument in function.args.args]


def with_helpers(kernels: str) -> str:
    """Return kernels together with those of Inductor's functions that they call.

    The functions are copied, because importing them imports all of Inductor and Dynamo.
    """
    from compiled_optim.torch_private import triton_helpers

    found: dict[str, str] = {}
    waiting = re.findall(r"triton_helpers\.(\w+)", kernels)
    while waiting:
        name = waiting.pop()
        function = getattr(getattr(triton_helpers, name, None), "fn", None)
        if name not in found and function is not None:
            found[name] = textwrap.dedent(inspect.getsource(function))
            waiting += [node.id for node in ast.walk(ast.parse(found[name])) if isinstance(node, ast.Name)]
    return "\n\n".join([*reversed(found.values()), kernels.replace("triton_helpers.", "")])
