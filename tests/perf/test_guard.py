"""``python -m perf.guard``: steps with and without the guard take turns."""

from __future__ import annotations

import compiled_optim as co
from perf import guard


def test_the_share_of_the_guard_has_quartiles(small, monkeypatch, capsys):
    monkeypatch.setattr(guard, "ROUNDS", {"small": 3})
    monkeypatch.setattr(guard, "OPTIMIZERS", [co.SGD])
    taken = iter([3.0, 4.0, 4.0, 2.0, 2.0, 4.0] * 2)  # in µs; without the guard first, then with it first, and so on
    order = []

    def seconds(optimizer):
        order.append(optimizer)
        return next(taken) * 1e-6

    monkeypatch.setattr(guard, "seconds", seconds)
    guard.main()
    assert [optimizer is order[0] for optimizer in order[:6]] == [True, False, False, True, True, False]
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("small")]
    assert [row[2] for row in rows] == ["parameters", "module"]
    for row in rows:
        assert row[3:7] == ["4", "2", "50.0%", "(37.5%–50.0%)"]
