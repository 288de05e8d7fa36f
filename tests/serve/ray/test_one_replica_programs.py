"""The programs that users know, through a Serve handle: they say what they say over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from quick_start import EVERYWHERE, NATIVE, WORDS, results
from ray import serve

import sgray as sgl


@pytest.mark.parametrize("language", sorted(WORDS))
def test_the_programs_of_the_quick_start_say_the_same_through_a_handle_and_over_http(
    deploy: Callable[[Mapping[str, Any]], Any], language: str
) -> None:
    service = deploy({})
    handle, endpoint = sgl.ServeHandle(serve.get_app_handle("sgray")), sgl.RuntimeEndpoint(service.url)
    try:
        found = [results(host, language, {**EVERYWHERE, **NATIVE}) for host in (handle, endpoint)]
        assert found[0] == found[1] and all(found[0].values())
        service.assert_idle()
    finally:
        handle.close()
        endpoint.close()
