"""The convergence runs: the tasks, the schedule, the table and a tiny run."""

from __future__ import annotations

import statistics

import pytest
import torch

from perf import convergence
from perf.convergence import WAYS, Run, main, rate, table, train
from perf.learning_tasks import TASKS, corpus, letters


@pytest.fixture(autouse=True)
def _eager(monkeypatch, one_thread):
    """Compile nothing: a run of a few steps would mostly compile."""
    monkeypatch.setenv("COMPILED_OPTIM_EAGER", "1")


def test_the_text_is_python_and_the_evaluated_part_is_another_one():
    trained, held_out = (bytes(corpus(part).tolist()) for part in (False, True))
    assert trained.count(b"\ndef ") > 1000
    assert held_out.count(b"\ndef ") > 50
    assert held_out[:2000] not in trained


def test_batches_depend_on_the_generator_only():
    for task in TASKS.values():
        first, again, other = (task.batch(torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
        assert torch.equal(first[0], again[0])
        assert not torch.equal(first[0], other[0])
        loss = convergence.loss_of(task.model(), *first)
        assert loss.item() == pytest.approx(torch.tensor(task.classes).log().item(), rel=0.2)


def test_letters_can_be_told_apart():
    pictures, classes = letters()
    assert pictures.shape[0] == len(classes)
    assert len(set(classes.tolist())) == 26
    flat = pictures.flatten(1)
    assert len(torch.unique(flat, dim=0)) == len(flat)
    assert (flat.amax(1) > 0.5).all()
    edges = torch.cat([pictures[:, :, 0], pictures[:, :, -1], pictures[..., 0], pictures[..., -1]], -1)
    assert (edges < 0.5).all(), "a letter is cut off"


def test_the_rate_rises_and_falls():
    rates = [rate(step / 100) for step in range(100)]
    assert max(rates) == pytest.approx(1.0)
    assert 0 < rates[0] < 0.5
    assert rates[-1] < 0.03


def test_weights_are_kept_in_the_dtype_of_the_storage_and_losses_are_computed_in_float32(monkeypatch):
    seen, models = set(), []
    task = TASKS["letters"]
    make = task.model

    def watched():
        models.append(model := make())
        model.register_forward_hook(lambda module, inputs, output: seen.add((module[0].weight.dtype, output.dtype)))
        return model

    monkeypatch.setattr(task, "model", watched)
    monkeypatch.setattr(convergence, "EVALUATED", 4)
    run = train(task, WAYS["bf16, nearest"], 0, 3)
    assert run.steps == [1, 2, 3]
    assert seen == {(torch.float32, torch.float32)}  # functional_call gives the module converted weights
    assert {param.dtype for param in models[0].parameters()} == {torch.bfloat16}


def test_a_tiny_run_prints_a_table_and_draws(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(convergence, "EVALUATED", 4)
    path = tmp_path / "curves.png"
    assert main(["--task", "letters", "--seeds", "2", "--steps", "2", "--plot", str(path)]) == 0
    printed = capsys.readouterr().out
    assert all(way in printed for way in WAYS)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_table_has_means_spreads_and_differences():
    losses = {way: [1.0, 1.2, 1.1] for way in WAYS} | {"bf16, nearest": [1.5, 1.6, 1.4]}
    runs = {way: [Run([1], [loss]) for loss in each] for way, each in losses.items()}
    lines = table({"text": runs}).splitlines()
    (nearest,) = (line for line in lines if "nearest" in line)
    assert nearest.split()[-4:] == [f"{statistics.fmean(losses['bf16, nearest']):.4f}", "0.2000", "+0.4000", "no"]
    assert sum(line.endswith("yes") for line in lines) == len(WAYS) - 2
