"""Lending memory and reading it, on every transport that can; those that cannot say so."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

import transfer_exec.transport.reading as reading
from layout_algebra._digest_kernels import digest_strips
from tests.transfer_exec.fake_device import FakeDevice, FakeDriver
from transfer_exec.errors import PeerGoneError, TransportError
from transfer_exec.transport.base import Endpoint, Ticket, Transport
from transfer_exec.transport.device_memory import DeviceMemoryTransport
from transfer_exec.transport.loopback import LENT, LoopbackNetwork, LoopbackPolicy
from transfer_exec.transport.process_memory import ranges_of, read_process
from transfer_exec.transport.reading import Batch, Strips
from transfer_exec.transport.shared_files import FilePlace
from transfer_exec.transport.shared_memory import SharedMemoryTransport
from transfer_exec.transport.stretches import MAPPED, Lent, Stretches

Maker = Callable[[str], Transport]


@pytest.fixture(params=["loopback", "shared_memory"])
def make(request: pytest.FixtureRequest) -> Maker:
    """Makes transports of one kind that can reach each other."""
    return LoopbackNetwork().transport if request.param == "loopback" else SharedMemoryTransport


def rows(*descriptors: tuple[int, int, int]) -> np.ndarray:
    return np.array(descriptors, dtype=np.uint64).reshape(-1, 3)


def stretches(*arrays: np.ndarray) -> Stretches:
    return Stretches(np.array([a.ctypes.data for a in arrays]), np.array([a.nbytes for a in arrays]))


def pair(make: Maker, lent: list[np.ndarray]) -> tuple[Transport, Transport]:
    """A reader that knows a lender."""
    reader, lender = make("reader"), make("lender")
    lender.lend(stretches(*lent))
    for each in (reader, lender):
        each.open_flags(1)
    reader.connect(Endpoint.from_bytes(lender.endpoint("plan").to_bytes()))
    return reader, lender


def read(transport: Transport, peer: str, memory: Stretches, *batches: np.ndarray) -> Ticket:
    """Prepare and read."""
    return transport.read(transport.prepare_read(peer, memory, batches))


def wait_for(transport: Transport, ticket: Ticket) -> None:
    while not transport.finished(ticket):
        pass


def test_reads_land_where_the_descriptors_say_and_nowhere_else(make: Maker) -> None:
    """Two lent stretches, one of them read-only; two of the reader's own inside guard bytes."""
    lent = [np.arange(100, dtype=np.uint8), np.arange(100, 200, dtype=np.uint8)]
    lent[1].setflags(write=False)
    whole = np.full(300, 0xEE, dtype=np.uint8)
    own = [whole[10:60], whole[100:200]]
    reader, lender = pair(make, lent)
    ticket = read(
        reader, "lender", stretches(*own), rows((0, 0, 10), (10, 10, 20), (100, 50, 100), (99, 49, 1), (7, 40, 0))
    )
    wait_for(reader, ticket)
    expected = np.full(300, 0xEE, dtype=np.uint8)
    expected[10:40], expected[59], expected[100:200] = np.arange(30), 99, np.arange(100, 200)
    assert np.array_equal(whole, expected)
    assert lent[0].tolist() == list(range(100))
    for each in (reader, lender):
        each.close()


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ((0, 0, 101), "row 1 of 2 covers bytes 0:101 lent by lender, which leaves stretch 0 at 0:100"),
        ((95, 0, 10), "covers bytes 95:105 lent by lender"),
        ((200, 0, 1), "covers bytes 200:201 lent by lender, which leaves stretch 1 at 100:200"),
        (((1 << 64) - 1, 0, 1), "lent by lender"),
        ((0, 0, (1 << 64) - 1), "lent by lender"),
        ((0, 45, 10), "covers bytes 45:55 of reader, which leaves stretch 0 at 0:50"),
        ((0, 150, 1), "covers bytes 150:151 of reader"),
        ((0, (1 << 63) + 5, 4), "of reader"),
    ],
)
def test_a_read_that_leaves_a_stretch_on_either_side_is_refused_before_a_byte(
    make: Maker, row: tuple[int, int, int], match: str
) -> None:
    lent = [np.ones(100, dtype=np.uint8), np.ones(100, dtype=np.uint8)]
    own = [np.zeros(50, dtype=np.uint8), np.zeros(100, dtype=np.uint8)]
    reader, _ = pair(make, lent)
    with pytest.raises(TransportError, match=match):
        read(reader, "lender", stretches(*own), rows((0, 0, 8), row))
    assert not own[0].any()
    assert not own[1].any()


def test_what_is_unknown_is_refused(make: Maker) -> None:
    own = stretches(np.zeros(8, dtype=np.uint8))
    reader, lender = pair(make, [np.ones(8, dtype=np.uint8)])
    with pytest.raises(TransportError, match="not connected to other"):
        read(reader, "other", own, rows((0, 0, 8)))
    lender.connect(reader.endpoint("plan"))
    with pytest.raises(TransportError, match="reader: lends no memory"):
        read(lender, "reader", own, rows((0, 0, 8)))
    with pytest.raises(TransportError, match="lender: memory is lent already"):
        lender.lend(own)
    reader.close()
    with pytest.raises(TransportError, match="transport is closed"):
        read(reader, "lender", own, rows((0, 0, 8)))


def test_a_lender_that_closes_is_noticed_before_a_read_and_after_one(make: Maker) -> None:
    """What has been read of a lender that is gone by now may have been somebody else's memory."""
    lent, own = np.ones(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
    reader, lender = pair(make, [lent])
    ticket = read(reader, "lender", stretches(own), rows((0, 0, 8)))
    lender.close()
    with pytest.raises(PeerGoneError, match=r"lender: (has closed|is not on this loopback network)"):
        wait_for(reader, ticket)
    with pytest.raises(PeerGoneError, match="lender: "):
        read(reader, "lender", stretches(own), rows((0, 0, 8)))


def test_a_forked_child_reads_nothing(make: Maker) -> None:
    reader, _ = pair(make, [np.ones(8, dtype=np.uint8)])
    child = os.fork()
    if not child:
        try:
            read(reader, "lender", stretches(np.zeros(8, dtype=np.uint8)), rows((0, 0, 8)))
        except TransportError as error:
            os._exit(int("forked child" in str(error)))
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_neighbours_are_one_range() -> None:
    network = LoopbackNetwork(LoopbackPolicy(seed=2, max_delay=9, reorder=True))
    lent, own = np.arange(200, dtype=np.uint8), np.zeros(200, dtype=np.uint8)
    reader, _ = pair(network.transport, [lent])
    joined = rows(*((at, at, 1) for at in range(50)))
    apart = rows(*((at, at, 1) for at in range(51, 200, 2)))
    for ticket in [read(reader, "lender", stretches(own), joined), read(reader, "lender", stretches(own), apart)]:
        wait_for(reader, ticket)
    (one, other) = network.records
    assert (one.region, one.pieces, one.bytes) == (LENT, ((0, 50),), 50)
    assert len(other.pieces) == 75
    assert own[:50].tolist() == list(range(50))
    assert own[51::2].tolist() == list(range(51, 200, 2))


def test_transports_that_cannot_read_say_so() -> None:
    transport = DeviceMemoryTransport("a", [FakeDevice(FakeDriver(prompt=True))])
    with pytest.raises(TransportError, match="device_memory cannot lend memory"):
        transport.lend(stretches(np.zeros(8, dtype=np.uint8)))


def test_memory_that_vanished_is_an_error_and_no_crash() -> None:
    """The addresses of an endpoint are not mapped any more; the range that is, is read."""
    reader, lender = SharedMemoryTransport("reader"), SharedMemoryTransport("lender")
    good, own = np.ones(4096, dtype=np.uint8), np.zeros(8192, dtype=np.uint8)
    lender.lend(Stretches(np.array([good.ctypes.data, 4096]), np.array([4096, 4096])))
    lender.open_flags(0)
    reader.connect(lender.endpoint("plan"))
    ticket = read(reader, "lender", stretches(own), rows((4096, 0, 4096)))
    with pytest.raises(TransportError, match="1 ranges cannot be read: Bad address"):
        wait_for(reader, ticket)
    here = np.array([[own.ctypes.data, good.ctypes.data, 4096], [own.ctypes.data + 4096, 4096, 4096]])
    with pytest.raises(TransportError, match="of 8192 bytes could be read; part of the range is not mapped there"):
        read_process(os.getpid(), ranges_of(here))


@pytest.mark.parametrize(
    "lent",
    [
        Lent("", (1, 2), (3,), (None,)),
        Lent("", (1,), (-1,), (None,)),
        Lent("", (1 << 62,), (1,), (None,)),
        Lent("", (1, 1), (1 << 61, 1 << 61), (None, None)),
        Lent("", (1,), (1,), ()),
        Lent("", (1,), (1,), (FilePlace(1, 1, -1, "/a"),)),
        Lent("", (1,), (1,), (FilePlace(1, 1, 1 << 62, "/a"),)),
    ],
)
def test_endpoints_whose_lent_memory_cannot_be_are_refused(lent: Lent) -> None:
    with pytest.raises(TransportError, match="are no lent memory"):
        Endpoint.from_bytes(Endpoint("w", "loopback", 1, "p", 0, "", (), lent).to_bytes())


def test_lent_memory_of_a_strange_process_is_refused() -> None:
    reader, lender = SharedMemoryTransport("reader"), SharedMemoryTransport("lender")
    lender.open_flags(0)
    good = lender.endpoint("plan")
    for where in ("process/", "process/-1", "1234", "process/12/34"):
        lie = Endpoint(
            "lender",
            "shared_memory",
            good.incarnation,
            "plan",
            0,
            good.flags_address,
            (),
            Lent(where, (1,), (1,), (None,)),
        )
        with pytest.raises(TransportError, match="is no process of a shared memory endpoint"):
            reader.connect(lie)


@pytest.mark.parametrize("seed", range(40))
def test_batches_digest_what_they_move(seed: int) -> None:
    """Mapped and read ranges of every width, alignment and length, strips that begin and end anywhere in them."""
    random = np.random.default_rng(seed)
    source = random.integers(0, 256, 200_000, dtype=np.uint8)
    targets = np.full((3, len(source)), 0xEE, dtype=np.uint8)
    item_bytes, phase = int(random.choice([1, 2, 4, 8])), int(random.integers(0, 8))
    edges = np.unique(random.integers(0, (len(source) - phase) // item_bytes, random.integers(2, 60)))
    spans = np.stack([edges[:-1], edges[1:]], axis=1)[random.random(len(edges) - 1) < 0.8]
    apart = int(random.integers(0, 9)) * int(random.choice([1, item_bytes]))
    begins, sizes = phase + spans[:, 0] * item_bytes, (spans[:, 1] - spans[:, 0]) * item_bytes
    places = np.minimum(begins + apart, len(source) - sizes)  # where each comes from
    mapped = np.where(random.random(len(spans)) < 0.5, MAPPED, 0)
    cuts = np.unique(random.integers(0, (len(source) - phase) // item_bytes, 25))
    of = np.stack([cuts[:-1], cuts[1:]], axis=1)[random.random(len(cuts) - 1) < 0.7]
    first, number = random.integers(1, 1 << 40, len(of)), random.integers(0, 3, len(of))
    for target, before in zip(targets, (None, np.zeros(3, np.uint64), np.ones(3, np.uint64)), strict=True):
        sums = None if before is None else before.copy()
        base = target.ctypes.data
        rows = np.stack([base + begins, source.ctypes.data + places + mapped, begins + 77, sizes], axis=1)
        columns = (77 + phase + of[:, 0] * item_bytes, np.diff(of)[:, 0] * item_bytes, first)
        strips = np.stack([*columns, np.full_like(first, item_bytes), number], axis=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reading, "_PIECE_BYTES", int(random.choice([64, 4096, 65536])))
            batch = Batch.of(rows, Strips.of(strips))
        batch.compile()
        batch.move(os.getpid(), sums)
        expected = np.full_like(target, 0xEE)
        for begin, place, size in zip(begins, places, sizes, strict=True):
            expected[begin : begin + size] = source[place : place + size]
        assert np.array_equal(target, expected)
        if sums is not None and before is not None:
            elements = target[phase:][: (len(target) - phase) // item_bytes * item_bytes].copy().view(f"u{item_bytes}")
            right = before.copy()
            digest_strips(elements, inside(spans, of, first, number), right)
            assert sums.tolist() == right.tolist()


def inside(spans: np.ndarray, of: np.ndarray, first: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Strips, cut to what lies in some spans, as `digest_strips` takes them."""
    found = [
        (ids + max(start, begin) - begin, min(stop, end) - max(start, begin), max(start, begin), 1, label)
        for (begin, end), ids, label in zip(of.tolist(), first.tolist(), number.tolist(), strict=True)
        for start, stop in spans.tolist()
        if max(start, begin) < min(stop, end)
    ]
    return np.array(found, dtype=np.int64).reshape(-1, 5)


def test_a_digested_read_that_the_system_refuses_says_what_is_wrong() -> None:
    own = np.zeros(64, dtype=np.uint8)
    batch = Batch.of(np.array([[own.ctypes.data, 4096, 0, 64]]), Strips.of(np.array([[0, 64, 1, 2, 0]])))
    for sums in (None, np.zeros(1, dtype=np.uint64)):
        with pytest.raises(TransportError, match=f"process {os.getpid()}: 1 ranges cannot be read: Bad address"):
            batch.move(os.getpid(), sums)


def test_what_two_tensors_share_is_digested_once(make: Maker) -> None:
    """It is read for both of them."""
    lent, own = np.arange(1, 101, dtype=np.uint16), np.zeros(100, dtype=np.uint16)
    reader, lender = pair(make, [lent.view(np.uint8)])
    strips, sums, right = np.array([[0, 200, 1, 2, 0]]), np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.uint64)
    memory = stretches(own.view(np.uint8), own.view(np.uint8))
    prepared = reader.prepare_read("lender", memory, [rows((0, 0, 200), (0, 200, 200))], Strips.of(strips))
    wait_for(reader, reader.read(prepared, sums))
    digest_strips(lent, np.array([[1, 100, 0, 1, 0]]), right)
    assert sums.tolist() == right.tolist()
    for each in (reader, lender):
        each.close()


def test_a_read_adds_its_digests_once_it_has_finished(make: Maker) -> None:
    """Twice, from two batches; a read that wants none gives none."""
    lent, own = np.arange(1, 101, dtype=np.uint16), np.zeros(100, dtype=np.uint16)
    reader, lender = pair(make, [lent.view(np.uint8)])
    memory = stretches(own.view(np.uint8))
    strips = np.array([[20, 100, 500, 2, 1], [120, 40, 7, 2, 0]])
    prepared = reader.prepare_read("lender", memory, [rows((0, 0, 60)), rows((60, 60, 140))], Strips.of(strips))
    sums, right = np.zeros(2, dtype=np.uint64), np.zeros(2, dtype=np.uint64)
    digest_strips(lent, np.array([[500, 50, 10, 1, 1], [7, 20, 60, 1, 0]]), right)
    for times in (1, 2):
        wait_for(reader, reader.read(prepared, sums))
        assert sums.tolist() == (right * np.uint64(times)).tolist()
        wait_for(reader, reader.read(prepared))
    assert np.array_equal(own, lent)
    for each in (reader, lender):
        each.close()
