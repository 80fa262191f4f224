"""verify="full": what landed against the worker's own loader, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from adapters.failures import HookError, TornError, VerificationError
from adapters.own_load import KEPT_BYTES, OwnLoad, Staged
from adapters.probe_settle import leave_to_loader
from adapters.probing import probe
from adapters.receiver import State
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.adapters.crew import Crew, wait_for
from tests.adapters.toy import SPACE, Holding, Pairs, copy_of, rollout, same_bits, trainer, weights
from transfer_exec.report import TransferReport

BUDGETS = (KEPT_BYTES, 0)


def map_of(holding: Holding) -> SourceMap:
    return leave_to_loader(probe(holding.load_weights, holding.parameters, SPACE))


def check(holding: Holding, source_map: SourceMap, *, staged: Staged | None = None, budget: int = KEPT_BYTES) -> None:
    OwnLoad(holding.load_weights, holding.parameters, source_map, kept_bytes=budget).check(staged or {})


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_the_same_loader_agrees_and_changes_nothing(rank: int, ranks: int, dtype: torch.dtype, budget: int) -> None:
    holding = rollout(rank, ranks, dtype=dtype)
    source_map = map_of(holding)
    holding.fill(3)
    holding.tensors["embed"][10:] = -7  # padding
    before, loads = copy_of(holding.tensors), holding.loads
    check(holding, source_map, budget=budget)
    assert holding.loads == loads + 1
    assert same_bits(holding.tensors, before)


def turned(live: dict[str, torch.Tensor], pairs: Pairs) -> None:
    """The toy rollout's loader with its layers the other way round."""
    other = {"layer.0.w": "layer.1.w", "layer.1.w": "layer.0.w"}
    rollout(0, 1)._load(live, ((other.get(name, name), tensor) for name, tensor in pairs))


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_loader_that_changed_is_seen_and_what_landed_is_put_back(budget: int) -> None:
    holding = rollout(0, 1)
    source_map = map_of(holding)
    holding.fill(3)
    landed, w = copy_of(holding.tensors), weights(3)
    holding._load = turned
    bits = [f"0x{int(w[f'layer.{n}.w'][0, 0].view(torch.int16)) & 0xFFFF:04x}" for n in range(2)]
    with pytest.raises(VerificationError) as caught:
        check(holding, source_map, budget=budget)
    for part in (
        "stack: element [0, 0, 0], a copy of layer.0.w",
        f"is {bits[0]} after",
        f"it {bits[1]};",
    ):
        assert part in str(caught.value)
    assert "96 elements differ" in str(caught.value)
    assert same_bits(holding.tensors, landed)


@pytest.mark.parametrize("budget", BUDGETS)
def test_one_element_that_is_mapped_wrong_is_seen(budget: int) -> None:
    holding = rollout(0, 1)
    right = map_of(holding)
    ids = {name: right.ids(name).copy() for name in right.parameters}
    ids["b"][[2, 5]] = ids["b"][[5, 2]]
    wrong = SourceMap.from_ids(SPACE, ids, {name: right.dtype(name) for name in ids})
    holding.fill(3)
    with pytest.raises(VerificationError, match=r"^b: element \[2\], .*2 elements differ"):
        check(holding, wrong, budget=budget)


def doubled(live: dict[str, torch.Tensor], pairs: Pairs) -> None:
    """Tied in value and not in memory."""
    for name, tensor in pairs:
        if name == "norm":
            live["first"].copy_(tensor)
            live["second"].copy_(tensor)


def test_a_second_copy_that_stayed_behind_is_seen() -> None:
    holding = Holding({name: torch.zeros(6, dtype=torch.bfloat16) for name in ("first", "second")}, doubled)
    source_map = map_of(holding)
    holding.fill(3)
    check(holding, source_map)
    holding.tensors["second"][4] = 9
    with pytest.raises(VerificationError, match=r"^second: element \[4\], a copy of norm.* is 0x4110"):
        check(holding, source_map)


def all_at_once(live: dict[str, torch.Tensor], pairs: Pairs) -> None:
    turned(live, dict(pairs).items())


def norm_too_early(live: dict[str, torch.Tensor], pairs: Pairs) -> None:
    for number, pair in enumerate(pairs):
        if number == 0:
            live["norm"].fill_(4)
        else:
            rollout(0, 1)._load(live, [pair])


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (all_at_once, "stack: its own load_weights wrote other bits than had landed, after"),
        (norm_too_early, "norm: its own load_weights wrote to it before"),
    ],
)
def test_writes_outside_a_parameters_window_are_seen(
    load: Callable[[dict[str, torch.Tensor], Pairs], None], says: str
) -> None:
    """Nothing is kept longer than it has to be, so that only a sum can tell."""
    holding = rollout(0, 1)
    source_map = map_of(holding)
    holding.fill(3)
    holding._load = load
    own = OwnLoad(holding.load_weights, holding.parameters, source_map, kept_bytes=0)
    with pytest.raises(VerificationError, match=says):
        own.check({})
    # From then on copies are kept to the end, and tell more.
    holding.tensors["norm"].fill_(1)
    rollout(0, 1)._load(holding.tensors, weights(4).items())
    landed = copy_of(holding.tensors)
    if load is all_at_once:
        with pytest.raises(VerificationError, match=r"stack: element \[0, 0, 0\]"):
            own.check({})
    else:
        own.check({})
    assert same_bits(holding.tensors, landed)


def scaled(live: dict[str, torch.Tensor], pairs: Pairs) -> None:
    """One parameter is computed from two tensors, one is a copy, one is padded with ones whenever it is loaded."""
    both: dict[str, torch.Tensor] = {}
    for name, tensor in pairs:
        if name in ("layer.0.w", "layer.0.b"):
            both[name] = tensor
        if name == "norm":
            live["norm"].copy_(tensor)
            live["wide"].fill_(1)[:6].copy_(tensor)
        if len(both) == 2:
            live["product"].copy_(both.pop("layer.0.w") * both.pop("layer.0.b")[:, None])


def computing() -> Holding:
    shapes = {"product": (8, 6), "norm": (6,), "wide": (9,)}
    return Holding({name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}, scaled)


def staged_of(source_map: SourceMap, version: int) -> Staged:
    tensors = weights(version)
    return {name: tensors[name].view(torch.int16).numpy().view(np.uint16) for name in source_map.staged_tensors()}


def test_computed_parameters_and_padding() -> None:
    holding = computing()
    source_map = map_of(holding)
    assert source_map.opaque == ("product",)
    holding.fill(3)
    holding.tensors["wide"][6:] = 5  # no load has filled the padding yet
    before = copy_of(holding.tensors)
    check(holding, source_map, staged=staged_of(source_map, 3))
    assert same_bits(holding.tensors, before)
    holding.tensors["product"][1, 2] = 77
    with pytest.raises(VerificationError, match=r"product: .*\[1, 2\], computed from .*layer.0.w.*, is 0x429a"):
        check(holding, source_map, staged=staged_of(source_map, 3))
    # Without its inputs nothing can be said of it.
    check(holding, source_map)


def test_a_loader_that_raises_or_replaces_its_parameters() -> None:
    holding = rollout(0, 1)
    source_map = map_of(holding)
    holding.fill(3)
    landed, place, load = copy_of(holding.tensors), holding.tensors["stack"].data_ptr(), holding._load

    def broken(live: dict[str, torch.Tensor], pairs: Pairs) -> None:
        live["norm"].fill_(3)
        raise RuntimeError("no such file")

    def replacing(live: dict[str, torch.Tensor], pairs: Pairs) -> None:
        live["stack"] = torch.zeros_like(live["stack"])
        load(live, pairs)

    holding._load = broken
    with pytest.raises(HookError, match=r"load_weights raised .*no such file"):
        check(holding, source_map)
    holding._load = replacing
    check(holding, source_map)
    assert holding.tensors["stack"].data_ptr() == place
    assert same_bits(holding.tensors, landed)


def test_other_dtypes_and_views() -> None:
    space = CheckpointSpace(
        [TensorSpec("scale", (4,), "F8_E8M0"), TensorSpec("i", (3, 4), "I32"), TensorSpec("f", (5,), "F8_E4M3")]
    )

    def load(live: dict[str, torch.Tensor], pairs: Pairs) -> None:
        for name, tensor in pairs:
            match name:
                case "i":
                    live["turned"].copy_(tensor.t())
                case "f":
                    live["bits"].copy_(tensor.view(torch.uint8))
                case "scale":
                    live["scale"].copy_(tensor.view(torch.uint8))

    holding = Holding(
        {
            "turned": torch.zeros(3, 4, dtype=torch.int32).t(),
            "bits": torch.zeros(5, dtype=torch.uint8),
            "scale": torch.zeros(4, dtype=torch.uint8),
        },
        load,
    )
    source_map = leave_to_loader(probe(holding.load_weights, holding.parameters, space))
    given: Mapping[str, torch.Tensor] = {
        "i": torch.arange(12, dtype=torch.int32).view(3, 4),
        "f": torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8).view(torch.float8_e4m3fn),
        "scale": torch.tensor([9, 8, 7, 6], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    }
    holding.load_weights(given.items())
    staged = {n: given[n].reshape(-1).view(torch.uint8).numpy() for n in source_map.staged_tensors()}
    check(holding, source_map, staged=staged)
    holding.tensors["turned"][3, 1] = -1
    ids = {name: source_map.ids(name) for name in source_map.parameters}
    ids["turned"][[3, 2], 1] = ids["turned"][[2, 3], 1]
    with pytest.raises(VerificationError, match=r"turned: element \[2, 1\].* is 0x00000006 after"):
        check(holding, SourceMap.from_ids(space, ids, {name: source_map.dtype(name) for name in ids}), staged=staged)


@pytest.mark.parametrize("staging", [(), ("trainer", "a", "b", "c")], ids=["in place", "staged"])
def test_updates_are_compared_end_to_end(tmp_path: Path, staging: tuple[str, ...]) -> None:
    engines = {"a": [rollout(r, 2) for r in range(2)], "b": [rollout(0, 1, dtype=torch.float32)], "c": [computing()]}
    engines["c"][0].fill(0)  # its padding: no update writes that
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], engines, verify="full", staging=staging) as crew:
        crew.connect(buffer_bytes=64)
        for version in (1, 2):
            loads = [one.holding.loads for one in crew.rollouts.values()]
            report = crew.send(version)[0]
            assert isinstance(report, TransferReport)
            assert report.verification == "full"
            assert set(report.verify_s) == set(report.workers)
            assert report.verify_total_s == sum(report.verify_s.values())
            longest = [max(s for w, s in report.verify_s.items() if w.startswith(side)) for side in ("trainer", "eng")]
            assert report.verify_at_most_s == pytest.approx(sum(longest))
            assert "verified by full" in str(report)
            assert [one.holding.loads for one in crew.rollouts.values()] == [n + 1 for n in loads[:3]] + [loads[3] + 2]
            for one in crew.rollouts.values():
                assert same_bits(one.holding.tensors, one.holding.expected(version))
        # Every class is proven, those that c computes from as well.
        proven = crew.rollouts["c/0"].adapter._duties._proof
        assert proven is not None
        assert sorted(proven.numbers) == list(range(len(proven.numbers)))
        assert proven.staged.parameters
        b = crew.rollouts["b/0"]
        load, b.holding._load = b.holding._load, turned
        with pytest.raises(
            VerificationError, match=r"version 3: engine/b/0: stack: element .*; engine/., engine/. has vers"
        ):
            crew.send(3)
        wait_for(lambda: bool(b.errors))
        assert isinstance(b.errors[-1], TornError)
        assert (b.adapter.state, b.adapter.version) == (State.TORN, 2)
        assert crew.rollouts["a/1"].adapter.version == 3
        b.holding._load = load
        crew.send(4)
        assert b.adapter.ready
        assert same_bits(b.holding.tensors, b.holding.expected(4))


@pytest.mark.parametrize("staging", [(), ("a",)], ids=["in place", "staged"])
def test_what_is_spoiled_after_it_landed_is_seen(tmp_path: Path, staging: tuple[str, ...]) -> None:
    """A load of some names, for a computed parameter, that clears what came for others."""

    def clearing(live: dict[str, torch.Tensor], pairs: Pairs) -> None:
        for name in ("wide", "norm"):
            live[name].fill_(1)
        scaled(live, pairs)

    holding = Holding(computing().tensors, clearing)
    with Crew(tmp_path, [trainer(0, 1)], {"a": [holding]}, verify="full", staging=staging) as crew:
        crew.connect()
        with pytest.raises(VerificationError, match="1 of 1 sets of elements that landed are not in the parameters"):
            crew.send(1)
        wait_for(lambda: bool(crew.rollouts["a/0"].errors))
        assert crew.rollouts["a/0"].adapter.state is State.TORN


@pytest.mark.parametrize("budget", BUDGETS)
def test_no_number_stays_none_when_it_is_converted(budget: int) -> None:
    """Torch and the transfer leave other bits of an F32 NaN in BF16; of a copy that is not converted all bits count."""
    space = CheckpointSpace([TensorSpec("w", (40,), "F32"), TensorSpec("v", (40,), "BF16")])
    live = {"w": torch.zeros(40, dtype=torch.bfloat16), "v": torch.zeros(40, dtype=torch.bfloat16)}

    def load(pairs: Pairs) -> None:
        for name, tensor in pairs:
            live[name].copy_(tensor)

    source_map = probe(load, live, space)
    for tensor in live.values():
        tensor.copy_(torch.arange(40.0))
        tensor.view(torch.int16)[7] = 0x7FC1
    live["w"][8] = float("nan")
    before = copy_of(live)

    def nan_of_its_own(pairs: Pairs, changed: tuple[str, ...] = ("w",)) -> None:
        for name, tensor in pairs:
            load([(name, tensor)])
            if name in changed:
                live[name].view(torch.int16)[7] = -1

    OwnLoad(nan_of_its_own, live, source_map, kept_bytes=budget).check({})
    assert same_bits(live, before)

    with pytest.raises(VerificationError, match=r"v: element \[7\], a copy of v.*; 1 elements differ"):
        OwnLoad(partial(nan_of_its_own, changed=("w", "v")), live, source_map, kept_bytes=budget).check({})
    live["w"][8] = 8.0
    live["w"].view(torch.int16)[7] = 0x7F80
    with pytest.raises(VerificationError, match=r"w: element \[7\], a copy of w.*; 1 elements differ"):
        OwnLoad(nan_of_its_own, live, source_map, kept_bytes=budget).check({})
