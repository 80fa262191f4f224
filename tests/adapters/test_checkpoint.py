"""A folder of safetensors as a checkpoint: spaces from headers, values by name, errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from adapters.checkpoint import Checkpoint
from adapters.failures import CheckpointError
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.adapters.toy import SPACE, weights, write_checkpoint


def test_an_indexed_folder(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "ckpt"))
    assert checkpoint.space == SPACE
    assert torch.equal(checkpoint.read("layer.0.w"), weights(0)["layer.0.w"])


def test_files_without_an_index_and_every_dtype(tmp_path: Path) -> None:
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64, "U8": torch.uint8, "BOOL": torch.bool}
    dtypes |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F16": torch.float16}
    save_file({name: torch.zeros(2, 3).to(dtype) for name, dtype in dtypes.items()}, tmp_path / "one.safetensors")
    save_file({"scalar": torch.tensor(4.0), "none": torch.zeros(0, 4)}, tmp_path / "two.safetensors")
    space = Checkpoint.open(tmp_path).space
    assert {spec.name: spec.dtype for spec in space.specs if spec.shape == (2, 3)} == {name: name for name in dtypes}
    assert space.spec("scalar").shape == ()
    assert space.spec("none").elements == 0


def test_spaces_and_folders_are_both_taken(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "ckpt")
    assert Checkpoint.of(str(folder)).space == Checkpoint.of(folder).space == Checkpoint.of(SPACE).space
    with pytest.raises(CheckpointError, match=r"embed: not to be read.*without files"):
        Checkpoint.of(SPACE).read("embed")
    with pytest.raises(CheckpointError, match=r"other: not to be read"):
        Checkpoint.of(folder).read("other")


def test_tensors_that_the_index_does_not_name_are_left_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "ckpt")
    save_file({"embed": torch.zeros(1), "more": torch.zeros(1)}, folder / "stray.safetensors")
    assert Checkpoint.open(folder).space == SPACE


def test_no_folder_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file here.*does not exist"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file here"):
        Checkpoint.open(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "ckpt")
    data = (folder / "model-2.safetensors").read_bytes()
    for damaged in (b"", b"\xff" * 64, data[:40], data[:-1]):
        (folder / "model-2.safetensors").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model-2.safetensors"):
            Checkpoint.open(folder)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "ckpt")
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1.safetensors"):
        Checkpoint.open(folder)


def test_an_index_that_is_wrong(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "ckpt")
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**names, "ghost": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model-1.safetensors: has no tensor ghost"):
        Checkpoint.open(folder)
    index.write_text(json.dumps({"weight_map": {"embed": "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"expected a file of the same folder"):
        Checkpoint.open(folder)
    index.write_text("{")
    with pytest.raises(CheckpointError, match=r"index.json"):
        Checkpoint.open(folder)


def test_one_name_in_two_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"w": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"w: in .*a.safetensors and in .*b.safetensors"):
        Checkpoint.open(tmp_path)


def test_a_space_stays_as_it_is() -> None:
    space = CheckpointSpace([TensorSpec("w", (2,), "F32")])
    assert Checkpoint.of(space).space is space
