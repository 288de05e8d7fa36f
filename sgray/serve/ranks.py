"""Ranks on other nodes than the replica's: an actor a node, in the replica's placement group, called once for life.

Ray starts these actors, gives them their GPUs and ends them with the replica. No plan comes this way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sgray.config import Config
from sgray.engine.host import host_ranks
from sgray.engine.nodes import Invitation
from sgray.errors import EngineError
from sgray.serve.placement import actor_options

logger = logging.getLogger(__name__)


class RankHost:
    """The actor: the ranks of its node."""

    def run(self, invitation: Invitation) -> str:
        """Returns when they have ended, with the reason."""
        reason = host_ranks(invitation)
        logger.info("the ranks of this node have ended: %s", reason)
        return reason


class FurtherNodes:
    """The nodes of this replica's placement group, its own apart. Make it in the replica's process."""

    def __init__(self, config: Config) -> None:
        self._options = actor_options(config)
        self._group = ray.util.get_current_placement_group()
        self._hosts: list[Any] = []  # an actor ends when its last handle is gone
        self._runs: list[ray.ObjectRef] = []
        if self._group is None:
            raise EngineError("this replica has no placement group, so it cannot start ranks on other nodes")

    @property
    def address(self) -> str:
        """Where the other nodes reach this one."""
        return str(ray.util.get_node_ip_address())

    def invite(self, invitations: Sequence[Invitation]) -> None:
        """Start an actor for each, in bundle 1 and up."""
        for bundle, invitation in enumerate(invitations, start=1):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            host = ray.remote(RankHost).options(**self._options, max_restarts=0, scheduling_strategy=place).remote()
            self._hosts.append(host)
            self._runs.append(host.run.remote(invitation))

    def problem(self) -> str | None:
        """Why a host has ended already, if one has."""
        ended, _ = ray.wait(self._runs, timeout=0)
        if not ended:
            return None
        try:
            return str(ray.get(ended[0]))
        except ray.exceptions.RayError as error:
            return str(error).strip().splitlines()[-1]
