"""What changes in every step is copied to the device asynchronously, and no copy reads the values of a later step."""

from __future__ import annotations

import pytest
import torch

import compiled_optim as co
from compiled_optim.backends import staging
from compiled_optim.backends.cpu import CpuBackend
from compiled_optim.backends.cuda import CudaBackend
from compiled_optim.backends.staging import Staging
from tests.helpers import parameters


class Queue:
    """A device that makes the copies of a stream only when it is told to, as a GPU that is behind the host."""

    def __init__(self) -> None:
        self.waiting: list[tuple[torch.Tensor, Event]] = []
        self.received: list[list[int]] = []

    def run(self, count: int) -> None:
        for source, event in self.waiting[:count]:
            self.received.append(source.tolist())
            event.reached = True
        del self.waiting[:count]


class Event:
    """An event that is reached when the queue has made the copy before it."""

    def __init__(self, queue: Queue) -> None:
        self.queue, self.reached = queue, True

    def record(self) -> None:
        self.reached = False
        self.queue.waiting[-1] = (self.queue.waiting[-1][0], self)

    def query(self) -> bool:
        return self.reached


class LateStaging(Staging):
    """Staging whose copies are made later, from the host memory as it is then."""

    def __init__(self, size: int, queue: Queue) -> None:
        self._queue = queue
        super().__init__(size, torch.device("cpu"), lambda: Event(queue))

    def send(self, buffer: staging.Buffer, size: int) -> None:
        self._queue.waiting.append((buffer.tensor[:size], buffer.event))
        super().send(buffer, size)


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_no_buffer_is_overwritten_before_its_copy_is_made(ahead):
    queue = Queue()
    late = LateStaging(4, queue)
    for step in range(40):
        buffer = late.take()
        buffer.memory[:] = bytes([step] * 4)
        late.send(buffer, 4)
        if len(queue.waiting) > ahead:
            queue.run(1)
    queue.run(len(queue.waiting))
    assert queue.received == [[step] * 4 for step in range(40)]
    assert len(late) <= ahead + 2, "buffers are used again"


def test_a_buffer_that_is_used_too_early_is_seen(monkeypatch):
    """Negative control: without waiting for events, a late copy reads the values of another step."""
    monkeypatch.setattr(Event, "query", lambda self: True)
    queue = Queue()
    late = LateStaging(4, queue)
    for step in range(40):
        buffer = late.take()
        buffer.memory[:] = bytes([step] * 4)
        late.send(buffer, 4)
    queue.run(len(queue.waiting))
    assert queue.received != [[step] * 4 for step in range(40)]


def test_only_what_is_used_is_copied():
    sent = Staging(8, torch.device("cpu"))
    buffer = sent.take()
    buffer.memory[:] = bytes(range(1, 9))
    sent.send(buffer, 3)
    assert sent.memory.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]


class Capturable(CpuBackend):
    """The CPU backend with the check of the CUDA backend before each step."""

    check_step = CudaBackend.check_step


def test_a_step_is_refused_while_a_cuda_graph_is_captured(monkeypatch):
    params = parameters([(4,)])
    params[0].grad = torch.ones(4)
    optimizer = co.SGD(params, lr=0.5, momentum=0.9, backend=Capturable())
    optimizer.warmup()
    before = params[0].detach().clone()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"cannot be captured in a CUDA graph.*call step\(\) outside"):
        optimizer.step()
    assert torch.equal(params[0], before)
    assert not optimizer.state
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    optimizer.step()
    assert torch.equal(params[0], before - 0.5)
