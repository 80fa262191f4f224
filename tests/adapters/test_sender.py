"""Connect and send as trainers see them: what arrives, and what is refused on every rank before a byte moves."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from adapters.failures import (
    CoverageError,
    DisagreementError,
    RemoteError,
    StaleError,
    UsageError,
    VerificationError,
    VersionError,
)
from adapters.sender import SenderAdapter
from layout_algebra.errors import CorrespondenceError, LoaderRaisedError, LoaderWroteNothingError
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.adapters.crew import DEADLINE_S, Crew, wait_for
from tests.adapters.toy import SPACE, Holding, copy_of, rollout, same_bits, trainer, weights
from tests.transfer_exec.fake_device import FakeDriver, FakeEvent
from transfer_exec.errors import BudgetError, DeadlineError, UnheldError
from transfer_exec.topology import Topology


def errors_of(crew: Crew, call: object) -> list[Exception]:
    """Every trainer's error; fails the test if one has none."""
    outcomes = crew.trainers(call)  # type: ignore[arg-type]
    assert all(outcome.error is not None for outcome in outcomes), [outcome.value for outcome in outcomes]
    return [outcome.error for outcome in outcomes if outcome.error is not None]


def check_refused(crew: Crew, call: object, kind: type[Exception], *words: str) -> None:
    """All ranks raise this error with these words, and no rollout's bits change."""
    before = {name: copy_of(one.holding.tensors) for name, one in crew.rollouts.items()}
    for error in errors_of(crew, call):
        assert type(error) is kind, repr(error)
        for word in words:
            assert word in str(error), str(error)
    for name, one in crew.rollouts.items():
        assert same_bits(one.holding.tensors, before[name]), name
        assert one.adapter.state.value == "idle"


def test_versions_arrive_bit_for_bit_at_engines_of_other_layouts(tmp_path: Path) -> None:
    with Crew(
        tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(r, 2) for r in range(2)], "b": [rollout(0, 1)]}
    ) as crew:
        report = crew.connect()[0]
        assert report.engines == ("a", "b")
        assert report.worker("engine/a/0").needed_bytes == 2 * (30 + 24 + 24 + 8 + 6)
        assert report.worker("engine/a/0").empty == ("table",)
        for version in (3, 4, 9):
            sent = crew.send(version)[0]
            for name, one in crew.rollouts.items():
                assert one.updates[-1].version == version == one.adapter.version
                assert same_bits(one.holding.tensors, one.holding.expected(version)), name
                assert sent.bytes_received(f"engine/{name}") == report.worker(f"engine/{name}").bytes_received
            assert sent.measures is not None
            assert 0 < sent.measures.rollout_pause_s <= sent.measures.ewtt_s
            assert sent.verification == "digest"
            assert set(sent.verify_s) == set(sent.workers)
        assert [sender.version for sender in crew.senders] == [9, 9]


def test_values_changed_in_place_are_what_is_sent(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        crew.send(1)
        crew.holdings[0].tensors["norm"].fill_(0.5)
        crew.trainers(lambda sender, rank: sender.send_weights(2).result())
        assert crew.rollouts["a/0"].holding.tensors["norm"].tolist() == [0.5] * 6


def test_connect_restores_every_bit_of_both_sides(tmp_path: Path) -> None:
    held, got = trainer(0, 1), rollout(0, 1)
    held.fill(1)
    got.fill(2)
    before = copy_of(held.tensors), copy_of(got.tensors)
    with Crew(tmp_path, [held], {"a": [got]}) as crew:
        crew.connect()
        assert same_bits(held.tensors, before[0])
        assert same_bits(got.tensors, before[1])


def test_a_rank_that_holds_nothing_takes_part(tmp_path: Path) -> None:
    empty = Holding({}, lambda live, pairs: None)
    with Crew(tmp_path, [trainer(0, 1), empty, trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        crew.holdings[0].fill(1)
        crew.holdings[2].fill(1)
        report = crew.trainers(lambda sender, rank: sender.send_weights(1).result())[1]
        assert report.error is None
        assert report.value.bytes_sent("trainer/1") == 0
        one = crew.rollouts["a/0"]
        assert same_bits(one.holding.tensors, one.holding.expected(1))


def test_ready_event_is_waited_for(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        filled = threading.Event()

        def fill_late() -> None:
            time.sleep(0.05)
            crew.holdings[0].fill(5)
            filled.set()

        threading.Thread(target=fill_late).start()
        crew.trainers(lambda sender, rank: sender.send_weights(5, ready_event=filled).result())
        one = crew.rollouts["a/0"]
        assert same_bits(one.holding.tensors, one.holding.expected(5))


class OnlyWaited:
    """A device's event that cannot be asked."""

    def __init__(self, event: FakeEvent) -> None:
        self.synchronize = event.wait


@pytest.mark.parametrize("kind", ["asked", "waited for"])
def test_t12_the_event_of_a_device_that_still_fills_the_weights(kind: str, tmp_path: Path) -> None:
    driver = FakeDriver(3)
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        for version in (5, 6):
            filled = driver.give("trainer's stream", partial(crew.holdings[0].fill, version))
            event = filled if kind == "asked" else OnlyWaited(filled)
            crew.trainers(lambda sender, rank, v=version, e=event: sender.send_weights(v, ready_event=e).result())  # type: ignore[misc]
            one = crew.rollouts["a/0"]
            assert same_bits(one.holding.tensors, one.holding.expected(version))


class NeverHappens:
    """An event of a device that hangs."""

    def query(self) -> bool:
        return False


@pytest.mark.parametrize("event", [threading.Event(), NeverHappens()], ids=["thread", "device"])
def test_ready_event_that_never_happens_is_an_error_on_all_ranks(event: object, tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}, deadline_s=8) as crew:
        crew.connect()
        events = [event, None]
        check_refused(
            crew,
            lambda sender, rank: sender.send_weights(1, ready_event=events[rank]),
            DeadlineError,
            "ready_event",
            "trainer/0",
        )


class Raises:
    """An event of a device that is lost, or at which the caller is interrupted."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def query(self) -> bool:
        raise self._error


@pytest.mark.parametrize(("event", "words"), [(5, "ready_event is 5"), (Raises(OSError("device lost")), "device lost")])
def test_ready_event_that_is_none_or_fails_is_an_error_on_all_ranks_at_once(
    event: object, words: str, tmp_path: Path
) -> None:
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        began = time.monotonic()
        events = [None, event]
        check_refused(
            crew, lambda sender, rank: sender.send_weights(1, ready_event=events[rank]), UsageError, words, "trainer/1"
        )
        assert time.monotonic() - began < DEADLINE_S / 2
        crew.send(1)


def test_an_interrupt_while_the_weights_are_not_ready_is_told_to_all_ranks_at_once(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()

        def call(sender: SenderAdapter, rank: int) -> None:
            if rank == 0:
                sender.send_weights(1)
            else:
                with pytest.raises(KeyboardInterrupt):
                    sender.send_weights(1, ready_event=Raises(KeyboardInterrupt()))

        began = time.monotonic()
        first, second = crew.trainers(call)
        assert second.error is None
        assert isinstance(first.error, RemoteError)
        assert "trainer/1: KeyboardInterrupt" in str(first.error)
        assert time.monotonic() - began < DEADLINE_S / 2
        crew.send(1)


def nested(depth: int) -> object:
    value: object = 0
    for _ in range(depth):
        value = [value]
    return value


@dataclass(frozen=True)
class Key:
    number: int


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (object(), "metadata cannot travel"),
        (b"0" * 70_000, "metadata takes 70,005 bytes"),
        ({Key(1): 3}, "cannot be read where it arrives"),
        (nested(65), "more than 64 deep"),
        (nested(850), "deep"),
    ],
    ids=["no plain value", "large", "keys", "deep", "deeper"],
)
def test_metadata_that_nobody_could_read_is_refused_on_all_ranks(metadata: object, words: str, tmp_path: Path) -> None:
    """Some of it can be written and not read: the engine had the version installed when it found out."""
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        said = [metadata, None]
        check_refused(crew, lambda sender, rank: sender.send_weights(1, said[rank]), UsageError, words, "trainer/0")
        assert crew.rollouts["a/0"].adapter.version is None
        crew.trainers(lambda sender, rank: sender.send_weights(1, [nested(63), 5][rank]).result())
        assert crew.rollouts["a/0"].adapter.version == 1


def test_needed_elements_that_nobody_holds(tmp_path: Path) -> None:
    held = [trainer(r, 2, without=("layer.1.w", "norm")) for r in range(2)]
    with Crew(tmp_path, held, {"a": [rollout(r, 2) for r in range(2)]}) as crew:
        check_refused(
            crew,
            lambda sender, rank: sender.connect(["a"]),
            UnheldError,
            "layer.1.w",
            "norm (all 6 elements)",
            "engine/a/0, engine/a/1",
            "allow_partial",
        )
        report = crew.connect(allow_partial=["layer.1.w", "norm"])[0]
        assert report.kept == (
            "engine/a/0: norm",
            "engine/a/0: stack",
            "engine/a/1: norm",
            "engine/a/1: stack",
        )
        for one in crew.rollouts.values():
            one.holding.tensors["stack"][1].fill_(7)
            one.holding.tensors["norm"].fill_(8)
        crew.send(1)
        for one in crew.rollouts.values():
            expected = one.holding.expected(1)
            assert torch.equal(one.holding.tensors["stack"][0], expected["stack"][0])
            assert torch.equal(one.holding.tensors["embed"], expected["embed"])
            assert set(one.holding.tensors["stack"][1].flatten().tolist()) == {7}
            assert set(one.holding.tensors["norm"].tolist()) == {8}


def test_no_checkpoint_name_in_common(tmp_path: Path) -> None:
    def load(live: dict[str, torch.Tensor], pairs: object) -> None:
        for name, tensor in pairs:  # type: ignore[attr-defined]
            if name in live:
                live[name].copy_(tensor)

    held = Holding({"norm": torch.zeros(6, dtype=torch.bfloat16)}, load)
    got = Holding({"layer.0.b": torch.zeros(8, dtype=torch.bfloat16)}, load)
    with Crew(tmp_path, [held], {"a": [got]}) as crew:
        check_refused(
            crew,
            lambda sender, rank: sender.connect(["a"]),
            CoverageError,
            "no checkpoint tensor in common",
            "norm",
            "layer.0.b",
        )


def test_a_rollout_whose_loader_knows_few_names(tmp_path: Path) -> None:
    space = CheckpointSpace([TensorSpec(n, (4,), "BF16") for n in ("m.l.0.w", "m.l.1.w", "n.w")])

    def load_all(live: dict[str, torch.Tensor], pairs: object) -> None:
        for name, tensor in pairs:  # type: ignore[attr-defined]
            live[name].copy_(tensor)

    def load_one(live: dict[str, torch.Tensor], pairs: object) -> None:
        live["l.0.w"].copy_(dict(pairs)["m.l.0.w"])  # type: ignore[call-overload]

    held = Holding({spec.name: torch.zeros(4, dtype=torch.bfloat16) for spec in space.specs}, load_all)
    got = Holding({n: torch.zeros(4, dtype=torch.bfloat16) for n in ("l.0.w", "l.1.w", "n.w")}, load_one)
    with Crew(tmp_path, [held], {"a": [got]}, checkpoint=space) as crew:
        check_refused(
            crew,
            lambda sender, rank: sender.connect(["a"]),
            CoverageError,
            "filled 1 of 3 parameters",
            "l.1.w, n.w got nothing",
            "2 checkpoint tensors: m.l.1.w, n.w",
        )
        report = crew.connect(allow_partial=["l.1.w", "n.w"])[0]
        assert report.unused["engine/a"] == ("m.l.1.w", "n.w")


def test_a_rollout_loader_that_raises_is_raised_on_every_trainer_and_the_engine_goes_on(tmp_path: Path) -> None:
    def load(live: dict[str, torch.Tensor], pairs: object) -> None:
        raise KeyError("no such layer")

    got = [rollout(0, 2), Holding(rollout(1, 2).tensors, load)]
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": got}) as crew:
        check_refused(
            crew, lambda sender, rank: sender.connect(["a"]), LoaderRaisedError, "engine/a/1", "no such layer"
        )
        ticks = crew.rollouts["a/0"].adapter._session.counter
        wait_for(lambda: crew.rollouts["a/0"].adapter._session.counter > ticks + 3)
        assert crew.rollouts["a/1"].errors == []
        wait_for(lambda: "no such layer" in crew.rollouts["a/1"].adapter.last_failure)
        assert not crew.rollouts["a/1"].adapter.connected


def test_a_trainer_loader_that_writes_nothing(tmp_path: Path) -> None:
    held = [trainer(0, 2), Holding(trainer(1, 2).tensors, lambda live, pairs: None)]
    with Crew(tmp_path, held, {"a": [rollout(0, 1)]}) as crew:
        check_refused(crew, lambda sender, rank: sender.connect(["a"]), LoaderWroteNothingError, "trainer/1")


def test_a_rollout_loader_that_writes_nothing(tmp_path: Path) -> None:
    got = [rollout(0, 2), Holding(rollout(1, 2).tensors, lambda live, pairs: None)]
    with Crew(tmp_path, [trainer(0, 1)], {"a": got}) as crew:
        check_refused(crew, lambda sender, rank: sender.connect(["a"]), LoaderWroteNothingError, "engine/a/1")


def test_closing_waits_for_an_update_that_is_under_way(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(r, 2) for r in range(2)]}) as crew:
        crew.connect()
        for holding in crew.holdings:
            holding.fill(1)
        pending = crew.trainers(lambda sender, rank: sender.send_weights(1))
        crew.senders[0].close()
        for outcome in pending:
            assert outcome.value is not None
            assert outcome.value.result(10).version == 1
            assert outcome.value.done()
        for one in crew.rollouts.values():
            assert same_bits(one.holding.tensors, one.holding.expected(1))


def test_many_updates_leave_nothing_behind(tmp_path: Path) -> None:
    process = psutil.Process()
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect(buffer_bytes=64)
        crew.send(1)
        threads, files, segments = threading.active_count(), process.num_fds(), shared_memory()
        for version in range(2, 60):
            crew.send(version)
            one = crew.rollouts["a/0"]
            assert same_bits(one.holding.tensors, one.holding.expected(version))
        assert (threading.active_count(), process.num_fds(), shared_memory()) == (threads, files, segments)


def shared_memory() -> set[str]:
    """Segments of this process."""
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line}


def test_a_forked_child_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        with monkeypatch.context() as patch:
            patch.setattr("adapters.control.os.getpid", lambda: 1)
            with pytest.raises(UsageError, match="used in its forked child 1"):
                crew.senders[0].send_weights(1)
        crew.send(1)


def test_wider_holders_need_cast(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1, dtype=torch.float32)], {"a": [rollout(0, 1)]}) as crew:
        check_refused(crew, lambda sender, rank: sender.connect(["a"]), CorrespondenceError, "cast=True", "trainer/0")


def test_cast_rounds_to_nearest_even(tmp_path: Path) -> None:
    held = trainer(0, 1, dtype=torch.float32)
    with Crew(tmp_path, [held], {"a": [rollout(0, 1)]}, cast=True) as crew:
        crew.connect()
        generator = torch.Generator().manual_seed(1)
        for tensor in held.tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        crew.trainers(lambda sender, rank: sender.send_weights(1).result())
        got = crew.rollouts["a/0"].holding.tensors
        assert torch.equal(got["norm"], held.tensors["norm"].to(torch.bfloat16))
        assert torch.equal(got["embed"][:10], held.tensors["embed"].to(torch.bfloat16))


def test_a_budget_too_small_for_one_element(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        check_refused(crew, lambda sender, rank: sender.connect(["a"], buffer_bytes=1), BudgetError, "1")


def test_many_rounds_run_the_hooks_once(tmp_path: Path) -> None:
    ran: list[str] = []
    hooks = {"before_update_hook": lambda: ran.append("before"), "after_update_hook": lambda: ran.append("after")}
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}, hooks=hooks) as crew:
        assert crew.connect(buffer_bytes=16)[0].rounds > 10
        assert ran == []
        crew.send(1)
        assert ran == ["before", "after"]
        one = crew.rollouts["a/0"]
        assert same_bits(one.holding.tensors, one.holding.expected(1))


def test_storage_replaced_on_a_trainer(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        crew.holdings[1].tensors["norm"] = crew.holdings[1].tensors["norm"].clone()
        check_refused(
            crew, lambda sender, rank: sender.send_weights(1), StaleError, "norm on trainer/1", "replaced since connect"
        )
        crew.connect()
        crew.send(1)
        assert crew.rollouts["a/0"].adapter.version == 1


def test_dtype_changed_on_a_trainer(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        crew.holdings[0].tensors["norm"] = crew.holdings[0].tensors["norm"].float()
        check_refused(crew, lambda sender, rank: sender.send_weights(1), StaleError, "norm", "torch.float32")


def test_storage_replaced_on_a_rollout(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(r, 2) for r in range(2)]}) as crew:
        crew.connect()
        old = crew.rollouts["a/1"].holding.tensors["stack"]
        crew.rollouts["a/1"].holding.tensors["stack"] = torch.ones(2, 8, 3, dtype=torch.bfloat16).transpose(1, 2)
        check_refused(
            crew,
            lambda sender, rank: sender.send_weights(1),
            StaleError,
            "stack on engine/a/1",
            "strides",
            "connect again",
        )
        assert not old.any()


def test_tables_that_take_no_part_may_move(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        crew.rollouts["a/0"].holding.tensors["table"] = torch.zeros(99)
        crew.send(1)
        assert crew.rollouts["a/0"].adapter.version == 1


def test_a_version_that_is_not_newer(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        crew.send(5)
        for version in (5, 4):
            check_refused(
                crew,
                lambda sender, rank, v=version: sender.send_weights(v),
                VersionError,
                f"version {version}",
                "5",
                "engine/a",
            )
        crew.send(6)


def test_ranks_that_name_different_versions(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        check_refused(
            crew,
            lambda sender, rank: sender.send_weights(3 + rank),
            DisagreementError,
            "send_weights(3)",
            "send_weights(4)",
            "trainer/0",
            "trainer/1",
        )
        crew.send(3)


def test_a_rank_that_does_not_call(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}, deadline_s=5) as crew:
        crew.connect()
        with pytest.raises(DeadlineError, match=r"trainer/1 did not call send_weights\(1\)"):
            crew.senders[0].send_weights(1)
        # The end of the failed call must reach the late rank first, or it is told that it came late.
        time.sleep(0.3)
        crew.send(1)


def test_send_before_connect(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}) as crew:
        check_refused(crew, lambda sender, rank: sender.send_weights(1), StaleError, "send_weights before connect")


def test_an_engine_that_does_not_come(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}, deadline_s=5) as crew:
        check_refused(crew, lambda sender, rank: sender.connect(["a", "z"]), DeadlineError, "engine/z did not come")


def test_workers_of_two_machines_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {}) as crew:
        monkeypatch.setattr("adapters.station.host_identity", lambda: "elsewhere")
        crew.start_engine("a", [rollout(0, 1)])
        check_refused(
            crew,
            lambda sender, rank: sender.connect(["a"]),
            UsageError,
            "trainer/0 runs on",
            "engine/a/0 on elsewhere",
            "none is chosen silently",
        )


def test_an_explicit_topology_is_used(tmp_path: Path) -> None:
    topology = Topology.uniform(
        trainers=1, engines=1, engine_size=2, workers_per_node=2, nic_bytes_per_s=1e9, local_bytes_per_s=1e10
    )
    with Crew(tmp_path, [trainer(0, 1)], {"0": [rollout(r, 2) for r in range(2)]}) as crew:
        report = crew.connect(topology=topology)[0]
        # Over a network: trainers send one copy, and the engine passes on inside itself what both ranks need.
        assert report.worker("trainer/0").bytes_sent == SPACE.total_bytes
        stages = {stage.stage: stage.received for stage in report.worker("engine/0/0").stages}
        assert stages["receive"] > 0
        assert stages["internal"] > 0
        crew.send(1)
        for one in crew.rollouts.values():
            assert same_bits(one.holding.tensors, one.holding.expected(1))


def test_replicas_that_differ_are_not_sent(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1), trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        crew.holdings[0].fill(1)
        crew.holdings[1].fill(1)
        crew.holdings[1].tensors["embed"][3, 2] += 1
        check_refused(
            crew,
            lambda sender, rank: sender.send_weights(1),
            VerificationError,
            "trainer/0 and trainer/1",
            "their bits differ",
        )


@pytest.mark.parametrize("staging", [(), ("trainer",), ("a", "trainer")], ids=["in place", "trainers", "both"])
@pytest.mark.parametrize("beside", ["nothing", "send"])
def test_a_connect_that_one_trainer_missed_leaves_the_earlier_one_in_force(
    staging: tuple[str, ...], beside: str, tmp_path: Path
) -> None:
    """It had told the absent trainer to rest; the next update then sent what that one had staged long before."""
    with Crew(
        tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}, staging=staging, deadline_s=4
    ) as crew:
        crew.connect()
        crew.send(1)
        outcome = crew.trainers(lambda sender, rank: sender.connect(["a"]) if rank == 0 else None)[0]
        assert isinstance(outcome.error, DeadlineError)
        assert "trainer/1 did not call connect" in str(outcome.error)
        sessions = [sender._station.session for sender in crew.senders]

        def heard() -> bool:
            """A call that crosses the end of a connect that its rank took no part in would be ended by it."""
            return sessions[1].txn == sessions[0].txn and sessions[1].txn in sessions[1]._ends

        wait_for(heard)
        if beside == "send":
            outcomes = crew.trainers(lambda sender, rank: sender.send_weights(2) if rank else sender.connect(["a"]))
            assert all(isinstance(outcome.error, DisagreementError) for outcome in outcomes)
            wait_for(heard)
        for version in (3, 4):
            crew.send(version)
            one = crew.rollouts["a/0"]
            assert same_bits(one.holding.tensors, one.holding.expected(version))


@pytest.mark.parametrize("staging", [(), ("trainer",)], ids=["in place", "trainers"])
def test_a_connect_that_fails_does_not_take_in_a_trainer_that_the_earlier_one_was_made_without(
    staging: tuple[str, ...], tmp_path: Path
) -> None:
    with Crew(tmp_path, [trainer(0, 1), trainer(0, 1)], {"a": [rollout(0, 1)]}, staging=staging, deadline_s=4) as crew:
        crew.connect()
        crew.send(1)
        assert crew.trainers(lambda sender, rank: sender.connect(["a"]) if rank == 0 else None)[0].error is None
        one = crew.rollouts["a/0"]
        plain, one.holding._load = one.holding._load, lambda live, pairs: 1 / 0  # type: ignore[assignment]
        assert all(outcome.error is not None for outcome in crew.trainers(lambda sender, rank: sender.connect(["a"])))
        one.holding._load = plain
        for version in (2, 3):
            for holding in crew.holdings:
                holding.fill(version)
            began = time.monotonic()
            first, second = crew.trainers(lambda sender, rank, v=version: sender.send_weights(v).result())  # type: ignore[misc]
            assert first.error is None
            assert "took no part" in str(second.error)
            assert time.monotonic() - began < 2
            assert same_bits(one.holding.tensors, one.holding.expected(version))


def test_arguments_that_cannot_be_honoured(tmp_path: Path) -> None:
    held = trainer(0, 1)

    def make(**options: object) -> SenderAdapter:
        arguments = {"rank": 0, "world_size": 1, "rendezvous": tmp_path, **options}
        return SenderAdapter(held.load_weights, held.parameters, SPACE, **arguments)  # type: ignore[arg-type]

    with pytest.raises(UsageError, match=r"transport 'rdma'"):
        make(transport="rdma")
    with pytest.raises(UsageError, match=r"verify is 'maybe'; expected 'digest', 'full' or 'off'"):
        make(verify="maybe")
    with pytest.raises(UsageError, match=r"rank 3 of world_size 1"):
        make(rank=3)
    with pytest.raises(UsageError, match=r"transport None is not available"):
        make(transport=None)
    with pytest.raises(UsageError, match=r"checkpoint is a NoneType; expected a folder"):
        SenderAdapter(held.load_weights, held.parameters, None, rank=0, world_size=1, rendezvous=tmp_path)  # type: ignore[arg-type]
    for deadline_s in (0, -1, float("inf"), float("nan"), "3", None, True):
        with pytest.raises(UsageError, match=r"deadline_s is"):
            make(deadline_s=deadline_s)
    sender = make()
    try:
        with pytest.raises(UsageError, match=r"version is 'one'"):
            sender.send_weights("one")  # type: ignore[arg-type]
        with pytest.raises(
            UsageError, match=r"version is 1099511627776; expected an integer of at least 0 and at most"
        ):
            sender.send_weights(1 << 40)
        with pytest.raises(UsageError, match=r"metadata cannot travel"):
            sender.send_weights(1, metadata=object())  # type: ignore[arg-type]
        for path, words in ((tmp_path, "a file in a folder"), (tmp_path / "none" / "t.json", "a folder that exists")):
            with pytest.raises(UsageError, match=rf"trace is .*{words}"):
                sender.send_weights(1, trace=path)
        for engines in ([], None):
            with pytest.raises(UsageError, match=r"at least one engine"):
                sender.connect(engines)  # type: ignore[arg-type]
        for name in ("a/b", "", "\ud800", "n" * 200):
            with pytest.raises(UsageError, match=r"engine name .*: expected a short name"):
                sender.connect([name])
        for engines in (5.0, [None], [b"a"], True):
            with pytest.raises(UsageError, match=r"engines is .*; expected names"):
                sender.connect(engines)  # type: ignore[arg-type]
        for allowed in (5.0, [None]):
            with pytest.raises(UsageError, match=r"allow_partial is .*; expected names"):
                sender.connect(["a"], allow_partial=allowed)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"topology is a int; expected a Topology"):
            sender.connect(["a"], topology=5)  # type: ignore[arg-type]
        for buffer_bytes in (0, 1.5, 1 << 60):
            with pytest.raises(UsageError, match=r"buffer_bytes is .*; expected an integer"):
                sender.connect(["a"], buffer_bytes=buffer_bytes)  # type: ignore[arg-type]
    finally:
        sender.close()


def test_a_result_waits_for_a_time_and_its_trace_is_no_reason_to_lose_the_report(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect(allow_partial=None)
        folder = tmp_path / "traces"
        folder.mkdir()
        pending = crew.senders[0].send_weights(1, trace=folder / "t.json")
        for timeout_s in (-1, "3", float("nan"), float("inf"), 1e308):
            with pytest.raises(UsageError, match=r"timeout_s is .*; expected seconds of at least zero"):
                pending.result(timeout_s=timeout_s)  # type: ignore[arg-type]
        folder.rmdir()
        with pytest.raises(
            UsageError, match=r"version 1 is confirmed by every engine, but its trace cannot be written"
        ):
            pending.result()
        assert pending.result().version == 1


def test_weights_of_versions_differ() -> None:
    assert not same_bits(weights(1), weights(2))
