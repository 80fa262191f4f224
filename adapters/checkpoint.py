"""A folder of safetensors as a checkpoint space: names, shapes and dtypes from the headers, values on request.

The folder may hold one file or many, with or without Hugging Face's ``model.safetensors.index.json``. Only headers
are read to make the space, without torch; a tensor's bytes are read when it is asked for by name.

>>> checkpoint = Checkpoint.open("Qwen3-MoE")                                      # doctest: +SKIP
>>> checkpoint.space, checkpoint.read("model.norm.weight").shape                   # doctest: +SKIP
(CheckpointSpace(18,867 tensors, 30,532,122,624 elements), torch.Size([2048]))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
from safetensors import SafetensorError, safe_open

from adapters.failures import CheckpointError, UsageError
from layout_algebra.errors import LayoutError
from layout_algebra.space import CheckpointSpace, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint"]

_INDEX = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A checkpoint space, and where its tensors can be read.

    Attributes
    ----------
    space
        All tensors of all files.
    files
        Tensor name -> the file that has it; empty for a space that came without a folder.
    """

    space: CheckpointSpace
    files: Mapping[str, Path]

    @staticmethod
    def of(source: str | Path | CheckpointSpace) -> Checkpoint:
        """Take what users pass: a folder, or a space whose values are not on disk."""
        if isinstance(source, CheckpointSpace):
            return Checkpoint(source, MappingProxyType({}))
        if not isinstance(source, (str, Path)):
            raise UsageError(
                f"checkpoint is a {type(source).__name__}; expected a folder of safetensors, or a CheckpointSpace"
            )
        return Checkpoint.open(source)

    @staticmethod
    def open(folder: str | Path) -> Checkpoint:
        """Read the headers of a folder's safetensors files.

        Raises
        ------
        CheckpointError
            If there is no file, a file is damaged, a tensor stands in two files or is missing from the file that the
            index names, or a dtype is unknown; the message names the file.
        """
        root = Path(folder)
        indexed = _read_index(root)
        paths = sorted({root / name for name in indexed.values()}) if indexed else sorted(root.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(
                f"{root}: no *.safetensors file here; expected a folder as save_pretrained writes it"
                + ("" if root.is_dir() else " (the folder does not exist)")
            )
        specs: dict[str, TensorSpec] = {}
        files: dict[str, Path] = {}
        for path in paths:
            for spec in _read_header(path):
                if indexed and indexed.get(spec.name) != path.name:
                    continue
                if spec.name in files:
                    raise CheckpointError(f"{spec.name}: in {files[spec.name]} and in {path}; a checkpoint has it once")
                specs[spec.name], files[spec.name] = spec, path
        missing = [name for name in indexed if name not in files]
        if missing:
            raise CheckpointError(
                f"{root / indexed[missing[0]]}: has no tensor {missing[0]}, which {_INDEX} says it has"
            )
        try:
            return Checkpoint(CheckpointSpace(specs.values()), MappingProxyType(files))
        except LayoutError as error:
            raise CheckpointError(f"{root}: {error}") from error

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor's values into host memory.

        Raises
        ------
        CheckpointError
            If the checkpoint has no such tensor, or was given as a space without files.
        """
        path = self.files.get(name)
        if path is None:
            where = "a folder" if self.files else "a space without files; pass the folder to read values"
            raise CheckpointError(f"{name}: not to be read from this checkpoint, which is {where}")
        try:
            with safe_open(path, framework="pt", device="cpu") as opened:
                tensor: torch.Tensor = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error
        return tensor


def _read_index(root: Path) -> dict[str, str]:
    path = root / _INDEX
    if not path.is_file():
        return {}
    try:
        files = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: no index of a checkpoint: {error}") from error
    for name, file in files.items():
        if Path(file).name != file:
            raise CheckpointError(f"{path}: {name} is said to be in {file!r}; expected a file of the same folder")
    return files


def _read_header(path: Path) -> list[TensorSpec]:
    try:
        with safe_open(path, framework="np") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            return [TensorSpec(name, tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()]
    except (OSError, SafetensorError, LayoutError) as error:
        raise CheckpointError(f"{path}: {error}") from error
