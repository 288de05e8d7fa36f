"""The manifests of other platforms: each has the platform's form, and what is inside is a service that can be built."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from sgray.launch_server import ray_defaults

ROOT = Path(__file__).parents[2]
# The fields of Anyscale's service configuration, as its reference names them.
ANYSCALE_FIELDS = {
    "name",
    "image_uri",
    "containerfile",
    "compute_config",
    "working_dir",
    "excludes",
    "requirements",
    "env_vars",
    "py_modules",
    "applications",
    "query_auth_token_enabled",
    "http_options",
    "grpc_options",
    "logging_config",
    "ray_gcs_external_storage_config",
    "tracing_config",
    "tags",
}


def closed(schema: Any) -> Any:
    """The schema with every object that names its properties closed to others, as a strict API server has it."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = {key: closed(value) for key, value in schema.items()}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        result.setdefault("additionalProperties", False)
        if "apiVersion" in schema["properties"]:
            result["properties"] = result["properties"] | {"metadata": {"type": "object"}}
    return result


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "configs/kuberay.yaml").read_text())
    return content


@pytest.fixture(scope="module")
def rayservice() -> jsonschema.Draft202012Validator:
    schema = json.loads((Path(__file__).parent / "rayservice_schema.json").read_text())
    return jsonschema.Draft202012Validator(closed(schema))


def built(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the one application, once Serve's schema has accepted it and it could be built."""
    (app,) = ServeDeploySchema.model_validate(config).applications
    module, _, name = app.import_path.partition(":")
    getattr(importlib.import_module(module), name)(app.args)
    return app.args


def test_the_kuberay_manifest_is_a_rayservice(
    manifest: dict[str, Any], rayservice: jsonschema.Draft202012Validator
) -> None:
    assert [error.message for error in rayservice.iter_errors(manifest)] == []


def test_a_field_that_kuberay_does_not_know_is_found(
    manifest: dict[str, Any], rayservice: jsonschema.Draft202012Validator
) -> None:
    spec = manifest["spec"]
    wrong = manifest | {"spec": spec | {"rayClusterConfig": spec["rayClusterConfig"] | {"authOption": {}}}}
    assert any("authOption" in error.message for error in rayservice.iter_errors(wrong))


def test_what_kuberay_serves_can_be_built(manifest: dict[str, Any]) -> None:
    assert built(yaml.safe_load(manifest["spec"]["serveConfigV2"]))["serve"]["max_replicas"] == 4


def test_pub_128_no_pod_is_killed_before_its_streams_may_finish(manifest: dict[str, Any]) -> None:
    spec = manifest["spec"]
    drain_s = yaml.safe_load(spec["serveConfigV2"])["applications"][0]["args"]["serve"]["graceful_shutdown_timeout_s"]
    cluster = spec["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > drain_s
        names = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
        assert int(names["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > drain_s
    assert spec["rayClusterDeletionDelaySeconds"] > drain_s


def test_the_cluster_asks_for_a_token_and_the_service_for_keys(manifest: dict[str, Any]) -> None:
    assert manifest["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    api = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"][0]["args"]["api"]
    mounted = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    paths = [mount["mountPath"] for mount in mounted["volumeMounts"]]
    assert all(Path(file).parent.as_posix() in paths for file in api.values())


def test_there_is_a_worker_for_each_replica(manifest: dict[str, Any]) -> None:
    (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    serve = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"][0]["args"]["serve"]
    assert group["maxReplicas"] >= serve["max_replicas"]


def test_the_manifests_have_the_proxy_repeat_what_an_ingress_left_unanswered(
    manifest: dict[str, Any], tmp_path: Path
) -> None:
    defaults = ray_defaults(tmp_path, range(2))
    names = [f"RAY_SERVE_HAPROXY_{name}" for name in ("RETRY_ON", "TUNE_BUFSIZE", "OBSERVE_ERROR_LIMIT")]
    wanted = {name: defaults[name] for name in names}
    cluster = manifest["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        entries = group["template"]["spec"]["containers"][0]["env"]
        assert wanted.items() <= {entry["name"]: entry["value"] for entry in entries}.items()
    assert wanted.items() <= yaml.safe_load((ROOT / "configs/anyscale.yaml").read_text())["env_vars"].items()


def test_the_anyscale_manifest_has_known_fields_and_can_be_built() -> None:
    content = yaml.safe_load((ROOT / "configs/anyscale.yaml").read_text())
    assert content.keys() <= ANYSCALE_FIELDS
    assert all(isinstance(value, str) for value in content["env_vars"].values())
    assert built({"applications": content["applications"]})["serve"]["min_replicas"] == 1
