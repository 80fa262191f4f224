"""Every error this package raises, under one root.

::

    TransferError
    +-- TopologyError        a cluster that cannot exist; names the worker, node or link, and the place in its file
    +-- PlanError            no lawful plan, or a plan that breaks a law; names class, tensor, range and ranks
    |   +-- UnheldError      somebody needs elements that nobody holds
    |   +-- BudgetError      the buffer cannot hold one element
    |   +-- PlanBytesError   bytes that are no plan
    +-- ProgramError         a program that does not fit the memory or the map it is bound to
    +-- TransportError       a region, peer or write that failed; names the peer and what it said
    |   +-- PeerGoneError    the peer has closed, died or restarted since it was connected
    |   +-- UnreadableError  a peer whose memory this process is not allowed to read
    |   +-- UnmappableError  a peer whose shared memory this process cannot map
    +-- DeadlineError        a wait that ended; names version, phase, round and rank
    +-- ReportError          a measure whose events are missing or contradict each other
"""


class TransferError(Exception):
    """Root of every error of ``transfer_exec``."""


class TopologyError(TransferError):
    """A cluster description that contradicts itself."""


class PlanError(TransferError):
    """No lawful plan exists, or a plan breaks one of its laws."""


class UnheldError(PlanError):
    """A needed element has no holder."""


class BudgetError(PlanError):
    """The buffer budget cannot hold a single element."""


class PlanBytesError(PlanError):
    """Bytes that are not a plan of this version, or are truncated or altered."""


class ProgramError(TransferError):
    """A program that does not fit the memory it is bound to."""


class TransportError(TransferError):
    """A registration, a write or a peer failed."""


class PeerGoneError(TransportError):
    """A peer has closed, died or restarted since it was connected."""


class UnreadableError(TransportError):
    """The system does not let this process read a peer's memory."""


class UnmappableError(TransportError):
    """A peer has memory in a file that this process cannot open or map."""


class DeadlineError(TransferError):
    """A wait reached its deadline."""


class ReportError(TransferError):
    """A measure cannot be computed: an event is missing or contradicts another."""
