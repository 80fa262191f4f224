"""Where checkpoint elements live, as values: numpy only, no torch.

Read in this order: ``space`` (elements get numbers), ``slice_copy`` (the atom), ``canonical`` (its normal form),
``source_map`` (what one worker holds), ``runs`` (sets of ids), ``correspondence`` (who holds what somebody needs),
``fingerprint`` (digests that no layout changes), ``symbolic`` (layouts as formulas in rank and degree; needs sympy, so
it is imported by its own name); ``residues``, ``diff2`` and ``recover`` are how a map is found.
"""

from layout_algebra.correspondence import Correspondence, DemandClass, correspond
from layout_algebra.errors import (
    CorrespondenceBytesError,
    CorrespondenceError,
    FormulaError,
    LayoutError,
    LoaderRaisedError,
    LoaderWroteNothingError,
    MapBytesError,
    MapError,
    ParameterReplacedError,
    ProbeError,
    SpaceError,
    UnsupportedDtypeError,
)
from layout_algebra.fingerprint import fingerprint, fingerprint_cells
from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable, SliceCopy, Strided
from layout_algebra.source_map import Coverage, ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec

__all__ = [
    "CheckpointSpace",
    "CopyTable",
    "Correspondence",
    "CorrespondenceBytesError",
    "CorrespondenceError",
    "Coverage",
    "DemandClass",
    "FormulaError",
    "LayoutError",
    "LoaderRaisedError",
    "LoaderWroteNothingError",
    "MapBytesError",
    "MapError",
    "ParameterMap",
    "ParameterReplacedError",
    "ProbeError",
    "RunTable",
    "SliceCopy",
    "SourceMap",
    "SpaceError",
    "Strided",
    "TensorSpec",
    "UnsupportedDtypeError",
    "correspond",
    "fingerprint",
    "fingerprint_cells",
]
