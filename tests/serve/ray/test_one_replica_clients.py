"""SGLang's own clients, unchanged and from the package index, against one engine behind Serve's proxy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from sglang_clients import IndexUnreachableError, client_python, hold_session

from sgray.config import cache_dir

pytestmark = pytest.mark.timeout(900)  # the first run of a machine fetches and installs the clients


@pytest.fixture(scope="module")
def seen(
    deploy: Callable[[Mapping[str, Any]], Any], model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the clients saw, in one session, as importing them is what takes its time."""
    try:
        python = client_python(cache_dir())
    except IndexUnreachableError as error:
        pytest.skip(f"SGLang's clients come from the package index, which does not answer: {error}")
    service = deploy({})
    found = hold_session(python, service.url, model_dir, tmp_path_factory.mktemp("clients"))
    service.assert_idle()
    return found


def test_the_frontend_language_generates_streams_and_forks(seen: Mapping[str, Any]) -> None:
    told = seen["language"]
    assert "Paris" in told["answer"]
    assert told["streamed"] == told["answer"]
    assert told["batch"][0::2] == [told["answer"]] * 3 and len(set(told["batch"][1::2])) == 1
    assert told["meta"]["finish_reason"] == {"type": "stop", "matched": "\n"}
    assert told["meta"]["prompt_tokens"] > 10 and 0 < told["meta"]["completion_tokens"] < 8
    assert told["forked"].startswith("Names of fruits:") and told["forked"].endswith(told["end"])
    assert {"model_path", "internal_states", "version"} <= set(told["info"])


def test_the_frontend_language_selects_by_log_probabilities_in_each_of_its_ways(seen: Mapping[str, Any]) -> None:
    assert seen["language"]["picked"] == [" Paris"] * 3


def test_the_frontend_language_gets_the_log_probabilities_of_prompt_and_answer(seen: Mapping[str, Any]) -> None:
    meta, end = seen["language"]["logprobs"], seen["language"]["end"]
    assert "".join(text for _, _, text in meta["input_token_logprobs"]) == seen["language"]["forked"].removesuffix(end)
    assert "".join(text for _, _, text in meta["output_token_logprobs"]) == end
    for own, best in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert own == best[0] and len(best) == 2


def test_the_frontend_language_is_told_what_is_wrong(seen: Mapping[str, Any]) -> None:
    assert "sampling_params.temperature" in seen["language"]["error"]


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai-chat", "vllm"])
def test_the_load_generator_counts_every_token(seen: Mapping[str, Any], backend: str) -> None:
    report = seen[backend]
    assert (report["backend"], report["completed"], report["errors"]) == (backend, 6, [""] * 6)
    assert report["output_lens"] == [6] * 6 and report["total_output_tokens"] == 36
    assert all(len(gaps) == 5 for gaps in report["itls"]), "each token came by itself"
    assert all(report["generated_texts"])
    assert all(0 < first < 60 for first in report["ttfts"])
