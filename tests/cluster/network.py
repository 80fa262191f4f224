"""A cluster on one machine: nodes are network namespaces, joined by a bridge, each with a link of its own speed.

Every node has one interface, ``eth0``, with an address of its own. A token bucket on it limits what leaves the node,
another on the bridge's side of the cable what enters it. The bridge stands in a namespace of its own, so nothing of
the machine's own network is touched. All of it goes with its namespaces, which are removed when the block is left,
however it is left; those that a killed process left behind are removed when the next cluster is made.

    with Cluster([NodeSpec(50e6, 50e6)] * 4) as cluster:              # bytes a second, out of and into each node
        process = cluster.spawn(2, [sys.executable, "-m", "some.module"])
        print(cluster.address(2), cluster.counters(2).received_bytes)

It needs Linux, root, ``ip`` and ``tc``; `why_not` says what is missing. Latency and loss come from netem, where the
kernel has it (`has_netem`).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

_PREFIX = "transload"
_NETNS = Path("/run/netns")


class NodeSpec(NamedTuple):
    """One node's link, in payload and headers alike."""

    egress_bytes_per_s: float
    ingress_bytes_per_s: float
    delay_s: float = 0.0
    loss: float = 0.0


class Counters(NamedTuple):
    """What has passed a node's interface since it was made, headers included."""

    sent_bytes: int
    received_bytes: int


class Shaping(NamedTuple):
    """How links are limited; the defaults are explained in docs/cluster.md."""

    burst_bytes: int = 128 << 10
    queue_bytes: int = 4 << 20
    congestion_control: str = "reno"
    mtu: int = 9000


def why_not() -> str:
    """Why no cluster can be made here; empty if one can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 are not installed"
    probe = f"{_PREFIX}-probe-{os.getpid()}"
    for command in (
        f"ip netns add {probe}",
        f"ip -n {probe} link add left type veth peer name right",
        f"ip -n {probe} link add between type bridge",
        f"tc -n {probe} qdisc add dev left root tbf rate 1mbit burst 64kb limit 1mb",
    ):
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            break
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return f"`{command}` says: {done.stderr.strip()}" if done.returncode else ""


def has_netem() -> bool:
    """Whether the kernel can delay and lose packets."""
    probe = f"{_PREFIX}-probe-{os.getpid()}"
    _run(f"ip netns add {probe}")
    try:
        command = f"tc -n {probe} qdisc add dev lo root netem delay 1ms"
        return subprocess.run(command.split(), capture_output=True, check=False).returncode == 0
    finally:
        _run(f"ip netns del {probe}")


class Cluster:
    """Nodes and the wires between them, for the time of a ``with`` block.

    Parameters
    ----------
    nodes
        One entry a node; node k has the address ``10.77.0.(k + 1)``.
    shaping
        How links are limited.

    Raises
    ------
    RuntimeError
        What a command said that failed; nothing stays behind.
    """

    def __init__(self, nodes: Sequence[NodeSpec], shaping: Shaping = Shaping()) -> None:  # noqa: B008 - a frozen value
        self.nodes = tuple(nodes)
        self._shaping = shaping
        self._processes: list[subprocess.Popen[bytes]] = []
        self._cleanup = ExitStack()

    def __enter__(self) -> Cluster:
        remove_leftovers()
        self._cleanup.callback(self._remove)
        # A terminated run must tidy up too; Ctrl-C raises by itself.
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, _raise_exit)
            self._cleanup.callback(signal.signal, signal.SIGTERM, before)
        try:
            self._make()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    def address(self, node: int) -> str:
        """A node's address."""
        return f"10.77.0.{node + 1}"

    def namespace(self, node: int) -> str:
        """The file of a node's network namespace, for processes that enter it by themselves."""
        return str(_NETNS / self._name(node))

    def cut(self, node: int) -> None:
        """Unplug a node's cable; its processes are told nothing."""
        _run(f"ip -n {self._name(None)} link set port{node} down")

    def mend(self, node: int) -> None:
        """Plug it in again."""
        _run(f"ip -n {self._name(None)} link set port{node} up")

    def counters(self, node: int) -> Counters:
        """Bytes that left and entered a node so far, as its interface counts them."""
        path = "/sys/class/net/eth0/statistics"
        text = _run(f"ip netns exec {self._name(node)} cat {path}/tx_bytes {path}/rx_bytes")
        sent, received = (int(line) for line in text.split())
        return Counters(sent, received)

    def spawn(self, node: int, command: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
        """Start a process on a node; it is killed when the cluster goes. Options are `subprocess.Popen`'s."""
        inside = ["ip", "netns", "exec", self._name(node), *command]
        process: subprocess.Popen[bytes] = subprocess.Popen(inside, **options)  # type: ignore[call-overload]
        self._processes.append(process)
        return process

    def _make(self) -> None:
        hub = self._name(None)
        _run(f"ip netns add {hub}")
        _run(f"ip -n {hub} link add br0 type bridge")
        _run(f"ip -n {hub} link set br0 mtu {self._shaping.mtu} up")
        for number, spec in enumerate(self.nodes):
            name, port = self._name(number), f"port{number}"
            _run(f"ip netns add {name}")
            _run(f"ip -n {hub} link add {port} type veth peer name eth0 netns {name}")
            for space, device in ((hub, port), (name, "eth0"), (name, "lo")):
                mtu = "" if device == "lo" else f"mtu {self._shaping.mtu} "
                _run(f"ip -n {space} link set {device} {mtu}up")
            _run(f"ip -n {hub} link set {port} master br0")
            _run(f"ip -n {name} address add {self.address(number)}/24 dev eth0")
            _write_sysctl(name, "net/ipv4/tcp_congestion_control", self._shaping.congestion_control)
            self._limit(name, "eth0", spec.egress_bytes_per_s, spec.delay_s, spec.loss)
            self._limit(hub, port, spec.ingress_bytes_per_s, 0.0, 0.0)

    def _limit(self, space: str, device: str, bytes_per_s: float, delay_s: float, loss: float) -> None:
        bits, shaping = round(bytes_per_s * 8), self._shaping
        _run(
            f"tc -n {space} qdisc add dev {device} root handle 1: tbf rate {bits}bit "
            f"burst {shaping.burst_bytes} limit {shaping.queue_bytes}"
        )
        if delay_s or loss:
            _run(
                f"tc -n {space} qdisc add dev {device} parent 1: netem delay {delay_s * 1e6:.0f}us "
                f"loss {loss * 100}% limit 100000"
            )

    def _remove(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        for node in (*range(len(self.nodes)), None):
            subprocess.run(["ip", "netns", "del", self._name(node)], capture_output=True, check=False)

    def _name(self, node: int | None) -> str:
        return f"{_PREFIX}-{os.getpid()}-{'hub' if node is None else node}"


def remove_leftovers() -> None:
    """Remove namespaces of processes that are gone."""
    for path in _NETNS.glob(f"{_PREFIX}-*") if _NETNS.is_dir() else ():
        pid = path.name.split("-")[1]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _write_sysctl(space: str, name: str, value: str) -> None:
    script = f"echo {value} > /proc/sys/{name}"
    done = subprocess.run(["ip", "netns", "exec", space, "sh", "-c", script], capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} = {value}: {done.stderr.decode().strip()}")


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{command}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
