"""All nodes on this host, for where no network namespaces can be made: no cables, so none can be cut."""

from __future__ import annotations


class OneHost:
    """As `tests.cluster.network.Cluster`, without a network of its own."""

    def address(self, node: int) -> str:
        """The same for all nodes."""
        return "127.0.0.1"

    def namespace(self, node: int) -> str:
        """That of the parent."""
        return ""
