"""The files that memory lies in: found however it was shared, mapped by others, refused if they are not those."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from transfer_exec.transport.shared_files import FilePlace, SharedRanges, map_places

SIZE = 3 * mmap.PAGESIZE


@pytest.fixture(params=["file_descriptor", "file_system"])
def strategy(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each of torch's ways to share a tensor."""
    choose: Callable[[str], None] = torch.multiprocessing.set_sharing_strategy
    before = str(torch.multiprocessing.get_sharing_strategy())  # type: ignore[no-untyped-call]
    choose(request.param)
    yield request.param
    choose(before)


def place_of(address: int, size: int) -> FilePlace | None:
    return SharedRanges.of_this_process().place(address, size)


def mapped(fd: int, size: int = SIZE, flags: int = mmap.MAP_SHARED) -> np.ndarray:
    return np.frombuffer(mmap.mmap(fd, size, flags=flags), dtype=np.uint8)


def shared(tmp_path: Path, size: int = SIZE) -> tuple[int, np.ndarray, FilePlace]:
    """A file in a folder with distinct bytes, mapped."""
    fd = os.open(tmp_path / "weights", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, size)
    memory = mapped(fd, size)
    memory[:] = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    place = place_of(memory.ctypes.data, size)
    assert place is not None
    return fd, memory, place


def test_tensors_that_torch_has_shared_and_views_of_one_storage(strategy: str) -> None:
    """Two parameters that are views of one storage at odd places are two places in one file, which is mapped once."""
    storage = torch.arange(5000, dtype=torch.float32)
    share: Callable[[torch.Tensor], object] = torch.Tensor.share_memory_
    share(storage)
    views = [storage[7:1000], storage[1501:4999].view(2, 1749)]
    places = [place_of(view.data_ptr(), view.nbytes) for view in views]
    first, second = places
    assert first is not None
    assert second is not None
    assert second.offset - first.offset == (1501 - 7) * 4
    one, other = map_places([first, second], [views[0].nbytes, views[1].nbytes])
    assert np.array_equal(one.view(np.float32), views[0].numpy())
    assert np.array_equal(other.view(np.float32), views[1].numpy().reshape(-1))
    assert one.base is not None
    assert other.ctypes.data - one.ctypes.data == second.offset - first.offset, "one mapping"
    storage[7] = -1
    assert one.view(np.float32)[0] == -1
    assert not one.flags.writeable


def test_a_module_that_torch_has_shared() -> None:
    module = torch.nn.Linear(3, 5)
    assert place_of(module.weight.data_ptr(), module.weight.nbytes) is None
    module.share_memory()
    assert all(place_of(each.data_ptr(), each.nbytes) is not None for each in module.parameters())


def test_files_by_descriptor_by_path_and_not_at_all(tmp_path: Path) -> None:
    """``torch.from_file`` keeps no descriptor, ``mmap`` does."""
    (tmp_path / "weights").write_bytes(np.random.default_rng(0).bytes(SIZE))
    memory = torch.from_file(str(tmp_path / "weights"), shared=True, size=SIZE, dtype=torch.uint8).numpy()
    found = place_of(memory.ctypes.data, SIZE)
    assert found is not None
    assert found.path == str(tmp_path / "weights")
    fd = os.open(tmp_path / "weights", os.O_RDONLY)
    assert place_of(memory.ctypes.data, SIZE) == msgspec.structs.replace(found, path=f"/proc/{os.getpid()}/fd/{fd}")
    os.close(fd)
    assert np.array_equal(map_places([found], [SIZE])[0], memory)
    (tmp_path / "weights").rename(tmp_path / "a name with blanks, é and (deleted)")
    (tmp_path / "weights").write_bytes(bytes(SIZE))
    found = place_of(memory.ctypes.data, SIZE)
    assert found is not None
    assert np.array_equal(map_places([found], [SIZE])[0], memory)
    (tmp_path / "a name with blanks, é and (deleted)").unlink()
    assert place_of(memory.ctypes.data, SIZE) is None, "nobody can open it any more"


def test_only_the_lent_part_of_a_file_is_mapped(tmp_path: Path) -> None:
    fd, memory, place = shared(tmp_path, 64 * mmap.PAGESIZE)
    begin = 40 * mmap.PAGESIZE + 3
    part = msgspec.structs.replace(place, offset=place.offset + begin)
    (got,) = map_places([part], [5000])
    assert np.array_equal(got, memory[begin : begin + 5000])
    whole = got.base
    assert isinstance(whole, np.ndarray)
    assert whole.nbytes <= 3 * mmap.PAGESIZE
    os.close(fd)


@pytest.mark.parametrize("kind", ["private", "private of a file", "shared of no file"])
def test_what_lies_in_no_file_that_others_can_map(kind: str, tmp_path: Path) -> None:
    fd, _, _ = shared(tmp_path)
    match kind:
        case "private":
            memory = np.zeros(SIZE, dtype=np.uint8)
        case "private of a file":
            memory = mapped(fd, flags=mmap.MAP_PRIVATE)
        case _:
            memory = mapped(-1)
    assert place_of(memory.ctypes.data, SIZE) is None
    os.close(fd)


def test_memory_that_leaves_its_file_is_in_none(tmp_path: Path) -> None:
    fd, memory, _ = shared(tmp_path)
    assert place_of(memory.ctypes.data - 1, 2) is None
    assert place_of(memory.ctypes.data + SIZE - 1, 2) is None
    assert place_of(memory.ctypes.data, 0) is None
    os.close(fd)


def test_a_mapping_that_the_system_lists_in_parts_is_one(tmp_path: Path) -> None:
    """Pages with other rights are listed apart."""
    fd, memory, place = shared(tmp_path)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(memory.ctypes.data + mmap.PAGESIZE), mmap.PAGESIZE, mmap.PROT_READ) == 0
    assert place_of(memory.ctypes.data, SIZE) == place
    assert place_of(memory.ctypes.data + mmap.PAGESIZE - 1, 2) is not None
    os.close(fd)


def replaced(folder: Path) -> None:
    (folder / "weights").unlink()
    (folder / "weights").write_bytes(bytes(SIZE))


def made_a_pipe(folder: Path) -> None:
    (folder / "weights").unlink()
    os.mkfifo(folder / "weights")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda folder: (folder / "weights").unlink(), "No such file"),
        (replaced, "is another file than the one that was shared"),
        (made_a_pipe, "is another file than the one that was shared"),
        (lambda folder: os.truncate(folder / "weights", SIZE - 1), f"has {SIZE - 1} bytes; shared were 0:{SIZE}"),
    ],
)
def test_a_file_that_is_not_what_was_shared_is_refused(
    change: Callable[[Path], object], match: str, tmp_path: Path
) -> None:
    fd, _, place = shared(tmp_path)
    place = msgspec.structs.replace(place, path=str(tmp_path / "weights"))
    change(tmp_path)
    before = Path("/proc/self/maps").read_text().count(str(tmp_path)), len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=match):
        map_places([place], [SIZE])
    assert before == (Path("/proc/self/maps").read_text().count(str(tmp_path)), len(os.listdir("/proc/self/fd")))
    os.close(fd)


def test_nothing_stays_mapped_or_open_when_nobody_looks_any_more(tmp_path: Path) -> None:
    fd, _, place = shared(tmp_path)

    def held() -> tuple[int, int]:
        return Path("/proc/self/maps").read_text().count(str(tmp_path)), len(os.listdir("/proc/self/fd"))

    before = held()
    parts = map_places([place, place], [SIZE, 100])
    assert held() == (before[0] + 1, before[1] + 0)
    parts.pop(0)
    assert held() == (before[0] + 1, before[1])
    parts.clear()
    assert held() == before
    os.close(fd)
