"""A layout as formulas in rank ``r`` and degree ``d``: what every rank of a family holds, in one value.

>>> from layout_algebra.blocks import declare, whole
>>> from layout_algebra.shardings import fused_qkv
>>> from layout_algebra.source_map import SourceMap
>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> space = CheckpointSpace([TensorSpec(n, (rows, 64), "BF16") for n, rows in (("q", 512), ("k", 128), ("v", 128))])
>>> q, k, v = (whole(space, name) for name in "qkv")
>>> def rank_of(rank: int, degree: int) -> SourceMap:
...     return declare(space, {"qkv": fused_qkv(q, k, v, rank=rank, degree=degree, heads=32, kv_heads=8)})
>>> family = fit({(r, d): rank_of(r, d) for r, d in ((0, 2), (1, 2), (0, 4), (3, 4), (5, 16), (15, 16))})
>>> print(family.explain("qkv"))
qkv[0 : 512/d, :] = q[512*r/d : 512*(r+1)/d, :]
qkv[512/d : max(16,128/d)+512/d, :] = k[16*floor(8*r/d) : 16*floor(8*r/d)+max(16,128/d), :]
qkv[max(16,128/d)+512/d : 2*max(16,128/d)+512/d, :] = v[16*floor(8*r/d) : 16*floor(8*r/d)+max(16,128/d), :]
>>> family.instantiate(7, 8).same_as(rank_of(7, 8))
True

``fit`` finds the formulas from the maps of a few ranks and checks every one of them; ``instantiate`` gives any rank's
map, also of a cluster that does not exist; ``prove`` decides that all ranks together cover the checkpoint exactly once;
``explain`` prints a parameter. Formulas are sympy expressions (``formulas``).
"""

from __future__ import annotations

from layout_algebra.coverage_faults import Fault
from layout_algebra.symbolic_fit import fit
from layout_algebra.symbolic_map import SymbolicAxis, SymbolicCopy, SymbolicMap, SymbolicNames, SymbolicParameter
from layout_algebra.symbolic_proof import Proof

__all__ = [
    "Fault",
    "Proof",
    "SymbolicAxis",
    "SymbolicCopy",
    "SymbolicMap",
    "SymbolicNames",
    "SymbolicParameter",
    "fit",
]
