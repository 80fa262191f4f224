"""Meeting through a store of ``torch.distributed``: addresses only, since whoever reaches the store can read it.

Nothing else of ``torch.distributed`` is used: no process group, no collective. Under torchrun the launcher's own store
will do:

>>> from torch.distributed import TCPStore                                                       # doctest: +SKIP
>>> store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False) # doctest: +SKIP
>>> rendezvous = TorchStore(store, key=job_key("/home/me/run-17.key"), job="run-17")             # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, though not in __all__

from adapters.failures import RendezvousError, UsageError
from adapters.job_key import check_key
from adapters.rendezvous import address_towards, listening_host
from transfer_exec.errors import DeadlineError

__all__ = ["TorchStore"]

_LOOK_AGAIN_S = 0.05
_STORE_TIMEOUT = timedelta(seconds=10)


class TorchStore:
    """A store that all workers can reach.

    Parameters
    ----------
    store
        To a ``TCPStore`` a second connection is made, so that a wait in the given one holds nobody up here.
    key
        The job's key, the same for all workers, from `adapters.job_key`. It is never put into the store.
    job
        Records of another job are not seen, though they lie in the same store.
    host
        The address that this worker's peers reach it at; it listens there only. By default that of the interface which
        leads to a ``TCPStore``'s host; for any other store it must be given.

    Raises
    ------
    UsageError
        If the store is none, the key is none, or ``host`` is missing or means every interface.
    """

    def __init__(self, store: Store, *, key: str, job: str = "", host: str = "") -> None:
        if not isinstance(store, Store):
            raise UsageError(f"store is a {type(store).__name__}; expected a torch.distributed.Store")
        self._key = check_key(key)
        self._prefix = f"transload/{job}"
        self._store = store
        if isinstance(store, TCPStore):
            self._store = TCPStore(store.host, store.port, is_master=False, timeout=_STORE_TIMEOUT)
            host = host or address_towards(store.host, store.port)
        if not host:
            raise UsageError(f"a {type(store).__name__} does not tell which interface peers need; pass host=")
        self._host = listening_host(host)

    @property
    def key(self) -> str:
        """The key that was given."""
        return self._key

    def listen_address(self, name: str) -> str:
        """Any free port of the host."""
        return f"tcp://{self._host}:0"

    def publish(self, name: str, value: str) -> None:
        """Set the value."""
        try:
            self._store.set(self._at(name), value)
        except RuntimeError as error:
            raise RendezvousError(f"record of {name} cannot be put into the store: {error}") from error

    def withdraw(self, name: str, value: str) -> None:
        """Delete the value if it is still this one."""
        with contextlib.suppress(RuntimeError):  # if the store is gone, so is the record
            if self._there(name) == value:
                self._store.delete_key(self._at(name))

    def lookup(self, name: str, deadline_s: float) -> str:
        """Wait for the value to be there."""
        stop_at = time.monotonic() + deadline_s
        while True:
            try:
                found = self._there(name)
            except RuntimeError as error:
                raise RendezvousError(f"the store cannot be asked for {name}: {error}") from error
            if found is not None:
                return found
            if time.monotonic() >= stop_at:
                raise DeadlineError(f"rendezvous: nobody published {name} in the store within {deadline_s:g} s")
            time.sleep(_LOOK_AGAIN_S)

    def _there(self, name: str) -> str | None:
        at = self._at(name)
        # Asking first, since get() waits for a key that is not there.
        return bytes(self._store.get(at)).decode() if self._store.check([at]) else None

    def _at(self, name: str) -> str:
        return f"{self._prefix}/{name}"
