"""The configuration: what is refused and how it is said, how `auto` becomes a value, where the environment counts."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sgray.config import (
    Config,
    Hardware,
    cache_dir,
    client_key,
    forbid_multicast,
    is_offline,
    leaves,
    may_share_gpus,
)
from sgray.errors import ConfigError

CPU = Hardware(num_threads=2, memory_bytes=2**30)
GPU = Hardware(num_threads=2, memory_bytes=2**30, has_cuda=True, has_bfloat16=True)


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.parse(values)
    return caught.value.message


def test_nothing_given_is_the_default() -> None:
    assert Config.parse({}) == Config()
    assert Config().model_name == Config().model.model_path


def test_the_served_name_is_what_clients_use() -> None:
    assert Config.parse({"model": {"model_path": "/x", "served_model_name": "y"}}).model_name == "y"
    assert Config.parse({"model": {"model_path": "/x"}}).model_name == "/x"


def test_an_unknown_section_is_named_with_what_is_allowed() -> None:
    message = refusal({"zzz": {}})
    assert "'zzz'" in message and "did you mean" not in message
    assert all(section in message for section in Config.model_fields)


def test_a_misspelt_section_gets_a_hint() -> None:
    assert "did you mean 'model'?" in refusal({"modle": {}})


def test_a_misspelt_leaf_gets_a_hint_and_its_section() -> None:
    message = refusal({"memory": {"page_sise": 16}})
    assert "'memory.page_sise'" in message and "did you mean 'page_size'?" in message
    assert "max_total_tokens" in message and "served_model_name" not in message


def test_an_unknown_leaf_without_a_near_one_lists_the_allowed() -> None:
    message = refusal({"schedule": {"qqq": 1}})
    assert "'schedule.qqq'" in message and "did you mean" not in message and "schedule_policy" in message


@pytest.mark.parametrize(
    ("section", "leaf", "value"),
    [
        ("memory", "mem_fraction_static", 2),
        ("memory", "mem_fraction_static", "much"),
        ("memory", "max_total_tokens", 0),
        ("memory", "page_size", "large"),
        ("schedule", "schedule_policy", "random"),
        ("schedule", "max_queued_requests", -1),
        ("model", "dtype", "int3"),
        ("model", "context_length", 0),
        ("parallel", "tp_size", 0),
        ("api", "max_body_bytes", 1),
        ("serve", "wedge_timeout_s", 0),
    ],
)
def test_a_wrong_value_is_named_with_its_place_and_itself(section: str, leaf: str, value: object) -> None:
    message = refusal({section: {leaf: value}})
    assert f"{section}.{leaf}" in message and repr(value) in message


@pytest.mark.parametrize("value", [3, None, [], "x"])
def test_a_section_must_be_a_mapping(value: object) -> None:
    assert refusal({"model": value}).startswith("model: ")


def test_replica_bounds_must_be_in_order() -> None:
    message = refusal({"serve": {"min_replicas": 3, "max_replicas": 2}})
    assert "min_replicas (3)" in message and "max_replicas (2)" in message


@pytest.mark.parametrize("tp_size, ep_size", [(1, 2), (4, 2), (2, 4)])
def test_experts_are_shared_by_all_ranks_or_in_parts(tp_size: int, ep_size: int) -> None:
    message = refusal({"parallel": {"tp_size": tp_size, "ep_size": ep_size}})
    assert f"ep_size ({ep_size}) has to be 1 or tp_size ({tp_size})" in message


def test_all_mistakes_are_told_at_once() -> None:
    message = refusal({"zzz": 1, "memory": {"page_sise": 1}, "parallel": {"tp_size": 0}})
    assert len(message.splitlines()) == 3


def test_a_configuration_cannot_be_changed() -> None:
    config = Config()
    with pytest.raises(ValidationError):
        config.model.dtype = "float16"  # type: ignore[misc]


def test_auto_becomes_the_cpus_value_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = Config().resolve(CPU)
    assert (config.model.device, config.model.dtype, config.memory.page_size) == ("cpu", "float32", 16)
    assert (config.schedule.chunked_prefill_size, config.schedule.max_running_requests) == (512, 64)
    assert (config.schedule.mixed_prefill_size, config.schedule.cuda_graph_max_bs) == (512, 64)
    assert "memory.page_size: auto is 16" in caplog.text


def test_auto_becomes_the_gpus_value() -> None:
    config = Config().resolve(GPU)
    assert (config.model.device, config.model.dtype, config.memory.page_size) == ("cuda", "bfloat16", 64)
    assert (config.schedule.chunked_prefill_size, config.schedule.max_running_requests) == (8192, 512)
    assert (config.schedule.mixed_prefill_size, config.schedule.cuda_graph_max_bs) == (192, 512)


def test_auto_follows_the_leaf_that_it_depends_on() -> None:
    given = Config.parse({"schedule": {"chunked_prefill_size": 40, "max_running_requests": 7}})
    schedule = given.resolve(CPU).schedule
    assert (schedule.mixed_prefill_size, schedule.cuda_graph_max_bs) == (40, 7)


def test_what_was_given_stays() -> None:
    given = {"model": {"device": "cpu", "dtype": "float16"}, "memory": {"page_size": 8}}
    config = Config.parse(given).resolve(GPU)
    assert (config.model.device, config.model.dtype, config.memory.page_size) == ("cpu", "float16", 8)
    assert config.schedule.chunked_prefill_size == 512, "the rest follows the device that was asked for"


def test_a_cpu_with_bfloat16_uses_it() -> None:
    assert Config().resolve(Hardware(2, 2**30, has_bfloat16=True)).model.dtype == "bfloat16"


def test_resolving_twice_changes_nothing() -> None:
    once = Config().resolve(CPU)
    assert once.resolve(CPU) == once and Config().model.device == "auto"


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no CUDA device.*'cpu' or 'auto'"):
        Config.parse({"model": {"device": "cuda"}}).resolve(CPU)


def test_every_leaf_is_explained_or_named_by_its_unit() -> None:
    for path, section in leaves().items():
        leaf = path.split(".")[1]
        assert section.model_fields[leaf].description or leaf.endswith("_s"), path


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SGRAY_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path.home() / ".cache" / "sgray"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "sgray"
    monkeypatch.setenv("SGRAY_CACHE", str(tmp_path / "here"))
    assert cache_dir() == tmp_path / "here"


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("", False)])
def test_offline_is_the_hubs_own_switch(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert is_offline() is expected
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert not is_offline()


def test_ranks_share_gpus_where_torch_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert may_share_gpus()
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
    assert not may_share_gpus()


def test_multicast_stays_forbidden_whatever_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    forbid_multicast()
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "x"])
@pytest.mark.parametrize("leaf", ["memory.page_size", "schedule.chunked_prefill_size", "schedule.max_running_requests"])
def test_a_size_that_may_be_auto_is_otherwise_a_whole_number_above_zero(leaf: str, value: object) -> None:
    section, name = leaf.split(".")
    message = refusal({section: {name: value}})
    assert message.startswith(f"{leaf}: got {value!r}; ") and "'auto'" in message and "\n" not in message


def test_a_key_to_ask_with_comes_from_a_file_a_flag_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGRAY_API_KEY", raising=False)
    assert client_key(None, None) is None
    monkeypatch.setenv("SGRAY_API_KEY", "sk-1")
    (tmp_path / "key").write_text(" sk-2\n")
    assert [client_key(None, None), client_key(None, str(tmp_path / "key")), client_key("sk-3", None)] == [
        "sk-1",
        "sk-2",
        "sk-3",
    ]


@pytest.mark.parametrize("content", ["", "one\ntwo", "a b", "sha256:" + "0" * 64, "clé", "\x01"])
def test_what_is_no_key_is_refused_without_being_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    (tmp_path / "key").write_text(content, "utf-8")
    monkeypatch.setenv("SGRAY_API_KEY", content)
    for file, place in ((str(tmp_path / "key"), "key"), (None, "SGRAY_API_KEY")):
        with pytest.raises(ConfigError, match=place) as caught:
            client_key(None, file)
        assert not content or content not in caught.value.message
    with pytest.raises(ConfigError, match="cannot read"):
        client_key(None, str(tmp_path / "none"))
