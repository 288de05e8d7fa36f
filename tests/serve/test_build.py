"""From `args:` to an application, without a cluster: what is refused, and what Serve is told."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

import serve_app
from sgray.config import Config, KeyHashes
from sgray.errors import ConfigError
from sgray.serve.build import build
from sgray.serve.ingress import Ingress
from sgray.serve.placement import actor_options, group_options
from sgray.serve.replica import LLMReplica

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_cluster() -> Iterator[None]:
    """Building must not start anything."""
    was_up = ray.is_initialized()
    yield
    assert ray.is_initialized() == was_up


def deployments(args: dict[str, Any]) -> dict[str, Any]:
    """The two deployments by name."""
    ingress = build(args)._bound_deployment
    replica = ingress.init_args[1]._bound_deployment
    return {ingress.name: ingress, replica.name: replica}


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        pytest.param({"modle": {}}, ["modle", "did you mean 'model'", "serve"], id="section"),
        pytest.param({"parallel": {"tensor_paralel_size": 1}}, ["parallel.tensor_paralel_size", "tp_size"], id="leaf"),
        pytest.param({"parallel": {"dp_size": 2}}, ["parallel.dp_size", "serve.min_replicas", "num_replicas"], id="dp"),
        pytest.param(
            {"parallel": {"tp_size": 6, "nnodes": 4}}, ["nnodes (4)", "tp_size (6)", "1, 2, 3, 6"], id="nnodes"
        ),
        pytest.param(
            {"model": {"device": "cpu"}, "parallel": {"tp_size": 3, "nnodes": 3}, "serve": {"num_cpus_per_replica": 0}},
            ["serve.num_cpus_per_replica", "parallel.nnodes"],
            id="nodes without a reservation",
        ),
        pytest.param({"serve": {"num_replica": 2}}, ["serve.num_replica", "min_replicas"], id="replicas"),
        pytest.param({"serve": {"max_ongoing_requests": 2}}, ["serve.max_ongoing_requests", "Allowed"], id="ongoing"),
        pytest.param({"serve": {"min_replicas": 3, "max_replicas": 2}}, ["min_replicas (3)", "(2)"], id="order"),
        pytest.param({"serve": {"max_replicas": "many"}}, ["serve.max_replicas", "many"], id="type"),
        pytest.param({"serve": {"routing_policy": "best"}}, ["serve.routing_policy", "round_robin"], id="choice"),
        pytest.param({"model": {"dtype": "int4"}}, ["model.dtype", "bfloat16"], id="dtype"),
        pytest.param({"model": {"model_path": "/no/such/dir"}}, ["model.model_path", "/no/such/dir"], id="path"),
        pytest.param({"model": "smollm2"}, ["model"], id="section of the wrong type"),
    ],
)
def test_pub_132_wrong_values_are_refused_with_their_place(args: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(args)
    for part in parts:
        assert part in str(caught.value)


def test_ranks_that_cannot_share_the_heads_are_refused_before_anything_starts(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="7"):
        build({"model": {"model_path": str(model_dir)}, "parallel": {"tp_size": 7}})


def test_experts_that_a_model_lacks_are_refused_before_anything_starts(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"ep_size 3 .*LlamaForCausalLM has none"):
        build({"model": {"model_path": str(model_dir)}, "parallel": {"tp_size": 3, "ep_size": 3}})


@pytest.mark.usefixtures("model_dir")
def test_a_model_that_is_here_by_name_is_looked_at_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"tp_size 2 does not fit.*9 query heads.*Sizes that fit: 1, 3"):
        build({"parallel": {"tp_size": 2}})


def test_an_empty_configuration_is_the_default_service() -> None:
    found = deployments({})
    assert set(found) == {"Ingress", "LLMReplica"}
    assert found["LLMReplica"].func_or_class is LLMReplica
    assert issubclass(found["Ingress"].func_or_class, Ingress)
    assert found["LLMReplica"].init_args == (Config().model_dump(),)


def test_keys_of_whoever_deploys_reach_the_ingress_as_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGRAY_API_KEYS", "sk-secret")
    ingress, replica = deployments({})["Ingress"], deployments({})["LLMReplica"]
    assert KeyHashes(api=(hashlib.sha256(b"sk-secret").hexdigest(),)) in ingress.init_args
    assert "sk-secret" not in repr((ingress.init_args, replica.init_args))
    monkeypatch.setenv("SGRAY_API_KEYS", ",")
    with pytest.raises(ConfigError, match="SGRAY_API_KEYS"):
        build({})


def test_serve_is_told_what_the_configuration_says() -> None:
    values = {
        "min_replicas": 2,
        "max_replicas": 5,
        "num_ingress_replicas": 3,
        "target_ongoing_requests": 7.0,
        "upscale_delay_s": 1.0,
        "downscale_delay_s": 2.0,
        "graceful_shutdown_timeout_s": 11.0,
        "health_check_period_s": 3.0,
        "num_cpus_per_replica": 0.25,
        "num_cpus_per_ingress": 0.125,
    }
    found = deployments({"serve": values})
    replica, ingress = found["LLMReplica"], found["Ingress"]
    scaling = replica._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 7.0)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (1.0, 2.0)
    assert replica.ray_actor_options["num_cpus"] == 0.25
    assert replica.ray_actor_options["num_gpus"] == 0
    assert ingress.ray_actor_options["num_cpus"] == 0.125
    assert ingress.num_replicas == 3
    for deployment in (replica, ingress):
        assert deployment._deployment_config.graceful_shutdown_timeout_s == 11.0
        assert deployment._deployment_config.health_check_period_s == 3.0


def test_a_cuda_replica_reserves_its_gpu() -> None:
    assert deployments({"model": {"device": "cuda"}})["LLMReplica"].ray_actor_options["num_gpus"] == 1


@pytest.mark.parametrize(("device", "num_gpus"), [("cuda", 3), ("cpu", 0)])
def test_a_replica_reserves_what_all_of_its_ranks_need(device: str, num_gpus: int) -> None:
    args = {"model": {"device": device}, "parallel": {"tp_size": 3}, "serve": {"num_cpus_per_replica": 0.5}}
    options = deployments(args)["LLMReplica"].ray_actor_options
    assert (options["num_cpus"], options["num_gpus"]) == (1.5, num_gpus)


@pytest.mark.parametrize(("device", "bundle"), [("cuda", {"CPU": 1.5, "GPU": 3.0}), ("cpu", {"CPU": 1.5})])
def test_a_replica_of_several_nodes_reserves_a_bundle_on_each(device: str, bundle: dict[str, float]) -> None:
    parallel = {"tp_size": 9, "nnodes": 3}
    args = {"model": {"device": device}, "parallel": parallel, "serve": {"num_cpus_per_replica": 0.5}}
    config = Config.parse(args)  # a whole build would look for the nodes in the cluster that there may be
    asked = {"placement_group_bundles": [bundle] * 3, "placement_group_strategy": "STRICT_SPREAD"}
    assert group_options(config) == asked
    assert actor_options(config) == {"num_cpus": 1.5, "num_gpus": bundle.get("GPU", 0)}


def test_streams_may_finish_for_longer_than_an_ordinary_generation_takes() -> None:
    assert deployments({})["LLMReplica"]._deployment_config.graceful_shutdown_timeout_s >= 300


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("[st]*.yaml")), ids=lambda path: path.name)
def test_every_shipped_configuration_is_accepted(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    schema = ServeDeploySchema.model_validate(content)
    assert [app.import_path for app in schema.applications] == ["serve_app:build"] * len(schema.applications)
    for app in content["applications"]:
        serve_app.build(app.get("args", {}))


def test_the_default_configuration_stays_on_this_machine() -> None:
    content = yaml.safe_load((ROOT / "configs/serve.yaml").read_text())
    assert content["http_options"]["host"] == "127.0.0.1"
    assert content["applications"][0]["name"] == "sgray"
