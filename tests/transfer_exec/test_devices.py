"""Which RDMA devices a filter means."""

from __future__ import annotations

from pathlib import Path

import pytest

from transfer_exec.errors import TransportError
from transfer_exec.transport.devices import choose_devices
from transfer_exec.transport.mooncake import MooncakeTransport

DEVICES = ("mlx5_0", "mlx5_1", "mlx5_10", "mlx4_0", "irdma0")


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("", DEVICES),
        ("^", DEVICES),
        ("=", DEVICES),
        ("^=", DEVICES),
        ("mlx5", ("mlx5_0", "mlx5_1", "mlx5_10")),
        ("mlx5_1", ("mlx5_1", "mlx5_10")),
        ("=mlx5_1", ("mlx5_1",)),
        ("=mlx5_1,mlx4_0", ("mlx5_1", "mlx4_0")),
        (" mlx4 , irdma ,", ("mlx4_0", "irdma0")),
        ("^mlx5_0", ("mlx5_1", "mlx5_10", "mlx4_0", "irdma0")),
        ("^mlx5_1", ("mlx5_0", "mlx4_0", "irdma0")),
        ("^=mlx5_1", ("mlx5_0", "mlx5_10", "mlx4_0", "irdma0")),
        ("^=mlx", DEVICES),
    ],
)
def test_filters(wanted: str, chosen: tuple[str, ...]) -> None:
    assert choose_devices(DEVICES, wanted) == chosen


@pytest.mark.parametrize("wanted", ["=mlx5", "bnxt", "^mlx,irdma", "=mlx5_1 0"])
def test_a_filter_that_leaves_nothing_is_refused(wanted: str) -> None:
    with pytest.raises(
        TransportError, match=r"no RDMA device is meant by .*; this machine has mlx5_0, mlx5_1, .*irdma0"
    ):
        choose_devices(DEVICES, wanted)


def test_a_machine_without_devices() -> None:
    with pytest.raises(TransportError, match="this machine has none"):
        choose_devices((), "")


def test_mooncake_refuses_a_filter_that_means_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DEVICES:
        (tmp_path / name).mkdir()
    monkeypatch.setattr("transfer_exec.transport.mooncake.RDMA", tmp_path)
    with pytest.raises(TransportError, match="no RDMA device is meant by '=mlx5'; this machine has irdma0, mlx4_0"):
        MooncakeTransport("a", "127.0.0.1", protocol="rdma", devices="=mlx5")
