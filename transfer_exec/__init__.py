"""Plans how bytes cross a cluster, and moves them.

The planning half is pure and needs no torch: a ``Topology`` and a ``Correspondence`` make a ``Plan``. The acting
half runs plans over transports.
"""

from transfer_exec.errors import (
    BudgetError,
    DeadlineError,
    PlanBytesError,
    PlanError,
    ProgramError,
    ReportError,
    TopologyError,
    TransferError,
    TransportError,
    UnheldError,
)
from transfer_exec.in_process import run_in_process
from transfer_exec.plan import Hop, Move, Plan, Route, Stage
from transfer_exec.planner import make_plan
from transfer_exec.report import TransferReport
from transfer_exec.simulate import Timeline, simulate
from transfer_exec.topology import ClusterLink, Engine, Nic, Node, Topology
from transfer_exec.traffic import Flow, Traffic

__all__ = [
    "BudgetError",
    "ClusterLink",
    "DeadlineError",
    "Engine",
    "Flow",
    "Hop",
    "Move",
    "Nic",
    "Node",
    "Plan",
    "PlanBytesError",
    "PlanError",
    "ProgramError",
    "ReportError",
    "Route",
    "Stage",
    "Timeline",
    "Topology",
    "TopologyError",
    "Traffic",
    "TransferError",
    "TransferReport",
    "TransportError",
    "UnheldError",
    "make_plan",
    "run_in_process",
    "simulate",
]
