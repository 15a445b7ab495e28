"""Check what a built wheel contains: the package with its backends and type marker, and nothing else at the top."""

import sys
import zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
tops = {name.split("/")[0] for name in names}
assert {top for top in tops if not top.endswith(".dist-info")} == {"compiled_optim"}, tops
for needed in ("py.typed", "__init__.py", "adam.py", "backends/__init__.py", "backends/cpu.py"):
    assert f"compiled_optim/{needed}" in names, needed
print(f"{sys.argv[1]}: {len(names)} files, top level {sorted(tops)}")
