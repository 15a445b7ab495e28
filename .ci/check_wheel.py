"""Check what a built wheel contains: all modules, the C++ source and the type marker, and nothing else at the top."""

import sys
import zipfile
from pathlib import Path

names = zipfile.ZipFile(sys.argv[1]).namelist()
tops = {name.split("/")[0] for name in names}
assert {top for top in tops if not top.endswith(".dist-info")} == {"compiled_optim"}, tops
needed = {"compiled_optim/py.typed", *map(str, Path("compiled_optim").rglob("*.py"))}
needed |= {f"compiled_optim/{path}" for path in Path("backends").glob("*.*") if path.suffix in (".py", ".cpp")}
assert needed <= set(names), sorted(needed - set(names))
print(f"{sys.argv[1]}: {len(names)} files, top level {sorted(tops)}")
