from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import torch

from worker.engine.lora.buffers import Buffers


def test_memory_is_used_again_once_no_tensor_refers_to_it() -> None:
    buffers = Buffers()
    first = buffers.take(1000)
    place, view = first.data_ptr(), first[500:].view(torch.float16)
    del first
    assert buffers.take(1000).data_ptr() != place, "a view still uses it"
    del view
    gc.collect()
    assert place in {buffers.take(900).data_ptr(), buffers.take(900).data_ptr()}


def test_a_small_buffer_does_not_take_a_large_memory() -> None:
    buffers = Buffers()
    buffers.take(1000)
    assert buffers.spare_bytes == 1000
    small = buffers.take(100)
    assert (len(small), buffers.spare_bytes) == (100, 1000)


def test_no_more_than_the_limit_is_kept() -> None:
    buffers = Buffers(spare_bytes=2500)
    held = [buffers.take(1000) for _ in range(4)]
    held.clear()
    assert buffers.spare_bytes == 2000


def test_no_two_threads_write_to_the_same_memory() -> None:
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
