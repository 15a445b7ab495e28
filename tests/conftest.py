from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from compiled_optim import backends

collect_ignore = ["frameworks"]  # they need an environment of their own: make test-frameworks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="run the parity tests on this device type: cpu, cuda, npu")


def pytest_configure(config: pytest.Config) -> None:
    device = config.getoption("--device")
    available = backends.for_device(device).available()
    if not available:
        raise pytest.UsageError(f"--device {device}: {available.reason}")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """The device that --device names."""
    return pytestconfig.getoption("--device")


@pytest.fixture(params=[True, False], ids=["compiled", "eager"])
def compiled(request: pytest.FixtureRequest) -> bool:
    """Run a test once compiled and once eagerly."""
    return request.param


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: on a busy machine, several are many times slower for tiny models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
