"""Which RDMA devices a filter means.

>>> choose_devices(["mlx5_0", "mlx5_1", "mlx5_10", "irdma0"], "mlx5_1")
('mlx5_1', 'mlx5_10')
>>> choose_devices(["mlx5_0", "mlx5_1", "mlx5_10", "irdma0"], "=mlx5_1")
('mlx5_1',)
>>> choose_devices(["mlx5_0", "mlx5_1", "mlx5_10", "irdma0"], "^mlx5_0,irdma")
('mlx5_1', 'mlx5_10')
"""

from __future__ import annotations

from collections.abc import Iterable

from transfer_exec.errors import TransportError


def choose_devices(available: Iterable[str], wanted: str) -> tuple[str, ...]:
    """The devices that a filter leaves, in the order given.

    Parameters
    ----------
    available
        Names of this machine's devices.
    wanted
        Names separated by commas, each the beginning of a device's name; after ``=`` whole names. After ``^`` those
        devices are left out and all others meant. Empty, ``=`` and ``^`` alone mean all.

    Raises
    ------
    TransportError
        If no device is left, naming what there is.
    """
    names = tuple(available)
    left_out = wanted.startswith("^")
    listed = wanted[1:] if left_out else wanted
    whole = listed.startswith("=")
    parts = [part.strip() for part in (listed[1:] if whole else listed).split(",") if part.strip()]
    if not parts:
        chosen = names
    else:
        meant = [n for n in names if (n in parts if whole else n.startswith(tuple(parts)))]
        chosen = tuple(name for name in names if (name in meant) != left_out)
    if not chosen:
        raise TransportError(
            f"no RDMA device is meant by {wanted!r}; this machine has {', '.join(names) or 'none'}; names are "
            "separated by commas and may be shortened, '=' asks for whole names, '^' leaves devices out"
        )
    return chosen
