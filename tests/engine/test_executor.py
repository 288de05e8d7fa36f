"""Loading: what is decided, what is told, what is refused before any weights are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from steps import Driver
from twins import edit_config, make_twin, some_tokens

from sgray.config import Config
from sgray.engine.executor import free_memory_bytes, load_executor, measure_hardware
from sgray.errors import ConfigError, ModelLoadError


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_twin(tmp_path_factory.mktemp("twin"))


def test_the_facts_about_a_loaded_engine(twin: Path) -> None:
    info = Driver.load(twin, memory={"max_total_tokens": 1000, "page_size": 8}).info
    assert (info.architecture, info.dtype, info.device) == ("LlamaForCausalLM", "float32", "cpu")
    assert (info.vocab_size, info.context_length, info.end_ids) == (101, 256, (2,))
    assert (info.page_size, info.num_pages, info.max_running_requests) == (8, 125, 64)
    assert info.model_dir == str(twin)


def test_auto_is_a_type_that_the_processor_has(twin: Path) -> None:
    expected = "bfloat16" if measure_hardware().has_bfloat16 else "float32"
    assert Driver.load(twin, "auto").info.dtype == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close_to_float32(twin: Path, dtype: str) -> None:
    tokens = some_tokens(40)
    full, half = (Driver.load(twin, name).logprobs_everywhere(tokens, 9) for name in ("float32", dtype))
    assert float((full - half).abs().mean()) < 0.1


def test_a_shorter_context_is_served(twin: Path) -> None:
    assert Driver.load(twin, model={"context_length": 100}).info.context_length == 100


def test_a_longer_context_than_the_models_is_refused(twin: Path) -> None:
    with pytest.raises(ConfigError, match=r"context_length 257 .* 256"):
        Driver.load(twin, model={"context_length": 257})


@pytest.mark.parametrize("tp_size", [4, 5])
def test_ranks_that_do_not_fit_are_refused_before_loading_pub_125(tmp_path: Path, tp_size: int) -> None:
    (make_twin(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"tp_size {tp_size} does not fit.*6 query heads"):
        Driver.load(tmp_path, parallel={"tp_size": tp_size})


def test_a_directory_that_does_not_exist_is_named_pub_124(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        load_executor(Config.parse({"model": {"model_path": str(tmp_path / "nowhere"), "device": "cpu"}}))


def test_a_directory_without_config_json_is_named_pub_124(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_executor(Config.parse({"model": {"model_path": str(tmp_path), "device": "cpu"}}))


def test_an_unknown_architecture_is_named_pub_124(tmp_path: Path) -> None:
    edit_config(make_twin(tmp_path), architectures=["FooForCausalLM"])
    with pytest.raises(ModelLoadError, match="FooForCausalLM"):
        Driver.load(tmp_path)


def test_the_number_of_threads_is_the_configured_one(twin: Path) -> None:
    before = torch.get_num_threads()
    try:
        Driver.load(twin, model={"num_threads": 1})
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_the_hardware_is_what_the_process_may_use() -> None:
    hardware = measure_hardware()
    assert 1 <= hardware.num_threads <= (os.cpu_count() or 1)
    assert 0 < hardware.memory_bytes < 2**50
    assert abs(hardware.memory_bytes - free_memory_bytes(torch.device("cpu"))) < 2**33
