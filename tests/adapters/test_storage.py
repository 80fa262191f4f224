"""Fingerprints of where tensors live: everything but values is compared."""

from __future__ import annotations

import pytest
import torch

from adapters.failures import StaleError
from adapters.storage import Storage, live_memory


def changed(make: object) -> tuple[Storage, Storage]:
    block = torch.zeros(4, 6)
    before = Storage.of({"w": block, "other": torch.zeros(1)}).only(["w"], "engine/a/0")
    return before, Storage.of({"w": make(block)})  # type: ignore[operator]


def test_values_may_change() -> None:
    before, now = changed(lambda block: block.add_(1))
    before.check(now, "engine/a/0")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda block: block.clone(), "address was 0x"),
        (lambda block: block[1:], "shape was (4, 6), is (3, 6)"),
        (lambda block: block.t(), "strides was (6, 1), is (1, 6)"),
        (lambda block: block.view(torch.int32), "dtype was torch.float32, is torch.int32"),
    ],
    ids=["address", "shape", "strides", "dtype"],
)
def test_whatever_else_changes_is_named(make: object, words: str) -> None:
    before, now = changed(make)
    with pytest.raises(StaleError) as raised:
        before.check(now, "engine/a/0")
    for expected in ("w on engine/a/0", "replaced since connect", words, "nothing was written, call connect again"):
        assert expected in str(raised.value)


def test_a_tensor_that_is_gone() -> None:
    before = Storage.of({"w": torch.zeros(1)})
    with pytest.raises(StaleError, match=r"w on trainer/3: .*it is gone"):
        before.check(Storage.of({}), "trainer/3")


def test_memory_is_listed_under_every_name_and_shares_storage() -> None:
    layer = torch.nn.Linear(2, 2)
    tensors = {"weight": layer.weight, "tied": layer.weight, "bias": layer.bias}
    memory = live_memory(lambda: tensors)
    assert set(memory) == set(tensors)
    assert memory["tied"].data_ptr() == memory["weight"].data_ptr() == layer.weight.data_ptr()
    assert not memory["weight"].requires_grad
