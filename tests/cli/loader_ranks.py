"""One rank of the loader checks; run by `test_loaders.py` in real processes, prints `good` when every check held.

python loader_ranks.py CASE RANK SIZE FOLDER
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.distributed import DistributedConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

from adapters.cli.bit_compare import compare_bits
from adapters.rollouts import transformers_tp
from adapters.trainers import fsdp


def config(experts: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=101,  # does not divide by four
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=experts,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )


def write(folder: Path, experts: int, rank: int) -> dict[str, torch.Tensor]:
    """A random checkpoint, and pairs of the same names with other values, as a loader would be fed them."""
    if rank == 0:
        torch.manual_seed(1)
        Qwen3MoeForCausalLM(config(experts)).to(torch.bfloat16).save_pretrained(folder, max_shard_size="50KB")
    distributed.barrier()
    stored = {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(tensor.shape, generator=generator).bfloat16() for name, tensor in stored.items()}


def sharded(folder: Path, size: int) -> Qwen3MoeForCausalLM:
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def check_saved(model: Qwen3MoeForCausalLM, folder: Path, rank: int, pairs: dict[str, torch.Tensor]) -> None:
    """Gather with torch, save with transformers: the file must hold the very pairs."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        with torch.device("meta"):
            names = Qwen3MoeForCausalLM(model.config)
        names.save_pretrained(folder / "saved", state_dict=whole)
        assert compare_bits(load_file(folder / "saved" / "model.safetensors"), pairs) == ()
    distributed.barrier()


def fsdp_case(folder: Path, rank: int, size: int) -> None:
    """Nine experts over four ranks are 3, 3, 3, 0: uneven and empty shards."""
    pairs = write(folder, 9, rank)
    model = sharded(folder, size)
    load_weights = fsdp.fsdp_load_weights(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in fsdp.local_tensors(model).items()}
    assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == ((3 if rank < 3 else 0), 32, 32)
    assert shapes["lm_head.weight"] == ((26 if rank < 3 else 23), 32)

    addresses = {name: tensor.data_ptr() for name, tensor in fsdp.local_tensors(model).items()}
    for _ in range(2):  # a loader must work again and again, and leave what it is fed alone
        fed = {name: tensor.clone() for name, tensor in pairs.items()}
        load_weights(iter(fed.items()))
        assert compare_bits(fed, pairs) == ()
    assert addresses == {name: tensor.data_ptr() for name, tensor in fsdp.local_tensors(model).items()}
    check_saved(model, folder, rank, pairs)

    # The tensors are the ones the model computes with: also after a forward pass left the root gathered.
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
        plain = Qwen3MoeForCausalLM.from_pretrained(
            None, config=config(9), state_dict=dict(pairs), dtype=torch.bfloat16
        )
        assert torch.equal(logits, plain(input_ids=tokens).logits)
    assert addresses == {name: tensor.data_ptr() for name, tensor in fsdp.local_tensors(model).items()}

    # Names that do not come keep their values.
    load_weights([("model.norm.weight", torch.zeros(32, dtype=torch.bfloat16))])
    check_saved(model, folder, rank, {**pairs, "model.norm.weight": torch.zeros(32, dtype=torch.bfloat16)})


def masters_case(folder: Path, rank: int, size: int) -> None:
    """Float32 masters of a bfloat16 checkpoint take its values exactly."""
    pairs = write(folder, 6, rank)
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    fsdp.fsdp_load_weights(model)(pairs.items())
    check_saved(model, folder, rank, {name: tensor.float() for name, tensor in pairs.items()})


def transformers_case(folder: Path, rank: int, size: int) -> None:
    """Loading the pairs again equals loading a folder that holds them; TP, and TP with transformers' own FSDP."""
    pairs = write(folder, 6, rank)
    (folder / "new").mkdir(exist_ok=True)
    if rank == 0:
        save_file(pairs, folder / "new" / "model.safetensors", metadata={"format": "pt"})
        config(6).save_pretrained(folder / "new")
    distributed.barrier()
    layouts = [DistributedConfig(tp_size=2)] if size == 2 else [DistributedConfig(tp_size=2, fsdp_size=2)]
    for layout in layouts:
        model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, distributed_config=layout)
        load_weights = transformers_tp.tp_load_weights(model)
        load_weights(iter(pairs.items()))
        groups = len(distributed.distributed_c10d._world.pg_map)
        load_weights(iter(pairs.items()))
        assert len(distributed.distributed_c10d._world.pg_map) == groups, "a load leaves process groups behind"
        wanted = Qwen3MoeForCausalLM.from_pretrained(folder / "new", dtype=torch.bfloat16, distributed_config=layout)
        live = transformers_tp.local_tensors(model)
        assert compare_bits(live, transformers_tp.local_tensors(wanted)) == ()
        assert live["model.layers.0.mlp.experts.down_proj"].shape[2] == 8
        assert live["model.layers.0.mlp.experts.down_proj"].shape[0] == (6 if size == 2 else 3)


def main() -> None:
    case, rank, size, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    store = distributed.FileStore(str(folder / "store"), size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=100))
    {"fsdp": fsdp_case, "masters": masters_case, "transformers": transformers_case}[case](folder, rank, size)
    print("good")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
