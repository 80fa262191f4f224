"""Verification in place of the last code pass: one load less where all is long, and never another map."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from adapters import probe_naming
from adapters._naming_kernels import name_elements
from adapters.probe_naming import FEWEST_IDS, WINDOW, Lookup, plan_naming
from adapters.probing import probe
from adapters.torch_bits import as_bits
from layout_algebra.residues import choose_codebook, plan_passes
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.fakes import Live, Worker, ids_by_running, keeps_bits, noisy, space_of

Weights = dict[str, torch.Tensor]
Body = Callable[[Live, Weights], object]

ALL_LOADS, FEWER_LOADS, FEWER_LOADS_OF_BYTES = 5, 3, 4
BYTES = space_of(a=("BF16", 160, 128), b=("BF16", 160, 128), n=("F32", 300), e=("F8_E4M3", 128, 128))
SPACE = space_of(a=("BF16", 160, 128), b=("BF16", 160, 128), n=("F32", 300), e=("F16", 128, 128))


@pytest.fixture
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take small checkpoints for large ones."""
    monkeypatch.setattr(probe_naming, "WORTH_ELEMENTS", 0)


def bf16(*shape: int) -> torch.Tensor:
    return noisy(shape, torch.bfloat16)


def stack(live: Live, weights: Weights) -> None:
    live["p"][:160].copy_(weights["a"])
    live["p"][160:320].copy_(weights["b"])


def transposed(live: Live, weights: Weights) -> None:
    live["p"].copy_(weights["a"].t())


def part_of_a_padded_one(live: Live, weights: Weights) -> None:
    live["p"][:70].copy_(weights["b"][90:])


def zeros_behind(live: Live, weights: Weights) -> None:
    part_of_a_padded_one(live, weights)
    live["p"][70:].zero_()


def rows_backwards(live: Live, weights: Weights) -> None:
    live["p"].copy_(weights["a"].flip(0))


def every_second_column_of_both(live: Live, weights: Weights) -> None:
    live["p"].copy_(torch.cat([weights["a"][:, ::2], weights["b"][:, 1::2]], dim=1))


def heads_apart(live: Live, weights: Weights) -> None:
    live["p"].copy_(weights["a"].reshape(2, 80, 128).transpose(0, 1).reshape(80, 256))


def columns_of_both_as_one_row(live: Live, weights: Weights) -> None:
    live["p"].copy_(torch.cat([weights["a"][:, :64].flatten(), weights["b"][:, 64:].flatten()]))


def other_dtypes(live: Live, weights: Weights) -> None:
    live["p"].copy_(weights["a"])
    live["n"].copy_(weights["n"])
    live["q"].copy_(weights["e"])


MOVERS: tuple[tuple[Body, Live], ...] = (
    (stack, {"p": bf16(320, 128)}),
    (transposed, {"p": bf16(128, 160)}),
    (part_of_a_padded_one, {"p": bf16(96, 128)}),
    (zeros_behind, {"p": bf16(96, 128)}),
    (rows_backwards, {"p": bf16(160, 128)}),
    (every_second_column_of_both, {"p": bf16(160, 128)}),
    (heads_apart, {"p": bf16(80, 256)}),
    (columns_of_both_as_one_row, {"p": bf16(160 * 128)}),
    (other_dtypes, {"p": noisy((160, 128)), "n": bf16(300), "q": noisy((128, 128), torch.float16)}),
)


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize(("space", "loads"), [(SPACE, FEWER_LOADS), (BYTES, FEWER_LOADS_OF_BYTES)], ids=["", "bytes"])
@pytest.mark.parametrize(("body", "live"), MOVERS, ids=lambda given: getattr(given, "__name__", ""))
def test_long_pieces_take_fewer_loads(body: Body, live: Live, space: CheckpointSpace, loads: int) -> None:
    """Two less; where bytes are fed, of which there are few, one."""
    if space is BYTES:
        live = {name: noisy((128, 128), torch.float8_e4m3fn) if name == "q" else one for name, one in live.items()}
    worker = Worker(live, body)
    steps: list[tuple[str, int, int]] = []
    with keeps_bits(worker.live):
        found = probe(worker.load_weights, worker.live, space, progress=lambda *step: steps.append(step))
    assert worker.loads == loads
    assert steps[-1][1:] == (loads, loads)
    truth = ids_by_running(worker, space)
    assert {name: found.ids(name).tolist() for name in live} == {name: truth[name].tolist() for name in live}
    assert found.digest() == SourceMap.from_ids(space, truth, {name: found.dtype(name) for name in live}).digest()


@pytest.mark.parametrize(
    ("elements", "dtypes", "plan"),
    [
        (1 << 24, ("BF16",), (1, 131_071)),
        (540_000_000, ("BF16", "F32"), (1, 562_813)),
        (4_000_000_000, ("BF16",), (1, 4_168_861)),
        (5_000_000_000, ("BF16",), (3, 131_071)),
        (1 << 24, ("BF16", "I32"), (1, 131_071)),
        (1 << 24, ("BF16", "F8_E4M3"), (3, 131_071)),
        (1 << 24, ("U8",), (3, 131_071)),
        (10**12, ("BF16",), (3, 131_071)),
    ],
)
def test_one_code_pass_is_enough_for_checkpoints_that_a_period_numbers(
    elements: int, dtypes: tuple[str, ...], plan: tuple[int, int]
) -> None:
    space = CheckpointSpace(TensorSpec(f"t{n}", (elements // len(dtypes),), dtype) for n, dtype in enumerate(dtypes))
    passes = plan_passes(choose_codebook(space), space.total_elements)
    made = plan_naming(space, passes, 1 << 30)
    assert made == plan
    assert math.prod(one.modulus for one in passes[: made.passes]) * made.period > 2 * space.total_elements
    assert plan_naming(space, passes, 0).period == 131_071


def test_small_checkpoints_get_every_pass() -> None:
    worker = Worker({"p": bf16(320, 128)}, stack)
    worker.probe(SPACE)
    assert worker.loads == ALL_LOADS


def lone_elements_between(live: Live, weights: Weights) -> None:
    live["p"].copy_(weights["a"])
    live["p"][5, 7] = weights["b"][0, 0]


def narrow(live: Live, weights: Weights) -> None:
    live["p"].copy_(weights["a"].reshape(-1, 4))


def short_constant_between(live: Live, weights: Weights) -> None:
    live["p"].copy_(weights["a"])
    live["p"][3, :8] = -1.0


def one_row_for_all(live: Live, weights: Weights) -> None:
    live["p"].copy_(weights["a"][:1].expand(160, 128))


UNSUITABLE: tuple[tuple[Body, Live, int], ...] = (
    (lone_elements_between, {"p": bf16(160, 128)}, ALL_LOADS + 1),
    (narrow, {"p": bf16(160 * 32, 4)}, ALL_LOADS + 1),
    (short_constant_between, {"p": bf16(160, 128)}, ALL_LOADS),
    (one_row_for_all, {"p": bf16(160, 128)}, FEWER_LOADS),
)


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize(("body", "live", "loads"), UNSUITABLE, ids=lambda given: getattr(given, "__name__", ""))
def test_other_content_is_exact_all_the_same(body: Body, live: Live, loads: int) -> None:
    worker = Worker(live, body)
    found = worker.probe(SPACE)
    assert worker.loads == loads
    truth = ids_by_running(worker, SPACE)["p"]
    assert np.array_equal(found.ids("p"), np.maximum(truth, 0))


COMPUTING: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda x, y: x.abs(),
    lambda x, y: x.relu(),
    lambda x, y: torch.maximum(x, y),
    lambda x, y: torch.where(x.abs() < y.abs(), x, y),
    lambda x, y: x.clamp(-2, 2),
    lambda x, y: x.clamp(max=0.5),
    lambda x, y: x * 0.5,
    lambda x, y: x + 2.0**-12,
    lambda x, y: -x.exp(),
    lambda x, y: x.to(torch.float8_e4m3fn).to(x.dtype),
    lambda x, y: x.sign(),
    lambda x, y: x.sort(dim=1).values,
    lambda x, y: x.maximum(x.roll(1, 0)),
    lambda x, y: torch.stack([x, y, x.flip(0)]).median(dim=0).values,
)


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize("number", range(len(COMPUTING)))
@pytest.mark.parametrize("rows", [160, 1])
def test_what_is_computed_is_no_copy(number: int, rows: int) -> None:
    def body(live: Live, weights: Weights) -> None:
        live["p"].copy_(weights["b"])
        live["p"][:rows].copy_(COMPUTING[number](weights["a"], weights["b"])[:rows])

    worker = Worker({"p": bf16(160, 128)}, body)
    found = worker.probe(SPACE)
    assert worker.loads > ALL_LOADS
    own = np.arange(*SPACE.id_range("b")).reshape(160, 128)[rows:]
    assert (found.ids("p")[:rows] == -1).all()
    assert np.isin(found.ids("p")[rows:], [-1, *own.flatten()]).all()
    assert found.depends_on("p")


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize(("jump", "other", "passes"), [(1919, "F32", 3), (125 * 123 * 121, "F8_E4M3", 4)])
def test_a_break_that_passes_cannot_see(jump: int, other: str, passes: int) -> None:
    """Ids that jump by the product of their moduli go on evenly in them; verification sees that they do not."""
    space = space_of(v=(other, 1), w=("BF16", jump + 1000))

    def body(live: Live, weights: Weights) -> None:
        live["p"].copy_(torch.cat([weights["w"][:300], weights["w"][300 + jump : 600 + jump]]))

    worker = Worker({"p": bf16(600)}, body)
    found = worker.probe(space)
    assert worker.loads == passes + 2 + 1
    assert np.array_equal(found.ids("p"), ids_by_running(worker, space)["p"])


LOOKING: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda x, y: x if x.float().norm() > y.float().norm() else y,
    lambda x, y: torch.where(x.float().abs().sum() > y.float().abs().sum(), x, y),
    lambda x, y: x if x[0, 0].item() > 0 else y,
    lambda x, y: x if x.view(torch.int16).numpy()[3, 3] & 1 else y,
    lambda x, y: [x, y][int(x.float().abs().argmax()) % 2],
)


def on_a_thread(live: Live, weights: Weights) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(stack, live, weights).result()


def written_by_numpy(live: Live, weights: Weights) -> None:
    bits = np.frombuffer((ctypes.c_char * live["p"].nbytes).from_address(live["p"].data_ptr()), dtype=np.uint8)
    for number, name in enumerate("ab"):
        half = weights[name].nbytes
        source = (ctypes.c_char * half).from_address(weights[name].data_ptr())
        bits[number * half : (number + 1) * half] = np.frombuffer(source, dtype=np.uint8)


def read_from_a_copy(live: Live, weights: Weights) -> None:
    stack(live, weights)
    int(weights["a"][0, 0].to(torch.int64))
    weights["a"].view(torch.int16)[0, 0].clone().item()


def beside_tensors_without_memory(live: Live, weights: Weights) -> None:
    assert torch.zeros(2, 2).to_sparse().clone().shape == torch.empty(3, device="meta").new_empty(2, 2).shape
    stack(live, weights)


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize("body", [on_a_thread, beside_tensors_without_memory, written_by_numpy, read_from_a_copy])
def test_what_may_look_unseen_gets_every_pass(body: Body) -> None:
    worker = Worker({"p": bf16(320, 128)}, body)
    found = worker.probe(SPACE)
    assert worker.loads == ALL_LOADS
    assert np.array_equal(found.ids("p"), ids_by_running(worker, SPACE)["p"])


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize("number", range(len(LOOKING)))
def test_a_loader_that_looks_at_values_gets_every_pass(number: int) -> None:
    """Which tensor it picks is one coin a load, whatever is fed: fewer loads would believe it more often."""

    def body(live: Live, weights: Weights) -> None:
        live["p"].copy_(LOOKING[number](weights["a"], weights["b"]))

    worker = Worker({"p": bf16(160, 128)}, body)
    found = worker.probe(SPACE)
    assert worker.loads >= ALL_LOADS
    assert (found.ids("p") == -1).all()


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize(("fed", "loads"), [(False, FEWER_LOADS), (True, ALL_LOADS)])
def test_a_loader_may_read_tables_of_its_own(fed: bool, loads: int) -> None:
    """An expert map steers it, the same way in every load; numbers of the checkpoint would be other ones."""
    space = space_of(w=("BF16", 2, 160, 128), order=("I32", 2))
    own = torch.tensor([1, 0])

    def body(live: Live, weights: Weights) -> None:
        order = weights["order"] if fed else own
        for number in range(2):
            place = order[number].item()
            live["p"][number].copy_(weights["w"][(1 - number) if fed else place])

    worker = Worker({"p": bf16(2, 160, 128)}, body)
    found = worker.probe(space)
    assert worker.loads == loads
    assert (found.ids("p")[0] > found.ids("p")[1].max()).all()


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize(("beside", "wasted"), [(False, 1), (True, 2)])
def test_a_loader_that_refuses_negative_numbers(beside: bool, wasted: int) -> None:
    """On another thread it is not seen to look, so that verification is made twice."""
    pool = ThreadPoolExecutor(1)

    def look(tensor: torch.Tensor) -> bool:
        return bool((tensor < 0).any())

    def body(live: Live, weights: Weights) -> None:
        if pool.submit(look, weights["a"]).result() if beside else look(weights["a"]):
            raise ValueError("negative")
        stack(live, weights)

    worker = Worker({"p": bf16(320, 128)}, body)
    steps: list[tuple[str, int, int]] = []
    found = probe(worker.load_weights, worker.live, SPACE, progress=lambda *step: steps.append(step))
    assert worker.loads == ALL_LOADS + wasted
    assert steps[-1][1:] == (ALL_LOADS, ALL_LOADS), "loads that raised do not count"
    assert np.array_equal(found.ids("p").reshape(2, -1), [np.arange(*SPACE.id_range(name)) for name in "ab"])


@pytest.mark.usefixtures("worth")
def test_a_loader_that_writes_into_its_input() -> None:
    def body(live: Live, weights: Weights) -> None:
        stack(live, weights)
        weights["a"].zero_()

    worker = Worker({"p": bf16(320, 128)}, body)
    assert np.array_equal(worker.probe(SPACE).ids("p"), ids_by_running(worker, SPACE)["p"])
    assert worker.loads == FEWER_LOADS + 1


@pytest.mark.usefixtures("worth")
def test_elements_that_are_loaded_twice() -> None:
    def body(live: Live, weights: Weights) -> None:
        live["p"][:160].copy_(weights["a"])
        live["p"][100:260].copy_(weights["b"])

    worker = Worker({"p": bf16(260, 128)}, body)
    found = worker.probe(SPACE)
    assert worker.loads == FEWER_LOADS
    assert found["p"].written_twice.elements == 60 * 128


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize(
    ("second", "loads"), [(stack, FEWER_LOADS), (short_constant_between, ALL_LOADS), (None, FEWER_LOADS)]
)
def test_all_ranks_make_the_same_loads(second: Body | None, loads: int) -> None:
    """One rank that needs the last code pass has it made on all; one that holds nothing needs none."""
    barrier = threading.Barrier(2, timeout=60)
    votes = [0, 0]
    found: dict[int, SourceMap] = {}
    workers = [
        Worker({"p": bf16(320, 128)}, stack),
        Worker({"p": bf16(320, 128)[:160] if second is not stack else bf16(320, 128)}, second)
        if second is not None
        else Worker({}, lambda live, weights: None),
    ]

    def run(rank: int) -> None:
        def agree(mine: int) -> int:
            votes[rank] = mine
            barrier.wait()
            highest = max(votes)
            barrier.wait()
            return highest

        found[rank] = probe(workers[rank].load_weights, workers[rank].live, SPACE, agree=agree)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [worker.loads for worker in workers] == [loads, loads]
    assert set(found) == {0, 1}


def backwards(block: torch.Tensor) -> torch.Tensor:
    """Columns in reverse; torch flips no 8-bit floats."""
    return block.view(torch.uint8).flip(1).view(block.dtype) if block.element_size() == 1 else block.flip(1)


def random_long_mover(random: np.random.Generator, space: CheckpointSpace) -> tuple[Body, tuple[int, ...]]:
    """Some rows and columns of some tensors, turned around or not, one below or beside the other."""
    height, width = int(random.integers(1, 80)), int(random.integers(FEWEST_IDS, 200))
    parts = []
    for _ in range(int(random.integers(1, 4))):
        name = str(random.choice(list(space.names)))
        turned = bool(random.integers(2))
        rows, columns = space.spec(name).shape[:: -1 if turned else 1]
        at = int(random.integers(0, rows - height + 1)), int(random.integers(0, columns - width + 1))
        parts.append((name, turned, at, bool(random.integers(2))))
    axis = int(random.integers(2))

    def body(live: Live, weights: Weights) -> torch.Tensor:
        found = []
        for name, turned, (row, column), back in parts:
            tensor = weights[name].t() if turned else weights[name]
            block = tensor[row : row + height, column : column + width]
            found.append(backwards(block) if back else block)
        return torch.cat(found, dim=axis)

    shape = [height, width]
    shape[axis] *= len(parts)
    return body, tuple(shape)


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize("seed", range(30))
def test_random_long_movers(seed: int) -> None:
    """In two of three workers something in a parameter is computed, one element or more: no map is ever wrong."""
    random = np.random.default_rng(seed)
    dtype = str(random.choice(["BF16", "F32", "F16", "F8_E4M3", "I16", "I32"]))
    shapes = [tuple(int(extent) for extent in random.integers(200, 260, 2)) for _ in range(4)]
    space = CheckpointSpace(TensorSpec(f"t{number}", shape, dtype) for number, shape in enumerate(shapes))
    kinds = {
        "BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16,
        "F8_E4M3": torch.float8_e4m3fn, "I16": torch.int16, "I32": torch.int32,
    }  # fmt: skip
    movers = {f"p{number}": random_long_mover(random, space) for number in range(8)}
    live = {name: noisy(shape, kinds[dtype], seed) for name, (_, shape) in movers.items()}
    computed = {
        name: torch.from_numpy(random.random(shape) < random.choice([1e-4, 0.01, 0.5, 1.0]))
        for name, (_, shape) in movers.items()
        if seed % 3 and random.random() < 0.3
    }
    by_ids = {name: move(live, {s.name: torch.arange(*space.id_range(s.name)).reshape(s.shape) for s in space.specs})
              for name, (move, _) in movers.items()}  # fmt: skip

    def body(live: Live, weights: Weights) -> None:
        for name, (move, _) in movers.items():
            value = move(live, weights)
            assert isinstance(value, torch.Tensor)
            if name in computed:
                wide = value.to(torch.float64)
                other = (-wide, wide.abs(), wide * 0.5, wide.clamp(-1, 1))[seed % 4].to(value.dtype)
                value = torch.where(computed[name], other.view(value.dtype), value)
            live[name].copy_(value)

    worker = Worker(live, body)
    found = worker.probe(space)
    fewer = FEWER_LOADS_OF_BYTES if dtype == "F8_E4M3" else FEWER_LOADS
    assert computed or worker.loads == fewer or dtype in ("I16", "I32")
    for name, truth in by_ids.items():
        assert isinstance(truth, torch.Tensor)
        ids = found.ids(name)
        if name not in computed:
            assert np.array_equal(ids, truth.numpy()), name
        else:
            assert (ids[computed[name].numpy()] == -1).all(), f"{name}: a computed element is called a copy"
            assert ((ids == truth.numpy()) | (ids == -1)).all(), name


def test_neighbours_name_elements_in_either_direction() -> None:
    """From the element on if its row goes on long enough, else from behind; in any steps, the last ones first."""
    table = as_bits(np.random.default_rng(1).integers(0, 256, 131_071).astype(np.uint8))
    steps = np.arange(64)
    row = as_bits(np.concatenate([table[(77 + 5 * steps) % len(table)], table[(131_000 - 900 * steps) % len(table)]]))
    elements = np.array([0, 1, 40, 41, 63, 64, 80, 127])
    expected = [77, 82, 277, -1, 77 + 5 * 63, 131_000, 131_000 - 900 * 16, 131_000 - 900 * 63]
    expected[3] = 77 + 5 * 41
    found, short, known = np.full(8, -1), np.full(2, -1), np.array([-1, 5])
    other = as_bits(np.random.default_rng(2).integers(0, 256, len(table)).astype(np.uint8))
    lookup = Lookup.of(np.stack([other, table]))
    assert name_elements(row, 128, elements, *lookup, WINDOW, found)
    assert found.tolist() == [place % len(table) for place in expected]
    assert not name_elements(row[: WINDOW - 1], WINDOW - 1, elements[:2], *lookup, WINDOW, short)
    assert short.tolist() == [-1, -1]
    assert name_elements(row, 128, elements[:2], *lookup, WINDOW, known)
    assert known.tolist() == [77, 5]
