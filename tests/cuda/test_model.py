"""The model itself: it must notice what it is there for."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.cuda_model.interface import Cuda
from tests.cuda_model.kernels import POISON
from tests.cuda_model.machine import Mixed, Race


def test_tensors_are_where_they_were_made(cuda: Cuda) -> None:
    x = torch.ones(3, device="cuda")
    assert x.device == torch.device("cuda", 0)
    assert x.is_cuda
    assert (x + x).device == torch.device("cuda", 0)
    assert x[1:].device == torch.device("cuda", 0)
    assert x.to("cuda:1").device == torch.device("cuda", 1)
    assert x.cpu().device == torch.device("cpu")
    assert torch.zeros(2).device == torch.device("cpu")
    assert torch.equal(x.cpu(), torch.ones(3))


def test_autograd_stays_on_the_device(cuda: Cuda) -> None:
    w = torch.ones(3, device="cuda").requires_grad_()
    (w * 2).sum().backward()
    assert w.grad is not None
    assert w.grad.device == torch.device("cuda", 0)
    assert w.grad.cpu().tolist() == [2.0, 2.0, 2.0]


def test_mixing_devices_is_refused(cuda: Cuda) -> None:
    x = torch.ones(3, device="cuda")
    for other in (torch.ones(3), torch.ones(3, device="cuda:1")):
        with pytest.raises(Mixed):
            x + other
    assert (x * torch.tensor(2.0)).cpu().tolist() == [2.0] * 3  # a number on the CPU may stand among them


def test_two_streams_race_unless_ordered(cuda: Cuda) -> None:
    x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side), pytest.raises(Race):
        x.add_(1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    with pytest.raises(Race):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    x.add_(1)


def test_waits_are_counted(cuda: Cuda) -> None:
    x = torch.ones(3, device="cuda")
    with cuda.no_waits():
        x.add_(1).sum()
    for wait in (lambda: x.sum().item(), lambda: x.nonzero(), lambda: x.tolist(), lambda: x.cpu(), lambda: x[x > 0], lambda: bool(x[0])):
        before = len(cuda.waits)
        wait()
        assert len(cuda.waits) > before


def being_read() -> tuple[torch.Tensor, torch.Tensor, torch.cuda.Stream]:
    """A tensor that another stream reads, what it makes of it, and that stream."""
    side = torch.cuda.Stream()
    x = torch.ones(300, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        return x, x + 1, side


def test_a_freed_block_is_used_again_on_its_stream_at_once(cuda: Cuda) -> None:
    x, total, _ = being_read()
    address = x.data_ptr()
    del x
    with pytest.raises(Race):
        torch.zeros(300, device="cuda")
    assert total.data_ptr() != address


def test_record_stream_delays_that(cuda: Cuda) -> None:
    x, _, side = being_read()
    address = x.data_ptr()
    x.record_stream(side)
    del x
    other = torch.zeros(300, device="cuda")
    assert other.data_ptr() != address
    side.synchronize()
    assert torch.zeros(300, device="cuda").data_ptr() == address


def test_an_asynchronous_copy_arrives_when_it_was_waited_for(cuda: Cuda) -> None:
    x = torch.full((4,), 3.0, device="cuda")
    host = torch.empty(4, pin_memory=True)
    with cuda.no_waits():
        host.copy_(x, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    assert host.view(torch.uint8).tolist() == [POISON] * 16
    event.synchronize()
    assert host.tolist() == [3.0] * 4


def test_a_list_with_one_tensor_twice_is_refused(cuda: Cuda) -> None:
    x = torch.zeros(3, device="cuda")
    with pytest.raises(Race, match="twice"):
        torch._foreach_add_([x, x], 1)


def test_threads_have_their_own_device_and_stream(cuda: Cuda) -> None:
    found = []
    torch.cuda.set_device(1)
    thread = threading.Thread(target=lambda: found.append((torch.cuda.current_device(), torch.ones(1, device="cuda").device.index)))
    thread.start()
    thread.join()
    assert found == [(0, 0)]
    assert torch.cuda.current_device() == 1
