import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from worker.engine.files.safetensors import Buffers


def test_memory_is_used_again_once_no_tensor_refers_to_it():
    buffers = Buffers()
    first = buffers.take(1000)
    place = first.data_ptr()
    view = first[500:].view(torch.float16)
    del first
    assert buffers.take(1000).data_ptr() != place, "a view still uses it"
    del view
    gc.collect()
    assert place in {buffers.take(900).data_ptr(), buffers.take(900).data_ptr()}


def test_a_small_buffer_does_not_take_a_large_memory():
    buffers = Buffers()
    buffers.take(1000)
    assert buffers.spare_bytes == 1000
    small = buffers.take(100)
    assert (len(small), buffers.spare_bytes) == (100, 1000)


def test_no_more_than_the_limit_is_kept():
    buffers = Buffers(spare_bytes=2500)
    held = [buffers.take(1000) for _ in range(4)]
    held.clear()
    assert buffers.spare_bytes == 2000


def test_no_two_threads_write_to_the_same_memory():
    buffers = Buffers()

    def fill(number: int) -> bool:
        for _ in range(200):
            mine = buffers.take(64)
            mine.fill_(number)
            if not (mine == number).all():
                return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(fill, range(8)))


class Cuda:
    """The two functions of the CUDA library, as its documentation has them."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        assert place not in self.locked
        if sum(self.locked.values()) + size > self.limit_bytes:
            return 2
        self.locked[place] = size
        return 0

    def cudaHostUnregister(self, place: int) -> int:  # noqa: N802
        del self.locked[place]
        return 0


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    cuda = Cuda(10_000)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    return cuda


def test_pages_are_unlocked_before_their_memory_is_given_up(cuda: Cuda):
    buffers = Buffers(spare_bytes=2000)
    buffers.locks_pages = True
    held = [buffers.take(1000) for _ in range(4)]
    places = [each.data_ptr() for each in held]
    assert list(cuda.locked) == places
    while held:
        held.pop(0)
    assert buffers.spare_bytes == 2000
    assert list(cuda.locked) == places[2:], "the first were given up"


def test_memory_that_the_system_does_not_lock_is_used_unlocked(cuda: Cuda):
    cuda.limit_bytes = 1500
    buffers = Buffers(spare_bytes=10_000)
    buffers.locks_pages = True
    held = [buffers.take(1000) for _ in range(3)]
    assert list(cuda.locked) == [held[0].data_ptr()]
    assert not buffers.locks_pages
    assert [len(each.fill_(1)) for each in held] == [1000] * 3
