"""One program says the same in the process, over HTTP and on an OpenAI endpoint; errors come back as errors.

The fourth way, a Serve handle, needs Ray and is asked in tests/serve/ray.
"""

from __future__ import annotations

import asyncio

import pytest
from waiting import until

import sgray as sgl
from sgray.errors import ConfigError, InvalidRequestError, ModelNotFoundError
from sgray.lang.errors import EndpointError, UnavailableError
from sgray.lang.expressions import Sampling
from sgray.lang.transcript import Prompt


@sgl.function
def talk(s, question):
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("first", max_new_tokens=8))
    s += sgl.user("Say it again.")
    s += sgl.assistant_begin() + "Again:" + sgl.gen("again", max_new_tokens=6) + sgl.assistant_end()


@sgl.function
def bare(s, text):
    s += text + sgl.gen("answer", max_new_tokens=6, stop=["\n"])
    s += " So: " + sgl.select("choice", ["yes", "no", "maybe so"])


def test_greedy_results_are_equal_on_every_backend(
    engine: sgl.Engine, endpoint: sgl.RuntimeEndpoint, openai: sgl.OpenAI
) -> None:
    found = []
    for host in (engine, endpoint, openai):
        state = talk.run(question="What is the capital of France?", temperature=0, backend=host)
        text = bare.run(text="The sky is", temperature=0, backend=host)
        streamed = talk.run(question="What is the capital of France?", temperature=0, backend=host, stream=True)
        pieces = "".join(streamed.text_iter("first"))
        found.append((state["first"], state["again"], text["answer"], text["choice"], text.text(), pieces))
    assert found[0] == found[1] == found[2]
    assert found[0][0] == found[0][5] == "The capital of France is Paris."


def test_an_endpoint_knows_its_server(endpoint: sgl.RuntimeEndpoint, engine: sgl.Engine) -> None:
    sgl.set_default_backend(endpoint)
    try:
        assert endpoint.get_model_name() == engine.config.model.model_path
        assert sgl.get_server_info()["served_model_name"] == "small"
        assert sgl.flush_cache() is True
        assert endpoint.flush_cache() is True
    finally:
        sgl.set_default_backend(None)


def test_errors_of_the_server_name_the_field(endpoint: sgl.RuntimeEndpoint, openai: sgl.OpenAI, url: str) -> None:
    for host in (endpoint, openai):
        for is_streamed in (False, True):
            with pytest.raises(InvalidRequestError, match="top_p"):
                run = bare.run(text="x", top_p=3.0, backend=host, stream=is_streamed)
                list(run.text_iter())
    with pytest.raises(InvalidRequestError) as caught:
        bare.run(text="x", backend=sgl.OpenAI("other", base_url=f"{url}/v1", api_key="none"))
    assert caught.value.code == ModelNotFoundError.code and caught.value.status == 404
    with pytest.raises(EndpointError, match="cannot reach"):
        bare.run(text="x", backend=sgl.RuntimeEndpoint("http://127.0.0.1:9"))
    with pytest.raises(ValueError, match="http://"):
        sgl.RuntimeEndpoint("127.0.0.1:30000")


def test_what_openais_form_lacks_is_refused_and_not_left_out(openai: sgl.OpenAI, url: str) -> None:
    def refused(expression, *, host=openai, match="not available"):
        with pytest.raises(UnavailableError, match=match):
            sgl.function(lambda s: s.__iadd__(expression)).run(backend=host)

    refused("x" + sgl.gen(regex="a+"))
    refused("x" + sgl.gen(return_logprob=True))
    refused(sgl.user("x") + sgl.assistant(sgl.select("y", ["a", "b"])), match="inside messages")
    refused("note " + sgl.user("x") + sgl.assistant(sgl.gen()), match="beside messages")
    refused("x" + sgl.gen(), host=sgl.OpenAI("small", True, base_url=f"{url}/v1", api_key="n"), match="chat model")
    refused(
        sgl.user("x") + sgl.assistant(sgl.gen()),
        host=sgl.OpenAI("small", False, base_url=f"{url}/v1", api_key="n"),
        match="no chat model",
    )


def test_openais_own_endpoint_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        sgl.OpenAI("gpt-4o-mini")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert sgl.OpenAI("gpt-4o-mini").model_name == "gpt-4o-mini"


def test_a_cancelled_call_over_http_stops_in_the_engine(engine: sgl.Engine, endpoint: sgl.RuntimeEndpoint) -> None:
    def running() -> int:
        return engine.get_server_info()["internal_states"][0]["running"]

    for is_streamed in (True, False):

        @sgl.function
        def endless(s):
            s += "Once" + sgl.gen("a", max_tokens=4000, ignore_eos=True)

        state = endless.run(backend=endpoint, stream=True)
        state.stream.is_streaming = is_streamed
        until(lambda: running() == 1)
        state.cancel()
        until(lambda: running() == 0)


def test_a_backend_that_was_closed_opens_again(endpoint: sgl.RuntimeEndpoint) -> None:
    prompt, few = Prompt(("One, two,",)), Sampling(max_new_tokens=1, temperature=0.0)
    backend = endpoint.backend
    first = backend.loop.run(backend.complete(prompt, few, None))
    endpoint.close()
    assert backend.loop.run(backend.complete(prompt, few, None)).texts == first.texts


def test_one_endpoint_serves_coroutines_of_any_loop(endpoint: sgl.RuntimeEndpoint) -> None:
    async def once() -> str:
        state = await bare.run_async(text="The sky is", temperature=0, backend=endpoint)
        return await state.get("answer")

    assert asyncio.run(once()) == asyncio.run(once())
