"""FSDP2 trainers: a checkpoint loader and the live local tensors of a Hugging Face model under `fully_shard`.

`fully_shard` turns each parameter into a `DTensor`; a rank holds its local part, which may be uneven or empty. The
loader lets transformers read the pairs into a plain model of the same class, on the host (so renames, merged experts
and conversions are transformers' own), and cuts every tensor as the live parameter is cut with torch's
`distribute_tensor`, without communication. Then it copies into the live storage, so it can be called again and again.

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    SenderAdapter(fsdp_load_weights(model), lambda: local_tensors(model), folder, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from adapters.probing import live_tensors

__all__ = ["fsdp_load_weights", "local_tensors"]

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], None]


def local_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The storage this rank owns: every parameter and buffer, aliases included, a `DTensor` by its local part.

    Returns
    -------
    name -> tensor that shares memory with the model; a rank without elements of a parameter gets an empty tensor.
    Parameters that a forward pass left gathered are sharded again first, so the tensors are the ones an optimizer
    steps on.
    """
    return {name: _local(tensor) for name, tensor in _sharded_tensors(model).items()}


def fsdp_load_weights(model: PreTrainedModel) -> LoadWeights:
    """A `load_weights` for a Hugging Face model under `fully_shard`: pairs in checkpoint names and shapes.

    Parameters
    ----------
    model
        A transformers model to which `torch.distributed.fsdp.fully_shard` was applied, on any mesh.

    Returns
    -------
    A function of (name, tensor) pairs that writes this rank's part of them into the live parameters. It calls no
    collective. Parameters for which no pair came keep their values.

    Notes
    -----
    Each call holds one whole copy of the model in host memory for its duration. Models that transformers itself
    sharded (`DistributedConfig(fsdp_size=...)`) read only their part: use
    `adapters.rollouts.transformers_tp.tp_load_weights` for those.
    """
    model_class: type[PreTrainedModel] = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))

    @torch.no_grad()
    def load_weights(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        whole, loading = model_class.from_pretrained(
            None, config=model.config, state_dict=dict(pairs), dtype=model.dtype, output_loading_info=True
        )
        live = _sharded_tensors(model)
        for name, tensor in whole.state_dict().items():
            if name in loading["missing_keys"]:
                continue
            target = live[name]
            if isinstance(target, DTensor):
                tensor = distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None)
            _local(target).copy_(_local(tensor))

    return load_weights


def _sharded_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return live_tensors(model)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    # detach() shares the storage: the local part of a parameter is not a leaf that anyone should train.
    local: torch.Tensor = tensor.detach()
    return local.to_local() if isinstance(local, DTensor) else local
