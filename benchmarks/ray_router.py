"""The service with Ray's own PrefixCacheAffinityRouter in the place of the ingress's choice; all else is the product's.

Serve routes handle calls, and our requests take links. So before a request is sent, its prompt goes through Serve's
handle, where Ray's router chooses as it would for Ray's own servers; the call stays at the replica for as long as the
answer takes, which is what that router counts as load, and the request follows it over the link. The router's text is
one character a token. Its settings are its defaults.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from sgray.config import Config, KeyHashes, environment_keys
from sgray.errors import OverloadedError
from sgray.protocol import Delta, Request
from sgray.serve import build as product
from sgray.serve.dispatch import Dispatcher, _Member
from sgray.serve.ingress import Ingress
from sgray.serve.moves import Journey
from sgray.serve.replica import LLMReplica
from sgray.serve.router import Ticket
from sgray.serve.table_router import TableRouter

ABOVE_SURROGATES = 0x10000  # every token is a character from here on
TREE_NAME = "LlmPrefixTreeActor"


@dataclass(frozen=True)
class Prompt:
    """What Ray's router looks for in the arguments of a call."""

    prompt: str


class PrefixTable(PrefixCacheAffinityRouter, TableRouter):
    """Chooses as Ray's router, and publishes the replicas as ours: both follow the same updates."""


class HoldingReplica(LLMReplica):
    """The replica, to which calls may come that only count."""

    async def hold(self, prompt: Prompt) -> AsyncIterator[str]:
        """This replica's name, and then nothing until the caller goes."""
        yield serve.get_replica_context().replica_id.unique_id
        await asyncio.Event().wait()


class HoldingDispatcher(Dispatcher):
    """Sends each request to the replica at which its call through the handle is held."""

    def __init__(self, replicas: DeploymentHandle, **options: Any) -> None:
        super().__init__(**options)
        self._hold = replicas.options(method_name="hold", stream=True)
        self._chosen: dict[str, str] = {}  # request -> replica

    async def submit(self, request: Request) -> AsyncGenerator[Delta, None]:
        """As the dispatcher's; the call is held until the answer has ended."""
        held = self._hold.remote(Prompt("".join(chr(ABOVE_SURROGATES + token) for token in request.tokens)))
        try:
            self._chosen[request.id] = await anext(held)
            async with contextlib.aclosing(super().submit(request)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._chosen.pop(request.id, None)
            held.cancel()

    async def _placed(self, journey: Journey, busy: Mapping[str, OverloadedError]) -> tuple[_Member, Ticket] | None:
        chosen = self._chosen[journey.request.id]
        refused = OverloadedError("Ray's router chose another replica")
        return await super()._placed(journey, {**{name: refused for name in self._members if name != chosen}, **busy})


class HoldingIngress(Ingress):
    """The ingress over that dispatcher."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, values: dict[str, Any], replicas: DeploymentHandle, keys: KeyHashes
    ) -> None:
        from sgray.serve import ingress

        ingress.Dispatcher = functools.partial(HoldingDispatcher, replicas)  # type: ignore[assignment,misc]
        await super().__init__(values, replicas, keys)


def build(args: Mapping[str, Any]) -> Application:
    """The application, from the values of a `Config`."""
    config = Config.parse(args)
    _forget_tree()
    router = RequestRouterConfig(request_router_class=PrefixTable)
    options = product._replica_options(config) | {"request_router_config": router}
    values = config.model_dump()
    replicas = serve.deployment(HoldingReplica, **options).bind(values)
    ingress = serve.deployment(serve.ingress()(HoldingIngress), **product._ingress_options(config))
    values["serve"]["num_ingress_replicas"] = 1  # routers share what they have seen, and ours do not
    application: Application = ingress.bind(values, replicas, environment_keys())
    return application


def _forget_tree() -> None:
    """Ray's tree outlives the application, and would still choose replicas that went with it."""
    namespace = f"serve::{product.APP_NAME}::{product.REPLICA_DEPLOYMENT}"
    with contextlib.suppress(ValueError):  # there is none yet
        ray.kill(ray.get_actor(TREE_NAME, namespace=namespace))
