"""The programs that users know say the same on every backend, in whatever language they are asked.

A Serve handle needs Ray and is asked in tests/serve/ray.
"""

from __future__ import annotations

import pytest
from quick_start import EVERYWHERE, NATIVE, WORDS, results

import sgray as sgl
from sgray.lang.errors import UnavailableError


@pytest.mark.parametrize("language", sorted(WORDS))
def test_the_programs_of_the_quick_start_give_equal_results_on_every_backend(
    engine: sgl.Engine, endpoint: sgl.RuntimeEndpoint, openai: sgl.OpenAI, language: str
) -> None:
    here = results(engine, language, {**EVERYWHERE, **NATIVE})
    assert all(here.values())
    assert results(endpoint, language, {**EVERYWHERE, **NATIVE}) == here
    assert results(openai, language, EVERYWHERE) == {name: here[name] for name in EVERYWHERE}


def test_what_openais_form_has_no_words_for_is_refused_there(openai: sgl.OpenAI) -> None:
    for name, run in NATIVE.items():
        with pytest.raises(UnavailableError, match="not available"):
            run(openai, WORDS["english"])
        assert name in ("tool_use", "regular_expression")
