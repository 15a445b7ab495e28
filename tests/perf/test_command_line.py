"""``python -m perf``: bad input is refused with one line, and an interrupted run keeps its results."""

from __future__ import annotations

import json

import pytest

import perf.contenders
import perf.race
from perf.__main__ import main
from perf.clock import Clock

from .racing import QUICK

BAD = {
    "workload": (["--workload", "resnet51"], "unknown workload 'resnet51': choose from tiny_mlp, "),
    "optimizer": (["--optimizer", "adamw"], "unknown optimizer 'adamw': choose from SGD, "),
    "dtype": (["--dtype", "fp8"], "unknown dtype 'fp8': choose from float32, "),
    "contender": (["--contender", "apex"], "unknown contender 'apex': choose from ours, "),
    "peer": (["--contender", "heavyball"], "contender 'heavyball' is not installed: pip install .[peers]"),
    "npu": (["--device", "npu"], "no device 'npu' here"),
    "second gpu": (["--device", "cuda:99"], "no device 'cuda:99' here"),
    "no device": (["--device", "toaster"], "no device 'toaster' here"),
    "scaling": (["--thread-scaling", "policy"], "argument --thread-scaling: not allowed with argument --no-thread-sc"),
    "deepspeed": (["--contender", "deepspeed"], "contender 'deepspeed' is not installed: pip install .[peers]"),
    "storages": (["--storages", "--optimizer", "SGD"], "--storages compares AdamW only"),
    "rounds": (["--rounds", "0"], "--rounds 0: at least 1"),
    "words": (["--rounds", "many"], "argument --rounds: invalid int value: 'many'"),
    "flag": (["--fast"], "unrecognized arguments: --fast"),
    "no file": (["--compare", "none.json"], "cannot read none.json: No such file or directory"),
    "a directory": (["--compare", "."], "cannot read .: Is a directory"),
    "not json": (["--compare", "words.txt"], "words.txt is not a report written by --json"),
    "not ours": (["--load", "list.json"], "list.json is not a report written by --json"),
    "too old": (["--compare", "old.json"], "old.json was written by another version of this report"),
    "json": (["--json", "nowhere/a.json"], "cannot write nowhere/a.json"),
    "markdown": (["--markdown", "."], "cannot write ."),
    "plot": (["--plot", "a.xls"], "--plot a.xls: the name must end in one of .png, .svg, .pdf"),
    "no matplotlib": (["--plot", "a.png"], "--plot needs matplotlib: pip install .[perf]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line_and_exit_code_2(case, capsys, tmp_path, monkeypatch, nothing_installed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("not JSON")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "old.json").write_text('{"format": 0}')
    arguments, message = BAD[case]
    with pytest.raises(SystemExit) as left:
        main([*QUICK, *arguments])
    printed = capsys.readouterr()
    assert left.value.code == 2
    assert printed.out == ""
    assert printed.err.startswith(f"python -m perf: {message}")
    assert printed.err.count("\n") == 1


def test_an_interrupted_run_keeps_what_it_has(small, monkeypatch, tmp_path, capsys):
    calls = 0

    class Interrupted(Clock):
        def time(self, call):
            nonlocal calls
            calls += 1
            if calls == (4 + 3 * 2) + (4 + 2 * 2 + 2):  # the second contender in the third round of the second race
                raise KeyboardInterrupt
            return super().time(call)

    monkeypatch.setattr(perf.race, "Clock", Interrupted)
    contenders = ["--contender", "torch fused", "--contender", "torch foreach"]
    optimizers = ["--optimizer", "AdamW", "--optimizer", "SGD", "--optimizer", "Adam"]
    path = tmp_path / "part.json"
    arguments = ["--workload", "small", *optimizers, *contenders, "--rounds", "3", "--json", str(path)]
    assert main([*arguments, "--thread-scaling", "small"]) == 130
    assert "INTERRUPTED" in capsys.readouterr().out
    content = json.loads(path.read_text())
    assert content["interrupted"] is True
    assert [row["optimizer"] for row in content["rows"]] == ["AdamW", "AdamW", "SGD", "SGD"]
    assert [row["rounds"] for row in content["rows"][:2]] == [3, 3]
    assert sorted(row["rounds"] for row in content["rows"][2:]) == [2, 3]
    assert (
        "not started: small Adam float32, thread scaling of small, memory of resnet50, first steps" in content["notes"]
    )
