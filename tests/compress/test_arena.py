import os
import subprocess
import sys

import pytest
import torch

from plait.compress.arena import Arena, Buffer, borrowed, mapped


def test_a_buffer_has_the_size_asked_for_and_is_used_again():
    arena = Arena(shared=False)
    one = arena.take(5000)
    assert len(one.view) == one.tensor.numel() == 5000
    assert one.place is None
    address = one.tensor.data_ptr()
    one.drop()
    two = arena.take(4097)
    assert two.tensor.data_ptr() == address
    assert arena.take(4097).tensor.data_ptr() != address
    assert arena.bytes == 2 * 8192


def test_it_comes_back_when_the_last_holder_lets_go():
    arena = Arena(shared=False)
    buffer = arena.take(10)
    buffer.hold()
    buffer.drop()
    assert arena.take(10) is not buffer
    buffer.drop()
    assert arena.take(10) is buffer
    with pytest.raises(AssertionError, match="more often than held"):
        [buffer.drop() for _ in range(2)]


def test_many_sizes_do_not_pile_up():
    arena = Arena(shared=False)
    for size in range(1, 200):
        buffer = arena.take(size)
        buffer.view[:] = bytes([size]) * size
        assert buffer.tensor.eq(size).all()
        buffer.drop()
    assert arena.bytes == 4096


def test_tensor_and_view_are_the_same_bytes():
    buffer = Arena(shared=True).take(3)
    buffer.view[:] = b"abc"
    assert buffer.tensor.tolist() == [97, 98, 99]


def test_a_shared_arena_is_seen_by_whoever_maps_it():
    arena = Arena(shared=True)
    first, second = arena.take(4096), arena.take(100_000)
    second.view[:3] = b"hey"
    assert (first.place, second.place) == (0, 4096)
    other = mapped(arena.descriptor)
    assert bytes(other[second.place : second.place + 3].tolist()) == b"hey"
    code = "import os, sys; print(os.pread(int(sys.argv[1]), 3, 4096).decode())"
    command = [sys.executable, "-c", code, str(arena.descriptor)]
    said = subprocess.run(command, pass_fds=[arena.descriptor], capture_output=True, text=True, check=True)
    assert said.stdout == "hey\n"
    descriptor = arena.descriptor
    arena.close()
    arena.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
    assert bytes(second.view[:3]) == b"hey", "what is mapped outlives the descriptor"


def test_a_tensors_own_bytes():
    done = []
    tensor = torch.tensor([1.0, 2.0])
    buffer = borrowed(tensor, lambda: done.append(True))
    assert isinstance(buffer, Buffer)
    assert bytes(buffer.view) == tensor.numpy().tobytes()
    buffer.view[4:8] = tensor[:1].numpy().tobytes()
    assert tensor.tolist() == [1.0, 1.0]
    buffer.drop()
    assert done == [True]
