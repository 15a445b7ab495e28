from __future__ import annotations

import os

import pytest

# before transformers is imported, which reads it then
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Use one thread in all of these tests, because their models are tiny."""
