"""Tracing loaders that compute, and loaders that cannot be followed: chains of operations, and named refusals."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from adapters.tracing import TracedMap, trace
from layout_algebra.errors import ProbeError, TracingError, UnsupportedDtypeError
from layout_algebra.space import CheckpointSpace
from tests.fakes import Live, Worker, keeps_bits, noisy, space_of

Weights = dict[str, torch.Tensor]
Body = Callable[[Live, Weights], object]
BF16 = torch.bfloat16


def traced(worker: Worker, space: CheckpointSpace) -> TracedMap:
    versions = {name: tensor._version for name, tensor in worker.live.items()}
    with keeps_bits(worker.live):
        try:
            return trace(worker.load_weights, lambda: worker.live, space)
        finally:
            assert {name: tensor._version for name, tensor in worker.live.items()} == versions


CHAINS: dict[str, tuple[Body, tuple[str, ...], tuple[str, ...]]] = {
    "minus exp of a cast": (
        lambda live, w: live["p"].copy_(-torch.exp(w["x"][2:].float())),
        ("to(F32)", "aten.exp", "aten.neg"),
        ("x",),
    ),
    "in place": (
        lambda live, w: [live["p"].copy_(w["x"][2:]), live["p"].mul_(2).neg_()],
        ("to(F32)", "aten.mul_(2)", "aten.neg_"),
        ("x",),
    ),
    "sum of two": (
        lambda live, w: live["p"].copy_(w["x"][2:].float() + w["y"]),
        ("to(F32)", "aten.add"),
        ("x", "y"),
    ),
    "cast down and up": (
        lambda live, w: live["p"].copy_(w["y"].to(BF16)),
        ("to(BF16)", "to(F32)"),
        ("y",),
    ),
    "block scale": (
        lambda live, w: live["p"].copy_(w["y"].view(2, 1).abs().amax(dim=1) / 448),
        ("aten.abs", "aten.amax", "aten.div(448)"),
        ("y",),
    ),
    "selected by sign": (
        lambda live, w: live["p"].copy_(torch.where(w["y"] > 0, w["y"], 0)),
        ("aten.gt(0)", "aten.where"),
        ("y",),
    ),
    "sorted": (
        lambda live, w: live["p"].copy_(w["y"][w["y"].argsort()]),
        ("aten.sort", "aten.index"),
        ("y",),
    ),
    "clamped out=": (
        lambda live, w: torch.clamp(w["y"], 0, 1, out=live["p"]),
        ("aten.clamp(0, 1)",),
        ("y",),
    ),
    "accumulated": (
        lambda live, w: [live["p"].zero_(), live["p"].add_(w["y"])],
        ("aten.add_",),
        ("y",),
    ),
    "what was there before": (lambda live, w: live["p"].add_(1), ("aten.add_(1)",), ()),
    "random": (lambda live, w: live["p"].normal_(), ("aten.normal_",), ()),
    "random and copied": (lambda live, w: live["p"].copy_(torch.randn(2)), ("aten.randn",), ()),
}


@pytest.mark.parametrize("name", CHAINS)
def test_opaque_elements_name_their_operations_and_tensors(name: str) -> None:
    body, operations, depends_on = CHAINS[name]
    space = space_of(x=("BF16", 4), y=("F32", 2), z=("F32", 3))

    def beside(live: Live, weights: Weights) -> None:
        live["beside"].copy_(weights["z"])
        body(live, weights)

    found = traced(Worker({"p": noisy(2), "beside": noisy(3)}, beside), space)
    assert found.source_map.ids("p").tolist() == [-1, -1]
    assert found.operations("p") == operations
    assert found.source_map.depends_on("p") == depends_on
    assert found.operations("beside") == ()
    assert found.source_map.ids("beside").tolist() == [7, 8, 9]


def test_opaque_elements_depend_on_their_own_sources_only() -> None:
    """A computation element by element keeps apart what was put together before; a reduction does not."""
    space = space_of(x=("F32", 3), y=("F32", 3))

    def body(live: Live, weights: Weights) -> None:
        both = torch.cat([weights["x"], weights["y"]]).mul(2)
        live["p"].copy_(both[:3])
        live["q"].copy_(both[3:])
        live["mean"].copy_(both.mean())

    worker = Worker({"p": noisy(3), "q": noisy(3), "mean": noisy(())}, body)
    found = traced(worker, space)
    assert [found.source_map.depends_on(name) for name in ("p", "q", "mean")] == [("x",), ("y",), ("x", "y")]
    assert found.operations("mean") == ("aten.mul(2)", "aten.mean")
    probed = worker.probe(space)
    assert all(set(probed.depends_on(name)) <= set(found.source_map.depends_on(name)) for name in worker.live)


def test_block_quantization() -> None:
    space = space_of(w=("BF16", 4, 6), n=("BF16", 6))

    def body(live: Live, weights: Weights) -> None:
        blocks = weights["w"].float().view(2, 2, 3, 2).transpose(1, 2)
        scale = blocks.abs().amax(dim=(2, 3), keepdim=True) / 448
        live["q"].copy_((blocks / scale).to(torch.float8_e4m3fn).transpose(1, 2).reshape(4, 6))
        live["scale"].copy_(scale.view(2, 3))
        live["n"].copy_(weights["n"])

    live = {"q": noisy((4, 6), torch.float8_e4m3fn), "scale": noisy((2, 3)), "n": noisy(6)}
    found = traced(Worker(live, body), space)
    assert found.source_map.opaque == ("q", "scale")
    assert found.operations("scale") == ("to(F32)", "aten.abs", "aten.amax", "aten.div(448)")
    assert found.operations("q") == (*found.operations("scale"), "aten.div", "to(F8_E4M3)")
    assert found.source_map.staged_tensors() == ("w",)


CASTS = [
    ("F32", (BF16,), True),
    ("F32", (torch.float64, BF16), True),
    ("F32", (BF16, torch.float32, BF16), True),
    ("BF16", (torch.float32, torch.float64), True),
    ("BF16", (torch.float16,), True),
    ("F32", (BF16, torch.float16), False),
    ("F32", (torch.float16, torch.float32), False),
    ("F8_E4M3", (BF16, torch.float32), True),
    ("I8", (torch.int32,), True),
    ("I32", (torch.int8,), False),
    ("F32", (torch.int32,), False),
    ("F32", (torch.float8_e4m3fn,), False),
]


@pytest.mark.parametrize(("source", "steps", "copied"), CASTS)
def test_which_casts_are_copies(source: str, steps: tuple[torch.dtype, ...], copied: bool) -> None:
    space = space_of(w=(source, 4, 3))

    def body(live: Live, weights: Weights) -> None:
        value = weights["w"]
        for dtype in steps[:-1]:
            value = value.to(dtype)
        live["p"].copy_(value.t())

    found = traced(Worker({"p": noisy((3, 4), steps[-1])}, body), space)
    assert (found.source_map.ids("p") == (np.arange(1, 13).reshape(4, 3).T if copied else -1)).all()


BIT_COPIES: dict[str, Body] = {
    "as int16": lambda live, w: live["p"].view(torch.int16).copy_(w["x"].view(torch.int16)),
    "as bytes": lambda live, w: live["p"].view(torch.uint8).copy_(w["x"].view(torch.uint8)),
    "as pairs": lambda live, w: live["p"].view(torch.int32).copy_(w["x"].view(torch.int32)),
    "through a byte buffer": lambda live, w: through_bytes(live, w),
    "of a storage": lambda live, w: torch.empty(0, dtype=torch.uint8).set_(live["p"].untyped_storage()).copy_(
        torch.empty(0, dtype=torch.uint8).set_(w["x"].untyped_storage())
    ),
}  # fmt: skip


def through_bytes(live: Live, weights: Weights) -> None:
    buffer = torch.empty(50, dtype=torch.uint8)
    buffer[2:50].view(BF16).view(4, 6).copy_(weights["x"])
    live["p"].copy_(buffer.view(BF16)[1:].view(4, 6))


@pytest.mark.parametrize("name", BIT_COPIES)
def test_bits_that_are_moved_as_another_type(name: str) -> None:
    worker, space = Worker({"p": noisy((4, 6), BF16)}, BIT_COPIES[name]), space_of(x=("BF16", 4, 6))
    assert traced(worker, space).source_map.ids("p").reshape(-1).tolist() == list(range(1, 25))


def test_a_bit_pattern_put_into_integers_is_computed() -> None:
    space = space_of(x=("BF16", 8))

    def body(live: Live, weights: Weights) -> None:
        live["p"].copy_(weights["x"].view(torch.int16))
        live["q"].copy_(weights["x"].view(torch.int32))

    found = traced(Worker({"p": noisy(8, torch.int16), "q": noisy(4, torch.int32)}, body), space)
    assert found.source_map.ids("p").tolist() == [-1] * 8
    assert found.operations("p") == ("view(I16)",)
    assert found.source_map.ids("q").tolist() == [-1] * 4


def another_thread(live: Live, weights: Weights) -> None:
    with ThreadPoolExecutor(1) as pool:
        live["p"].copy_(pool.submit(lambda: weights["x"].flip(0)).result())


def thread_that_writes(live: Live, weights: Weights) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: live["p"].copy_(weights["x"])).result()


def caught(live: Live, weights: Weights) -> None:
    live["p"].copy_(weights["x"])
    try:
        live["p"].fill_(weights["x"].sum().item())
    except RuntimeError:
        raise AssertionError from None
    except Exception:  # noqa: BLE001 what a careless loader does
        return


def by_address(live: Live, weights: Weights) -> None:
    live["p"].copy_(weights["x"])
    ctypes.memset(live["p"].data_ptr(), 0, 4)


REFUSED: dict[str, tuple[Body, str]] = {
    "item": (lambda live, w: live["p"].fill_(w["x"][0].item()), r"aten\._local_scalar_dense on checkpoint tensor x at"),
    "bool": (lambda live, w: bool(w["x"].isfinite().all()), r"_local_scalar_dense on a tensor .*made of x"),
    "live item": (lambda live, w: live["p"][0].item(), r"_local_scalar_dense on parameter p at .*left out of"),
    "live index": (lambda live, w: live["p"].copy_(w["x"][live["order"]]), r"aten\.index on parameter order at"),
    "tolist": (lambda live, w: w["x"].tolist(), r"Tensor\.tolist on checkpoint tensor x"),
    "numpy": (lambda live, w: w["x"].float().numpy(), r"Tensor\.numpy on checkpoint tensor x"),
    "asarray": (lambda live, w: np.asarray(w["x"]), r"Tensor\.__array__ on checkpoint tensor x"),
    "live numpy": (lambda live, w: np.copyto(live["p"].numpy(), 0), r"Tensor\.numpy on parameter p"),
    "nonzero": (lambda live, w: w["x"].nonzero(), r"aten\.nonzero on checkpoint tensor x"),
    "mask": (lambda live, w: w["x"][w["x"] > 0], r"aten\.index on a tensor .*aten\.gt\(0\) \(made of x\)"),
    "equal": (lambda live, w: torch.equal(w["x"], live["p"]), r"aten\.equal on"),
    "unique": (lambda live, w: w["x"].unique(), r"aten\._unique2 on checkpoint tensor x"),
    "lazy negation": (lambda live, w: live["p"].copy_(torch._neg_view(w["x"])), r"aten\._neg_view"),
    "caught": (caught, r"_local_scalar_dense on .*made of x.* in caught"),
    "another thread": (another_thread, r"checkpoint tensor x: its memory was read or written outside"),
    "thread that writes": (thread_that_writes, r"code outside of torch's operations at .* in <lambda>"),
    "by address": (by_address, r"parameter p: its memory was read or written outside"),
    "custom operation": (lambda live, w: torch.ops.tracing_test.turn(w["x"]), r"tracing_test\.turn on"),
}  # fmt: skip


@torch.library.custom_op("tracing_test::turn", mutates_args=())
def turn(x: torch.Tensor) -> torch.Tensor:
    """Foreign code that says nothing of its result."""
    return x.flip(0).clone()


@torch.library.custom_op("tracing_test::turn_known", mutates_args=())
def turn_known(x: torch.Tensor) -> torch.Tensor:
    """Foreign code whose shape is known."""
    return x.flip(0).clone()


turn_known.register_fake(torch.empty_like)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_named(name: str) -> None:
    body, match = REFUSED[name]
    live = {"p": noisy(6), "order": torch.arange(6)}
    with pytest.raises(TracingError, match=match) as caught_error:
        traced(Worker(live, body), space_of(x=("F32", 6)))
    if "outside" not in match:
        assert f"{__file__}:" in str(caught_error.value)


def test_foreign_code_of_known_shape_is_opaque() -> None:
    worker = Worker({"p": noisy(6)}, lambda live, w: live["p"].copy_(torch.ops.tracing_test.turn_known(w["x"])))
    found = traced(worker, space_of(x=("F32", 6)))
    assert (found.source_map.ids("p") == -1).all()
    assert found.operations("p") == ("tracing_test.turn_known",)


def test_collectives_are_refused_before_they_are_called() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        calls: list[Body] = [
            lambda live, w: torch.distributed.all_reduce(w["x"]),
            lambda live, w: torch.distributed.barrier(),
            lambda live, w: torch.distributed.all_gather_object([None], 1),
        ]
        for body in calls:
            with pytest.raises(TracingError, match=r"calls c10d\..*a collective needs"):
                traced(Worker({"p": noisy(6)}, body), space_of(x=("F32", 6)))
    finally:
        torch.distributed.destroy_process_group()


def test_dtypes_without_a_tensor_are_named_before_anything_is_called() -> None:
    worker = Worker({"p": noisy(6)}, lambda live, w: None)
    with pytest.raises(UnsupportedDtypeError):
        trace(worker.load_weights, worker.live, space_of(x=("F4", 6)))
    with pytest.raises(ProbeError, match="meta"):
        trace(worker.load_weights, {"p": torch.empty(2, device="meta")}, space_of(x=("F32", 6)))
    assert worker.loads == 0


def test_names_of_steering_tensors_left_out_are_read_as_they_are() -> None:
    order = torch.tensor([2, 0, 1])
    live = {"p": noisy(3)}
    found = trace(lambda w: live["p"].copy_(dict(w)["x"][order][order[0].item() :]), live | {}, space_of(x=("F32", 3)))
    assert found.source_map.ids("p").tolist() == [2, 2, 2]
