"""The request router that Serve runs in each process with a handle: it tells the process's replica table what it sees.

Serve copies this module by value into its configuration, so it may hold no state and imports what it uses inside of
the methods: what it imported at the top would be a second copy.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class TableRouter(RequestRouter):
    """Publishes the replicas; ordinary handle calls, which are control calls alone, go to any of them."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve with all replicas whenever one comes, goes or changes."""
        from sgray.serve.table import table_of

        super().update_replicas(replicas)
        table = table_of(self._deployment_id.app_name, self._deployment_id.name)
        table.replace([(replica.replica_id.unique_id, replica.replica_metadata) for replica in replicas])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One rank with all candidates: Serve takes the one with the shortest queue."""
        return [candidate_replicas]
