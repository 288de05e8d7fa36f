"""From the `args:` of a Serve configuration file to the application: an ingress in front of engine replicas."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from sgray.config import Config, ServeConfig, environment_keys, num_ingresses
from sgray.errors import ConfigError
from sgray.models.hub import held_model
from sgray.models.spec import served_spec
from sgray.serve.autoscale import EngineSignals, replicas_for_ongoing_requests
from sgray.serve.batches.batches import batches_directory
from sgray.serve.ingress import Ingress
from sgray.serve.placement import actor_options, alive_nodes, check_nodes, gpus_per_node, group_options
from sgray.serve.replica import LLMReplica
from sgray.serve.table_router import TableRouter
from sgray.serve.tracing import check_tracing

APP_NAME = "sgray"
REPLICA_DEPLOYMENT = "LLMReplica"
INGRESS_DEPLOYMENT = "Ingress"

REPORT_S, LOOK_BACK_S = 1.0, 5.0
DEFAULT_ONGOING_REQUESTS = 32.0
NO_LIMIT = 1_000_000  # the engine's queue is the limit; Serve's would count streams that Serve cannot see


def build(args: Mapping[str, Any]) -> Application:
    """The application for these values of a `Config`. Raises ConfigError before anything starts."""
    config = Config.parse(args)
    _check_model(config)
    _check_batches(config)
    check_tracing(config)
    check_nodes(config)
    values = config.model_dump()
    replicas = serve.deployment(LLMReplica, **_replica_options(config)).bind(values)
    ingress = serve.deployment(serve.ingress()(Ingress), **_ingress_options(config))
    resolved = values | {"serve": values["serve"] | {"num_ingress_replicas": _num_ingresses(config)}}
    application: Application = ingress.bind(resolved, replicas, environment_keys())
    return application


def _replica_options(config: Config) -> dict[str, Any]:
    options = config.serve
    return {
        "name": REPLICA_DEPLOYMENT,
        "ray_actor_options": actor_options(config),
        **group_options(config),
        "autoscaling_config": _autoscaling(options),
        "request_router_config": RequestRouterConfig(request_router_class=TableRouter),
        "max_ongoing_requests": NO_LIMIT,
        "health_check_period_s": options.health_check_period_s,
        "graceful_shutdown_timeout_s": options.graceful_shutdown_timeout_s,
    }


def _autoscaling(options: ServeConfig) -> AutoscalingConfig:
    with warnings.catch_warnings():
        # Serve would rather have the interval in the environment of every node; until then the field is what counts.
        warnings.filterwarnings("ignore", "The `metrics_interval_s` field", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=options.target_ongoing_requests or DEFAULT_ONGOING_REQUESTS,
            upscale_delay_s=options.upscale_delay_s,
            downscale_delay_s=options.downscale_delay_s,
            metrics_interval_s=REPORT_S,
            look_back_period_s=LOOK_BACK_S,
            policy=_policy(options),
        )


def _policy(options: ServeConfig) -> AutoscalingPolicy:
    if options.autoscaling_policy == "requests":
        return AutoscalingPolicy(policy_function=replicas_for_ongoing_requests)
    targets = {
        "target_ttft_s": options.target_ttft_s,
        "target_ongoing_requests": options.target_ongoing_requests,
    }
    return AutoscalingPolicy(policy_function=EngineSignals, policy_kwargs=targets)


def _ingress_options(config: Config) -> dict[str, Any]:
    options = config.serve
    return {
        "name": INGRESS_DEPLOYMENT,
        "num_replicas": _num_ingresses(config),
        "ray_actor_options": {"num_cpus": options.num_cpus_per_ingress},
        "max_ongoing_requests": NO_LIMIT,
        "health_check_period_s": options.health_check_period_s,
        "graceful_shutdown_timeout_s": options.graceful_shutdown_timeout_s,
    }


def _num_ingresses(config: Config) -> int:
    wanted = config.serve.num_ingress_replicas
    return num_ingresses(has_gpus=gpus_per_node(config) > 0) if wanted == "auto" else wanted


def _check_batches(config: Config) -> None:
    """Refuse several ingresses over several nodes: each node would have a database of its own."""
    if batches_directory(config) is None:
        return
    num_nodes = len(alive_nodes())
    if num_nodes > 1 and _num_ingresses(config) > 1:
        raise ConfigError(
            f"batches.batches_dir: the database of batches is a file, which ingresses on {num_nodes} nodes "
            "cannot share; set serve.num_ingress_replicas to 1, or leave batches_dir out"
        )


def _check_model(config: Config) -> None:
    """What can be known about the model without fetching it, and that this release can serve it so."""
    name = config.model.model_path
    if (path := held_model(name, revision=config.model.revision)) is not None:
        served_spec(path, config)
    elif name.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"model.model_path: there is no directory {name!r}")
