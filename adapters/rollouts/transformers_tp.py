"""Rollouts that run a Hugging Face model tensor-parallel: its own loader, called again into the live tensors.

transformers shards a model while it loads it, from the plan in its config (`DistributedConfig(tp_size=...)`). The
loader below asks transformers to load the pairs once more in just that way, and copies each local tensor into the live
one, bit for bit. No layout rule is ours: experts come out fused and cut because transformers fuses and cuts them.

    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    ReceiverAdapter(tp_load_weights(model), lambda: local_tensors(model), folder, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from adapters.probing import live_tensors

__all__ = ["local_tensors", "tp_load_weights"]

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], None]


def local_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The storage this rank owns: every parameter and buffer, aliases included, a `DTensor` by its local part.

    Returns
    -------
    name -> tensor that shares memory with the model.
    """
    return {name: _local(tensor) for name, tensor in live_tensors(model).items()}


def tp_load_weights(model: PreTrainedModel) -> LoadWeights:
    """A `load_weights` for a model that transformers sharded at load: pairs in checkpoint names and shapes.

    Parameters
    ----------
    model
        Came from `from_pretrained(..., distributed_config=...)`, which may be tensor, expert or FSDP parallel.

    Returns
    -------
    A function of (name, tensor) pairs that writes this rank's part into the live tensors. It is collective: every rank
    of the model's mesh must call it the same number of times. Parameters for which no pair came keep their values.

    Raises
    ------
    ValueError
        When the model was not distributed by transformers.
    """
    layout = getattr(model.config, "distributed_config", None)
    if layout is None:
        raise ValueError(
            f"{type(model).__name__}: expected a model from from_pretrained(..., distributed_config=...), got one "
            "without a distributed_config in its config; load it so, or give your own load_weights"
        )

    @torch.no_grad()
    def load_weights(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        fresh, loading = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=dict(pairs),
            dtype=model.dtype,
            distributed_config=layout,
            output_loading_info=True,
        )
        try:
            live = local_tensors(model)
            for name, tensor in fresh.state_dict().items():
                if name not in loading["missing_keys"]:
                    live[name].copy_(_local(tensor))
        finally:
            _destroy_groups(fresh)

    return load_weights


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.detach()
    return local.to_local() if isinstance(local, DTensor) else local


def _destroy_groups(model: PreTrainedModel) -> None:
    # Each from_pretrained makes a mesh of its own, with a process group per axis; gloo keeps threads and sockets for
    # every one of them until it is destroyed.
    manager = model._mesh_manager
    meshes = (
        manager.get_mesh(("pp", "dp_replicate", "fsdp", "tp")),
        manager.get_mesh(("pp", "dp_replicate", "efsdp", "ep")),
    )
    groups = {group for mesh in meshes for group in mesh.get_all_groups()} - {distributed.group.WORLD}
    for group in groups:
        distributed.destroy_process_group(group)
