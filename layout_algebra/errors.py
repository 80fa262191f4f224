"""Every error this package raises, under one root.

::

    LayoutError
    +-- SpaceError            a checkpoint that cannot be numbered, or a name or id outside it
    +-- UnsupportedDtypeError a dtype this version cannot carry or probe
    +-- MapError              a source map that contradicts itself or the checkpoint
    |   +-- MapBytesError     bytes that are no source map
    +-- CorrespondenceError   maps that cannot be matched: another checkpoint, a holder that is too narrow
    |   +-- CorrespondenceBytesError  bytes that are no correspondence
    +-- FormulaError          maps that no formula fits, or a formula that means nothing for a rank
    +-- ProbeError            discovery could not finish; every parameter has its own bits again
        +-- LoaderRaisedError       the loader's own exception is chained
        +-- LoaderWroteNothingError no parameter changed under any pass
        +-- ParameterReplacedError  the live tensors changed under the probe's hands
        +-- TracingError            an operation of the loader that cannot be followed
"""


class LayoutError(Exception):
    """Root of every error of ``layout_algebra``."""


class SpaceError(LayoutError):
    """A checkpoint space that cannot exist, or a name or id that is not in it."""


class UnsupportedDtypeError(LayoutError):
    """A dtype that this version cannot carry or probe; the message names the tensor."""


class MapError(LayoutError):
    """A source map that contradicts itself or the checkpoint it is about."""


class MapBytesError(MapError):
    """Bytes that are not a source map of this version, or are truncated or altered."""


class CorrespondenceError(LayoutError):
    """Maps that cannot be matched, such as maps of two different checkpoints."""


class CorrespondenceBytesError(CorrespondenceError):
    """Bytes that are not a correspondence of this version, or are truncated or altered."""


class FormulaError(LayoutError):
    """Maps that no formula fits, a formula that means nothing for a rank, or bytes that are no formulas."""


class ProbeError(LayoutError):
    """Discovery could not finish. Every parameter and buffer has its own bits again."""


class LoaderRaisedError(ProbeError):
    """``load_weights`` raised under probe values; the original exception is chained."""


class LoaderWroteNothingError(ProbeError):
    """``load_weights`` returned normally and no parameter element came from the checkpoint."""


class ParameterReplacedError(ProbeError):
    """The live tensors changed between passes in a way the probe cannot follow."""


class TracingError(ProbeError):
    """``load_weights`` did something that tracing cannot follow; the message names operation, tensor and line."""
