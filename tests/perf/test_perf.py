"""The perf report: what it refuses, what it lists, and that nobody gets away with not stepping."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import perf.contenders
import perf.race
from perf import busy, compile_cost, first_step, render
from perf.__main__ import main
from perf.cases import Case
from perf.clock import Clock
from perf.compare import compare
from perf.contenders import CONTENDERS, Contender
from perf.memory import Memory, extra_bytes
from perf.optimizers import RULES
from perf.race import Length, Race, spread
from perf.report import Report, Spread
from perf.workloads import TITLES, WORKLOADS, elements

CPU = torch.device("cpu")
QUICK = ["--workload", "tiny_mlp", "--rounds", "3", "--no-compile-cost"]
EAGER = ["ours eager", "torch foreach", "torch loop", "usual foreach", "adamp"]


@pytest.fixture(scope="module")
def memory():
    return Memory(CPU)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A report of the tiny workload, without anything that has to be compiled as a whole model or installed."""
    path = tmp_path_factory.mktemp("perf") / "report.json"
    contenders = [word for name in ("ours", "torch fused", *EAGER) for word in ("--contender", name)]
    assert main([*QUICK, *contenders, "--json", str(path)]) == 0
    return path


@pytest.fixture
def small(monkeypatch):
    """A workload of the shapes that rules treat differently."""
    monkeypatch.setitem(WORKLOADS, "small", lambda: [(16, 8), (8,), (4, 3, 3, 3), (1,)])
    monkeypatch.setitem(TITLES, "small", "small")


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(perf.contenders.importlib.util, "find_spec", lambda name: None)


def race(memory, optimizer, contenders, workload="small", dtype="float32", rounds=3):
    made = Race(Case(workload, optimizer, dtype), CPU, memory, Length(rounds), contenders)
    made.run(lambda what, fraction: None)
    return {row.contender: row for row in made.rows()}


@pytest.mark.parametrize(
    ("workload", "tensors", "parameters"),
    [
        ("tiny_mlp", 20, 41_600),
        ("policy", 12, 1_687_719),
        ("resnet50", 161, 25_557_032),
        ("vit_b16", 152, 86_567_656),
        ("bert_base", 199, 109_482_240),
        ("gpt2_small", 148, 124_439_808),
        ("llama_1b_shard", 146, 1_235_814_400 // 8),
    ],
)
def test_workloads_have_the_published_sizes(workload, tensors, parameters):
    shapes = WORKLOADS[workload]()
    assert (len(shapes), elements(shapes)) == (tensors, parameters)
    assert workload in TITLES


BAD = {
    "workload": (["--workload", "resnet51"], "unknown workload 'resnet51': choose from tiny_mlp, "),
    "optimizer": (["--optimizer", "adamw"], "unknown optimizer 'adamw': choose from SGD, "),
    "dtype": (["--dtype", "fp8"], "unknown dtype 'fp8': choose from float32, "),
    "contender": (["--contender", "apex"], "unknown contender 'apex': choose from ours, "),
    "peer": (["--contender", "heavyball"], "contender 'heavyball' is not installed: pip install .[peers]"),
    "npu": (["--device", "npu"], "no device 'npu' here"),
    "second gpu": (["--device", "cuda:99"], "no device 'cuda:99' here"),
    "no device": (["--device", "toaster"], "no device 'toaster' here"),
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


def test_everybody_is_listed_absent_or_not(small, memory, nothing_installed):
    rows = race(memory, "AdamW", [], rounds=1)
    assert list(rows) == list(CONTENDERS)
    status = {name: row.status for name, row in rows.items()}
    assert [status[name] for name in ("ours", "torch fused", "torch foreach", "torch loop")] == ["ok"] * 4
    assert [status[name] for name in ("heavyball", "optimi", "deepspeed")] == ["absent"] * 3
    assert status["usual foreach"] == status["adamp"] == "none"
    report = Report({}, "", "", rows=list(rows.values()))
    assert "absent: heavyball, optimi, deepspeed (not installed: pip install .[peers])" in render.text(report)
    assert "not measured: heavyball, optimi, deepspeed: not installed: pip install .[peers]" in render.markdown(report)


def test_who_compiles_whole_models_has_to_be_asked_for_on_large_ones(memory):
    name = "torch.compile(step)"
    rows = {r.contender: r for r in Race(Case("resnet50", "AdamW"), CPU, memory, Length()).rows()}
    asked = Race(Case("resnet50", "AdamW"), CPU, memory, Length(), [name]).rows()[0]
    assert rows[name].status == "skipped"
    assert f'--contender "{name}"' in rows[name].reason
    assert asked.status == "interrupted"  # it would have run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", RULES)
def test_implementations_agree(optimizer, dtype, small, memory):
    """Ours against code of others, in a race: whoever computes something else is an error."""
    rows = race(memory, optimizer, EAGER, dtype=dtype, rounds=1)
    assert rows["ours eager"].status == "ok", rows["ours eager"].reason
    assert {row.status for row in rows.values()} <= {"ok", "none"}
    assert sum(row.status == "ok" for row in rows.values()) >= 2


class DropsGradients(torch.optim.AdamW):
    """Steps, and throws the gradients away, as one package does: the next step would find nothing to do."""

    def step(self, closure=None):
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            param.grad = None


class Lazy(torch.optim.AdamW):
    def step(self, closure=None):
        return None


class Tiring(torch.optim.AdamW):
    """Steps while it is checked, and no longer."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure) if self.steps <= perf.race.CHECKED_STEPS else None


class Collapsing(Tiring):
    """Fails after a while."""

    def step(self, closure=None):
        if self.steps > perf.race.CHECKED_STEPS + 3:
            raise ValueError("enough")
        self.steps += 1
        return torch.optim.AdamW.step(self, closure)


class Poisonous(torch.optim.AdamW):
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.data.fill_(float("nan"))


class Broken(torch.optim.AdamW):
    def step(self, closure=None):
        raise ValueError("out of luck\nand more")


@pytest.mark.parametrize(
    ("cls", "options", "status", "reason"),
    [
        (DropsGradients, {}, "ok", ""),
        (Lazy, {}, "error", "did not step: the parameters are what they were"),
        (Tiring, {}, "error", "stopped stepping while it was timed"),
        (Collapsing, {}, "error", "ValueError: enough"),
        (Broken, {}, "error", "ValueError: out of luck"),
        (torch.optim.AdamW, {"lr": 1.1e-3}, "error", "computes something else: 0.1"),
        (Poisonous, {}, "error", "computes something else: nan"),
    ],
    ids=["drops gradients", "lazy", "tiring", "collapsing", "broken", "wrong", "poisonous"],
)
def test_a_contender_that_does_not_really_step_is_an_error(cls, options, status, reason, small, memory, monkeypatch):
    made = Contender(lambda rule, params: cls(params, **{**rule.options, **options}), lambda rule: True)
    monkeypatch.setitem(CONTENDERS, "suspect", made)
    rows = race(memory, "AdamW", ["suspect", "torch fused"])
    assert (rows["suspect"].status, rows["suspect"].reason[: len(reason)]) == (status, reason)
    assert rows["torch fused"].status == "ok"
    assert (rows["suspect"].time is None) == (status == "error")
    if status == "error":
        assert f"ERROR suspect: {reason}" in render.text(Report({}, "", "", rows=list(rows.values())))


def test_rows_have_times_ratios_and_what_the_step_took(saved):
    report = Report.load(saved)
    rows = {row.contender: row for row in report.rows}
    assert rows["ours"].status == "ok"
    for row in rows.values():
        if row.status == "ok":
            assert 1 <= row.rounds <= 3
            assert 0 < row.time.low <= row.time.median <= row.time.high
            assert row.baseline == "torch fused"
            assert row.warmup_seconds > 0
            assert row.deviation < 1e-5
    assert rows["ours"].rounds == rows["torch fused"].rounds == 3
    assert rows["torch fused"].ratio == Spread(1.0, 1.0, 1.0)
    assert rows["ours"].extra_bytes < 1000 < rows["torch foreach"].extra_bytes
    assert report.bytes_per_second > 1e8
    assert report.machine["threads"] == str(torch.get_num_threads())


def test_json_comes_back_and_can_be_shown_again(saved, tmp_path, capsys):
    report = Report.load(saved)
    report.save(tmp_path / "again.json")
    assert Report.load(tmp_path / "again.json") == report
    assert main(["--load", str(saved), "--markdown", str(tmp_path / "a.md"), "--plot", str(tmp_path / "a.png")]) == 0
    assert "tiny_mlp, AdamW, float32: 20 tensors, 41,600 parameters, 28 B to move for each" in capsys.readouterr().out
    assert "| tiny_mlp " in (tmp_path / "a.md").read_text()
    picture = (tmp_path / "a.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000


def test_compare_tells_what_changed_beyond_the_spread(saved, tmp_path, capsys):
    old = Report.load(saved)
    assert "0 of 5 rows measured in both changed" in compare(old, Report.load(saved))
    new = Report.load(saved)
    new.machine["threads"] = "64"
    for report, ratio in ((old, Spread(1.0, 0.9, 1.1)), (new, Spread(0.5, 0.4, 0.6))):
        report.rows = [replace(r, ratio=ratio) if r.contender == "ours" else r for r in report.rows]
    assert "0 of 5 rows" in compare(old, new)
    assert "5 rows have fewer than 8 rounds, too few to tell" in compare(old, new)
    for report in (old, new):
        report.rows = [replace(row, rounds=20) for row in report.rows]
    said = compare(old, new)
    assert "The baselines took 1.00 to 1.00 times as long as then" in said
    assert "1 of 5 rows measured in both changed" in said
    assert "2.00× faster" in said
    assert f"threads differs: {old.machine['threads']} then, 64 now" in said
    new.rows = [replace(r, ratio=Spread(0.95, 0.85, 1.05)) if r.contender == "ours" else r for r in new.rows]
    assert "0 of 5 rows" in compare(old, new)
    new.rows = [replace(r, status="error", time=None) if r.contender == "ours" else r for r in new.rows[:-1]]
    assert "tiny_mlp AdamW float32 ours: ok then, error now" in compare(old, new)
    assert "only in the report of then: 1 rows" in compare(old, new)
    new.save(tmp_path / "new.json")
    assert main(["--load", str(tmp_path / "new.json"), "--compare", str(saved)]) == 0
    assert "Compared with the report of" in capsys.readouterr().out


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
    assert main([*arguments, "--no-compile-cost"]) == 130
    assert "INTERRUPTED" in capsys.readouterr().out
    content = json.loads(path.read_text())
    assert content["interrupted"] is True
    assert [row["optimizer"] for row in content["rows"]] == ["AdamW", "AdamW", "SGD", "SGD"]
    assert [row["rounds"] for row in content["rows"][:2]] == [3, 3]
    assert sorted(row["rounds"] for row in content["rows"][2:]) == [2, 3]
    assert "not started: small Adam float32" in content["notes"]


@pytest.mark.parametrize(
    ("optimizer", "itemsize", "expected"),
    [
        ("AdamW", 4, 28),
        ("AdamW", 2, 14),
        ("AdamW+clip", 4, 32),
        ("SGD", 4, 20),
        ("RMSprop", 4, 20),
        ("BertAdam", 4, 32),
    ],
)
def test_bytes_that_a_rule_has_to_move(optimizer, itemsize, expected):
    assert RULES[optimizer].bytes_per_parameter(itemsize) == expected


def test_the_limit_is_bytes_over_bandwidth_and_not_for_what_fits_in_the_cache(saved):
    report = Report.load(saved)
    report.bytes_per_second = 28e9
    row = replace(report.rows[0], parameters=10**9, in_cache=False, time=Spread(2.0, 2.0, 2.0))
    assert report.limit(report.rows[0]) is None
    assert report.limit(row) == pytest.approx(1.0)
    report.rows = [row]
    said = render.text(report)
    assert "limit 1000 ms" in said
    assert " 56 " in said  # bytes for each parameter could have been moved in 2 s
    assert " 50%" in said


def test_extra_memory_is_what_a_step_allocates():
    one = torch.zeros(1000, 1000)
    assert extra_bytes(lambda: one.add_(1), CPU) < 100
    assert extra_bytes(lambda: (one + 1).add_(one * 2), CPU) == pytest.approx(2 * 4e6, abs=100)


def test_devices_are_timed_by_their_events(monkeypatch):
    said = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            said.append("record")

        def elapsed_time(self, other):
            return 250.0  # milliseconds

    class Module:
        synchronize = staticmethod(lambda device: said.append("synchronize"))

    Module.Event = Event
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert Clock(torch.device("cuda")).time(lambda: said.append("call")) == 0.25
    assert said == ["synchronize", "record", "call", "record", "synchronize"]


@pytest.mark.parametrize(("used", "share"), [(100, None), (200, "10%"), (1000, "90%")])
def test_a_busy_machine_is_told(used, share, tmp_path, monkeypatch):
    """In 10 s of CPU time this process used 1 s and others the rest of ``used``, in hundredths."""
    monkeypatch.setattr(busy, "STAT", tmp_path / "stat")
    monkeypatch.setattr(busy.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(busy.os, "times", lambda: (0.0, 0.0, 0.0, 0.0, 0.0))
    busy.STAT.write_text("cpu  0 0 0 0 0 0 0 0 0 0\n")
    others = busy.Others()
    busy.STAT.write_text(f"cpu  {used - 50} 0 20 {1000 - used} 0 0 0 30 0 0\n")
    monkeypatch.setattr(busy.os, "times", lambda: (0.5, 0.2, 0.2, 0.1, 9.0))
    note = others.note()
    assert [f"others took {share} of the CPU" in line for line in note] == ([True] if share else [])


def test_quartiles():
    assert spread([3.0]) == Spread(3.0, 3.0, 3.0)
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)


def test_first_steps_in_processes_of_their_own(small, monkeypatch):
    monkeypatch.setattr(
        compile_cost, "PROCESSES", [("cache", "ours eager", [("tiny_mlp", "first"), ("policy", "second")])]
    )
    found = list(compile_cost.measure("cpu", lambda what, fraction: None))
    assert [(f.workload, f.situation, f.recompiles) for f in found] == [
        ("tiny_mlp", "first", 0),
        ("policy", "second", 0),
    ]
    monkeypatch.setattr(compile_cost, "PROCESSES", [("cache", "nobody", [("tiny_mlp", "first")])])
    with pytest.raises(compile_cost.ChildError, match=r"^first step of nobody on tiny_mlp failed: KeyError: 'nobody'$"):
        list(compile_cost.measure("cpu", lambda what, fraction: None))
    counts = first_step.first_step("ours", "small", "cpu")
    assert counts["graphs"] >= 1
    assert counts["calls_per_step"] >= 1
    assert counts["recompiles"] == 0
