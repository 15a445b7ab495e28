"""The catalog: one entry for each optimizer."""

from __future__ import annotations

from catalog import other_entries as other
from catalog import torch_entries
from catalog.entry import Entry

ALL: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        torch_entries.SGD,
        torch_entries.ADAM,
        torch_entries.ADAMW,
        other.ADAMP,
        other.SGDP,
        other.LAMB,
        other.LARS,
        other.BERT_ADAM,
        torch_entries.ADADELTA,
        torch_entries.RMSPROP,
        other.RMSPROP_TF,
        other.LION,
        other.ADAN,
        other.SCHEDULE_FREE_ADAMW,
        other.SCHEDULE_FREE_SGD,
        other.PRODIGY,
        torch_entries.ADAMAX,
        torch_entries.ADAGRAD,
        torch_entries.ADAFACTOR,
        torch_entries.RADAM,
        torch_entries.RPROP,
        torch_entries.NADAM,
        torch_entries.ASGD,
        torch_entries.MUON,
    )
}

CATALOG = {name: entry for name, entry in ALL.items() if entry.takes == "any shape"}
"""The optimizers that take parameters of any shape, for tests that use vectors and scalars."""

MATRICES = {name: entry for name, entry in ALL.items() if entry.takes == "matrices"}
"""The optimizers that take matrices only."""
