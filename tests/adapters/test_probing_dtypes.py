"""Checkpoints and parameters of every dtype: integers, 8-bit floats, views, conversions, and what holds no codes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from adapters.probe_readings import Reading, readings_of, shown
from adapters.probe_settle import leave_to_loader
from adapters.probe_verify import VERIFY_PERIOD, Range, verification_pair
from adapters.probing import probe
from adapters.torch_bits import bits_view, dtype_name, tensor_of_bits, torch_dtype
from layout_algebra.correspondence import correspond
from layout_algebra.dtypes import dtype_of
from layout_algebra.errors import CorrespondenceError, SpaceError
from layout_algebra.residues import choose_codebook
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.fakes import Live, Worker, keeps_bits, noisy, space_of
from transfer_exec.in_process import run_in_process
from transfer_exec.planner import make_plan
from transfer_exec.topology import Topology

Weights = dict[str, torch.Tensor]

FLOATS = ("F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64")
INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in reverse order, for every dtype."""
    bits = bits_view(tensor).reshape(-1)[::-1].copy()
    return tensor_of_bits(bits, dtype_name(tensor.dtype), tuple(tensor.shape))


def reversed_copy(live: Live, weights: Weights) -> None:
    """Every parameter gets the tensor of its name, last element first."""
    for name, tensor in live.items():
        tensor.copy_(turned(weights[name]))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("beside", ["", "F32", "I64", "F8_E4M3", "U8", "BOOL"])
def test_a_checkpoint_of_any_dtype_beside_any_other(dtype: str, beside: str) -> None:
    specs = [TensorSpec("w", (40,), dtype), TensorSpec("one", (1,), dtype), TensorSpec("last", (3, 50), dtype)]
    space = CheckpointSpace([*specs, *([TensorSpec("other", (30,), beside)] if beside else [])])
    live = {spec.name: noisy(spec.shape, torch_dtype(spec.dtype)) for spec in space.specs}
    found = Worker(live, reversed_copy).probe(space)
    for name, spec in zip(space.names, space.specs, strict=True):
        first, stop = space.id_range(name)
        if spec.dtype == "BOOL":
            assert (found.ids(name) == -1).all()
            assert found.depends_on(name) == (name,)
        else:
            assert found.ids(name).reshape(-1).tolist() == list(range(stop - 1, first - 1, -1)), name
            assert found.dtype(name) == spec.dtype


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [("F8_E4M3", torch.uint8), ("F8_E4M3", torch.int8), ("F8_E5M2", torch.uint8), ("U8", torch.float8_e4m3fn),
     ("U8", torch.float8_e8m0fnu), ("U8", torch.int8), ("BF16", torch.int16), ("BF16", torch.uint16),
     ("I16", torch.bfloat16), ("F16", torch.int16), ("F32", torch.int32), ("I32", torch.float32), ("I32", torch.uint32),
     ("F64", torch.int64), ("I64", torch.float64)],
)  # fmt: skip
@pytest.mark.parametrize("beside", [(), ("I32", "F32"), ("U8", "F8_E4M3")])
def test_a_view_of_another_dtype_is_a_copy_of_bits(dtype: str, kept: torch.dtype, beside: tuple[str, ...]) -> None:
    space = space_of(w=(dtype, 20), **{f"x{number}": (other, 7) for number, other in enumerate(beside)})
    live = {"w": noisy(20, kept), "part": noisy(20, kept)}
    live |= {f"x{number}": noisy(7, torch_dtype(other)) for number, other in enumerate(beside)}

    def body(live: Live, weights: Weights) -> None:
        viewed = turned(weights["w"]).view(kept)
        live["w"].copy_(viewed)
        live["part"][5:] = viewed[5:]
        for number in range(len(beside)):
            live[f"x{number}"].copy_(weights[f"x{number}"])

    found = Worker(live, body).probe(space)
    assert found.ids("w").tolist() == list(range(20, 0, -1))
    assert found.ids("part").tolist() == [0] * 5 + list(range(15, 0, -1))
    assert found.dtype("w") == found.dtype("part") == dtype, "the bits are to be read as the checkpoint's"
    for number in range(len(beside)):
        first, stop = space.id_range(f"x{number}")
        assert found.ids(f"x{number}").tolist() == list(range(first, stop))


CONVERSIONS = [
    ("F8_E4M3", torch.bfloat16), ("F8_E4M3", torch.float32), ("F8_E5M2", torch.float16), ("I32", torch.int64),
    ("I64", torch.int32), ("I32", torch.float32), ("I16", torch.bfloat16), ("U8", torch.float32), ("U8", torch.int32),
    ("I8", torch.float16), ("F64", torch.float32), ("F32", torch.float64), ("F32", torch.bfloat16), ("U8", torch.int64),
    ("I64", torch.float64), ("BF16", torch.float16),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "kept"), CONVERSIONS)
@pytest.mark.parametrize("beside", [(), ("I32",), ("F8_E4M3", "I64")])
def test_a_conversion_is_a_copy_of_values(dtype: str, kept: torch.dtype, beside: tuple[str, ...]) -> None:
    space = space_of(w=(dtype, 50), **{f"x{number}": (other, 7) for number, other in enumerate(beside)})

    def body(live: Live, weights: Weights) -> None:
        live["w"].copy_(turned(weights["w"]).to(kept))

    found = Worker({"w": noisy(50, kept)}, body).probe(space)
    assert found.ids("w").tolist() == list(range(50, 0, -1))
    assert found.dtype("w") == dtype_name(kept)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [("F32", torch.int32), ("BF16", torch.int64), ("F32", torch.float8_e4m3fn), ("I32", torch.int8),
     ("I32", torch.uint8), ("I32", torch.float8_e5m2)],
)  # fmt: skip
def test_what_no_dtype_of_the_checkpoint_feeds_exactly_is_opaque(dtype: str, kept: torch.dtype) -> None:
    space = space_of(w=(dtype, 50), x=(dtype, 50))

    def body(live: Live, weights: Weights) -> None:
        live["w"].copy_(weights["w"].to(kept))
        live["x"].copy_(weights["x"])

    found = Worker({"w": noisy(50, kept), "x": noisy(50, torch_dtype(dtype))}, body).probe(space)
    assert (found.ids("w") == -1).all()
    assert found.depends_on("w") == ("w",)
    assert (found.ids("x") > 0).all()


def test_bits_and_values_of_several_dtypes_side_by_side() -> None:
    """What cannot be told by one dtype of the parameter is opaque; what can is a copy."""
    space = space_of(i=("I32", 40), f=("F32", 40), b=("BF16", 40))
    live = {name: noisy(80, torch.int32) for name in ("both", "view")} | {"floats": noisy(120)}

    def body(live: Live, weights: Weights) -> None:
        live["both"].copy_(torch.cat([weights["i"], weights["f"].view(torch.int32)]))
        live["view"].copy_(weights["f"].view(torch.int32).repeat(2))
        live["floats"].copy_(torch.cat([weights["i"].float(), weights["f"], weights["b"].float()]))

    found = Worker(live, body).probe(space)
    i, f, b = (list(range(*space.id_range(name))) for name in "ifb")
    assert found.ids("both").tolist() == i + [-1] * 40
    assert (found.dtype("both"), found.depends_on("both")) == ("I32", ("f",))
    assert found.ids("view").tolist() == f + f
    assert found.dtype("view") == "F32"
    assert found.ids("floats").tolist() == i + f + b
    assert found.dtype("floats") == "F32"


@pytest.mark.parametrize("dtype", ["BOOL", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2", "C64"])
def test_tensors_without_codes_are_opaque_by_name_and_others_copies(dtype: str) -> None:
    space = space_of(w=("BF16", 6, 8), odd=(dtype, 6, 8), unused=(dtype, 3, 4), empty=(dtype, 0, 4))
    raw = 6 * 8 * dtype_of(dtype).bits // 8
    live = {"w": noisy((6, 8), torch.bfloat16), "raw": noisy(raw, torch.uint8), "ones": noisy((6, 8)), "pad": noisy(9)}

    def body(live: Live, weights: Weights) -> None:
        live["w"].copy_(weights["w"])
        live["raw"].copy_(weights["odd"].reshape(-1).view(torch.uint8))
        if dtype in ("BOOL", "F8_E8M0"):
            live["ones"].copy_(weights["odd"].float())
        live["pad"].fill_(1.0)

    found = Worker(live, body).probe(space)
    assert found.ids("w").reshape(-1).tolist() == list(range(*space.id_range("w")))
    assert (found.ids("raw") != 0).any()
    assert (found.ids("raw") <= 0).all()
    assert found.depends_on("raw") == ("odd",)
    assert (found.ids("pad") == 0).all()
    if dtype in ("BOOL", "F8_E8M0"):
        assert (found.ids("ones") == -1).all()
        assert found.depends_on("ones") == ("odd",)


def test_a_mask_that_selects_makes_nothing_a_copy() -> None:
    space = space_of(a=("F32", 64), b=("F32", 64), mask=("BOOL", 64))

    def body(live: Live, weights: Weights) -> None:
        live["p"].copy_(torch.where(weights["mask"], weights["a"], weights["b"]))
        live["a"].copy_(weights["a"])

    found = Worker({"p": noisy(64), "a": noisy(64)}, body).probe(space)
    assert (found.ids("p") == -1).all()
    assert set(found.depends_on("p")) >= {"a", "b", "mask"}
    assert (found.ids("a") > 0).all()


def test_the_smallest_floats_name_more_elements_than_they_have_numbers() -> None:
    """E4M3 holds 0..16 exactly: thousands of elements need several digits, also through a view."""
    space = space_of(w=("BF16", 300), x=("F16", 5000), y=("F8_E4M3", 20), z=("F8_E4M3", 9, 1000))
    kinds = {"w": torch.bfloat16, "x": torch.float16, "y": torch.uint8, "z": torch.float8_e4m3fn}
    live = {name: noisy(space.spec(name).shape, kind) for name, kind in kinds.items()}

    def body(live: Live, weights: Weights) -> None:
        live["w"].copy_(weights["w"].flip(0))
        live["x"].copy_(weights["x"].flip(0))
        live["y"].copy_(weights["y"].view(torch.uint8).flip(0))
        live["z"].view(torch.uint8).copy_(weights["z"].view(torch.uint8).flip(1))

    found = Worker(live, body).probe(space)
    for name in "wxy":
        first, stop = space.id_range(name)
        assert found.ids(name).tolist() == list(range(stop - 1, first - 1, -1))
    first, stop = space.id_range("z")
    assert (found.ids("z") == np.arange(first, stop).reshape(9, 1000)[:, ::-1]).all()


def test_too_few_common_numbers_for_a_checkpoint_are_refused_by_name() -> None:
    space = CheckpointSpace([TensorSpec("w", (1 << 32,), "F8_E5M2"), TensorSpec("map", (4,), "I8")])
    worker = Worker({"map": noisy(4, torch.int8)}, lambda live, weights: None)
    with keeps_bits(worker.live), pytest.raises(SpaceError, match="F8_E5M2 and I8 codes cannot number"):
        probe(worker.load_weights, worker.live, space)
    assert worker.loads == 0


def test_a_byte_expert_map_steers_the_loader_and_stays() -> None:
    """Physical slots from a U8 table beside U8 weights: the table is empty, the weights follow it."""
    space = space_of(**{f"experts__{number}": ("U8", 4, 9) for number in range(6)}, scale=("F32", 6))
    where = torch.tensor([3, 255, 0, 2, 255, 1], dtype=torch.uint8)

    def body(live: Live, weights: Weights) -> None:
        for expert, slot in enumerate(live["where"].tolist()):
            if slot != 255:
                live["slots"][slot].copy_(weights[f"experts.{expert}"])
                live["scales"][slot].copy_(weights["scale"][expert])

    live = {"slots": noisy((4, 4, 9), torch.uint8), "where": where, "scales": noisy(4)}
    found = Worker(live, body).probe(space)
    assert (found.ids("where") == 0).all()
    experts = [space.id_range(f"experts.{expert}") for expert in (2, 5, 3, 0)]
    assert found.ids("slots").reshape(4, -1).tolist() == [list(range(*expert)) for expert in experts]
    assert found.ids("scales").tolist() == [space.element_id("scale", expert) for expert in (2, 5, 3, 0)]


def test_quantized_models_whose_loaders_copy_are_copies() -> None:
    """FP8 with block scales, INT4 packed in I32 with zero points, nibbles in U8 with E4M3 scales."""
    weight, block_scale = ("F8_E4M3", 32, 16), ("F32", 4, 2)
    blocks = space_of(gate=weight, up=weight, gate_scale=block_scale, up_scale=block_scale, norm=("BF16", 16))

    def load_blocks(live: Live, weights: Weights) -> None:
        live["w"].copy_(torch.cat([weights["gate"], weights["up"]]))
        live["s"].copy_(torch.cat([weights["gate_scale"], weights["up_scale"]]))
        live["norm"].copy_(weights["norm"])

    live = {"w": noisy((64, 16), torch.float8_e4m3fn), "s": noisy((8, 2)), "norm": noisy(16, torch.bfloat16)}
    found = Worker(live, load_blocks).probe(blocks)
    gate, up, gate_scale, up_scale, norm = (list(range(*blocks.id_range(n))) for n in
                                            ("gate", "up", "gate_scale", "up_scale", "norm"))  # fmt: skip
    assert found.ids("w").reshape(-1).tolist() == gate + up
    assert found.ids("s").reshape(-1).tolist() == gate_scale + up_scale
    assert found.ids("norm").tolist() == norm

    packed = space_of(qweight=("I32", 8, 24), qzeros=("I32", 2, 24), scales=("F16", 2, 24), g_idx=("I32", 64))

    def load_packed(live: Live, weights: Weights) -> None:
        for name in ("qweight", "qzeros", "scales"):
            live[name].copy_(weights[name][:, 6:18])
        live["g_idx"].copy_(weights["g_idx"])

    live = {"qweight": noisy((8, 12), torch.int32), "qzeros": noisy((2, 12), torch.int32),
            "scales": noisy((2, 12), torch.float16), "g_idx": noisy(64, torch.int32)}  # fmt: skip
    found = Worker(live, load_packed).probe(packed)
    for name in ("qweight", "qzeros", "scales"):
        first, stop = packed.id_range(name)
        assert (found.ids(name) == np.arange(first, stop).reshape(-1, 24)[:, 6:18]).all()
    assert found.coverage().opaque_elements == 0

    nibbles = space_of(w=("U8", 16, 8), scale=("F8_E4M3", 16, 2), scale_2=("F32",), bias=("BF16", 16))

    def load_nibbles(live: Live, weights: Weights) -> None:
        for name, tensor in live.items():
            tensor.copy_(weights[name])

    live = {"w": noisy((16, 8), torch.uint8), "scale": noisy((16, 2), torch.float8_e4m3fn), "scale_2": noisy(()),
            "bias": noisy(16, torch.bfloat16)}  # fmt: skip
    found = Worker(live, load_nibbles).probe(nibbles)
    for name in live:
        assert found.ids(name).reshape(-1).tolist() == list(range(*nibbles.id_range(name)))


def test_quantized_models_whose_loaders_compute_are_opaque() -> None:
    space = space_of(w=("F8_E4M3", 16, 16), s=("F32", 2, 2), q=("I32", 8, 8), n=("U8", 8, 8), z=("I32", 40))

    def body(live: Live, weights: Weights) -> None:
        scale = weights["s"].repeat_interleave(8, 0).repeat_interleave(8, 1)
        live["dequantized"].copy_(weights["w"].float() * scale)
        live["nibbles"].copy_(torch.stack([weights["n"] & 15, weights["n"] >> 4], -1).reshape(8, 16))
        words = weights["q"]
        live["unpacked"].copy_(
            torch.stack([(words >> 8 * k) & 255 for k in range(4)], -1).reshape(8, 32).to(torch.uint8)
        )
        live["swapped"].copy_((words << 16) | ((words >> 16) & 0xFFFF))
        live["exponents"].copy_((weights["s"].contiguous().view(torch.int32) >> 23).to(torch.uint8))
        live["rounded"].copy_((weights["w"].float() * 2).to(torch.float8_e4m3fn))
        live["z"].copy_(weights["z"])

    live = {
        "dequantized": noisy((16, 16), torch.bfloat16),
        "nibbles": noisy((8, 16), torch.uint8),
        "unpacked": noisy((8, 32), torch.uint8),
        "swapped": noisy((8, 8), torch.int32),
        "exponents": noisy((2, 2), torch.uint8),
        "rounded": noisy((16, 16), torch.float8_e4m3fn),
        "z": noisy(40, torch.int32),
    }
    found = Worker(live, body).probe(space)
    for name in live:
        if name != "z":
            assert (found.ids(name) <= 0).all(), name
            assert (found.ids(name) == -1).any(), name
    assert found.depends_on("dequantized") == ("s", "w")
    assert found.depends_on("swapped") == ("q",)
    assert found.ids("z").tolist() == list(range(*space.id_range("z")))


def test_a_wide_bias_is_not_carried_through_the_narrow_dtype() -> None:
    """A loader that stages an F32 tensor in BF16 is no copy; one that does not is, bit for bit."""
    space = space_of(bias=("F32", 60), w=("BF16", 40))

    def through(live: Live, weights: Weights) -> None:
        live["bias"].copy_(weights["bias"].to(torch.bfloat16))
        live["w"].copy_(weights["w"])

    def straight(live: Live, weights: Weights) -> None:
        live["bias"].copy_(weights["bias"])
        live["w"].copy_(weights["w"])

    live = {"bias": noisy(60), "w": noisy(40, torch.bfloat16)}
    assert (Worker(live, through).probe(space).ids("bias") == -1).all()
    assert Worker(live, straight).probe(space).ids("bias").tolist() == list(range(1, 61))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I8", "U8", "I16", "I32", "U32", "I64"])
@pytest.mark.parametrize("compute", ["abs", "clamp", "negate", "max", "add one", "narrow and widen", "low bits"])
def test_computed_elements_of_narrow_and_integer_dtypes_are_never_copies(dtype: str, compute: str) -> None:
    space = space_of(x=(dtype, 8, 25), y=(dtype, 8, 25))
    kept = torch_dtype(dtype)
    is_float, width = dtype.startswith("F"), dtype_of(dtype).bits
    narrow = {"F8_E4M3": torch.float8_e5m2, "F8_E5M2": torch.float8_e4m3fn}.get(dtype, torch.int8)

    def body(live: Live, weights: Weights) -> None:
        x, y = (weights[name].to(torch.float64 if is_float else torch.int64) for name in "xy")
        if compute == "abs":
            out = x.abs()
        elif compute == "clamp":
            out = x.clamp(-20, 20)
        elif compute == "negate":
            out = -x
        elif compute == "max":
            out = torch.maximum(x, y)
        elif compute == "add one":
            out = x + 1
        elif compute == "narrow and widen":
            out = x.to(narrow).to(x.dtype)
        else:
            out = (x * 2).to(x.dtype) if is_float else x & ((1 << width // 2) - 1)
        live["p"].copy_(out.to(kept))
        live["x"].copy_(weights["x"])

    found = Worker({"p": noisy((8, 25), kept), "x": noisy((8, 25), kept)}, body).probe(space)
    same = (dtype in ("U8", "U32") and compute == "abs") or (
        width == 8 and not is_float and compute.startswith("narrow")
    )
    if same:  # torch makes the same bits of every number
        assert found.ids("p").reshape(-1).tolist() == list(range(1, 201))
    else:
        assert (found.ids("p") == -1).all()
    assert found.ids("x").reshape(-1).tolist() == list(range(1, 201))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("values", list(Range))
def test_verification_feeds_finite_numbers_of_both_kinds(dtype: str, values: Range) -> None:
    pair = verification_pair([dtype], values)
    a, b = (tensor_of_bits(one.tables[dtype], dtype, (VERIFY_PERIOD,)) for one in pair)
    signed = dtype in FLOATS or dtype.startswith("I")
    for one in (a, b):
        wide = one.to(torch.float64)
        assert bool(wide.isfinite().all())
        if values is not Range.SIGNED:
            assert bool((wide > 0).all())
        if dtype_of(dtype).bits == 8 and values is Range.SIGNED:
            finite = {"F8_E4M3": 254, "F8_E5M2": 248}.get(dtype, 256)
            assert len(set(bits_view(one).tolist())) == finite
    if values is Range.SIGNED:
        assert not signed or bool(((bits_view(a) ^ bits_view(b)) >> (dtype_of(dtype).bits - 1) == 1).all())
        if signed:
            assert 0.4 < float((a.to(torch.float64) < 0).double().mean()) < 0.6
    if dtype in ("I16", "I32", "I64", "U16", "U32", "U64") and values is not Range.NARROW:
        half = 2.0 ** (dtype_of(dtype).bits // 2)
        assert bool((a.to(torch.float64).abs() < half).all())
        assert bool((b.to(torch.float64).abs() >= half).all())


def test_every_reading_shows_what_torch_makes_of_codes() -> None:
    """By value what ``Tensor.to`` gives, by bits what ``Tensor.view`` gives, for every pair of dtypes."""
    for source, target in itertools.product([*FLOATS, *INTEGERS], repeat=2):
        codebook = choose_codebook(space_of(w=(source, 2)))
        readings = readings_of(codebook, target, [source])
        codes = tensor_of_bits(codebook.bits(source).copy(), source, (codebook.count,))
        cast = codes.to(torch_dtype(target))
        by_value = [one for one in readings if source in one.by_value]
        exact = bool((cast.to(torch.float64) == codes.to(torch.float64)).all())
        assert len(by_value) == (exact and not (source in FLOATS and target in INTEGERS))
        for one in by_value:
            assert one.code_bits.tolist() == bits_view(cast).tolist()
        by_bits = [one for one in readings if source in one.by_bits]
        same_width = dtype_of(source).bits == dtype_of(target).bits
        assert len(by_bits) == (same_width and (source == target or not (source in FLOATS and target in FLOATS)))
        for one in by_bits:
            assert one.code_bits.tolist() == bits_view(codes).tolist()
            assert _is_same(one, source, target)


def _is_same(reading: Reading, source: str, target: str) -> bool:
    every = verification_pair([source], Range.SIGNED)[0].tables[source]
    found = shown(every, source, target, reading)
    return found is not None and found.tolist() == every.tolist()


def test_what_no_transfer_converts_is_left_to_the_loader() -> None:
    """A needer's copies of bits and of wide floats stay; integers and small floats that are converted become opaque."""
    space = space_of(w=("F8_E4M3", 40), s=("F32", 40), i=("I32", 40))
    live = {"wide": noisy(40), "mixed": noisy(80), "table": noisy(40, torch.int64), "view": noisy(40, torch.uint8)}
    live |= {"half": noisy(40, torch.bfloat16), "padded": noisy(90, torch.int64)}

    def body(live: Live, weights: Weights) -> None:
        live["wide"].copy_(weights["w"].float())
        live["mixed"].copy_(torch.cat([weights["s"], weights["i"].float()]))
        live["table"].copy_(weights["i"])
        live["view"].copy_(weights["w"].view(torch.uint8))
        live["half"].copy_(weights["s"])
        live["padded"][:40] = weights["i"]
        live["padded"][50:] = (weights["i"] * 3)[:40]

    found = Worker(live, body).probe(space)
    left = leave_to_loader(found)
    for name in ("view", "half"):
        assert left.ids(name).tolist() == found.ids(name).tolist()
        assert left.depends_on(name) == ()
    for name, source in (("wide", "w"), ("table", "i"), ("padded", "i")):
        assert left.ids(name).tolist() == [-1 if number else 0 for number in found.ids(name).tolist()]
        assert left.depends_on(name) == (source,)
    assert left.ids("mixed").tolist() == found.ids("mixed").tolist()[:40] + [-1] * 40
    assert left.depends_on("mixed") == ("i",)
    correspond({}, {"engine/0/0": left})
    with pytest.raises(CorrespondenceError, match="mixed on engine/0/0 is F32 and copies i, which is I32"):
        correspond({}, {"engine/0/0": found})


def test_views_are_transferred_bit_for_bit() -> None:
    space = space_of(w=("F8_E4M3", 16, 8), s=("F32", 4), i=("I32", 10))
    trainer = {"w": noisy((16, 8), torch.float8_e4m3fn), "s": noisy(4), "i": noisy(10, torch.int32)}
    engine = {"w": noisy((8, 16), torch.uint8, 2), "s": noisy(4, torch.int32, 2), "i": noisy(10, torch.float32, 2)}

    def copying(live: Live, weights: Weights) -> None:
        for name, tensor in live.items():
            tensor.copy_(weights[name])

    def viewing(live: Live, weights: Weights) -> None:
        live["w"].copy_(weights["w"].view(torch.uint8).T)
        live["s"].copy_(weights["s"].view(torch.int32))
        live["i"].copy_(weights["i"].view(torch.float32))

    maps = {"trainer/0": Worker(trainer, copying).probe(space), "engine/0/0": Worker(engine, viewing).probe(space)}
    cluster = Topology.uniform(
        trainers=1, engines=1, engine_size=1, workers_per_node=1, nic_bytes_per_s=1e9, local_bytes_per_s=1e9
    )
    needed = correspond({"trainer/0": maps["trainer/0"]}, {"engine/0/0": maps["engine/0/0"]})
    plan = make_plan(needed, cluster, buffer_bytes=64)
    run_in_process(plan, maps, {"trainer/0": trainer, "engine/0/0": engine})
    for name in ("s", "i"):
        assert bits_view(engine[name]).tolist() == bits_view(trainer[name]).tolist()
    assert bits_view(engine["w"]).tolist() == bits_view(trainer["w"]).T.tolist()
