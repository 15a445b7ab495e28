from __future__ import annotations

import pytest


@pytest.fixture(params=[True, False], ids=["compiled", "eager"])
def compiled(request: pytest.FixtureRequest) -> bool:
    """Run a test once compiled and once eagerly."""
    return request.param
