"""One engine behind one ingress and Serve's Python proxy, asked over HTTP and through a handle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest
from ray import serve

import sgray as sgl
from sgray.config import DEFAULT_MODEL
from sgray.errors import InvalidRequestError

PROMPT = "Once upon a time there was a small dog who"


@pytest.fixture(scope="module")
def service(deploy: Callable[[Mapping[str, Any]], Any]) -> Any:
    return deploy({})


def test_the_openai_client_gets_an_answer(service: Any) -> None:
    client = service.openai()
    assert [model.id for model in client.models.list()] == [DEFAULT_MODEL]
    chat = client.chat.completions.create(**service.body("What is the capital of France?"))
    assert "Paris" in (chat.choices[0].message.content or "")
    text = client.completions.create(model=DEFAULT_MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
    assert text.usage is not None
    assert text.usage.completion_tokens == 12
    assert text.choices[0].text


def test_streamed_text_is_the_whole_text(service: Any) -> None:
    client = service.openai()
    for question in ("Name three rivers.", "Écris une phrase en français, avec un emoji 🙂"):
        body = service.body(question, max_tokens=40)
        whole = client.chat.completions.create(**body).choices[0]
        chunks = list(client.chat.completions.create(**body, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
        assert chunks[-1].choices[0].finish_reason == whole.finish_reason
        assert len(chunks) > 5


def test_a_conversation_of_responses_goes_on_with_their_items(service: Any) -> None:
    client = service.openai()
    items: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    asked: dict[str, Any] = {"model": DEFAULT_MODEL, "temperature": 0, "max_output_tokens": 24}
    first = client.responses.create(input=items, **asked)
    assert "Paris" in first.output_text
    with client.responses.stream(input=items, **asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response() if first.status == "completed" else None
    assert text == first.output_text and (final is None or final.output_text == text)
    items += [*first.output, {"role": "user", "content": "And of Italy?"}]
    second = client.responses.create(input=items, **asked)
    assert second.output_text and second.usage.input_tokens_details.cached_tokens > 0


def test_anthropics_client_runs_a_session(service: Any) -> None:
    client = service.anthropic(max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    asked: dict[str, Any] = {
        "model": DEFAULT_MODEL,
        "messages": messages,
        "max_tokens": 24,
        "extra_body": {"temperature": 0},
    }
    first = client.messages.create(**asked)
    assert "Paris" in first.content[0].text and first._request_id
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == first.content[0].text
        assert stream.get_final_message().stop_reason == first.stop_reason
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "And of Italy?"}]
    second = client.messages.create(**asked)
    usage = second.usage
    count = client.messages.count_tokens(model=DEFAULT_MODEL, messages=messages).input_tokens
    assert count == usage.input_tokens + usage.cache_read_input_tokens and usage.cache_read_input_tokens > 0
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        client.messages.create(**asked, stop_sequences=[""])
    service.assert_idle()


def test_errors_come_in_openais_shape(service: Any) -> None:
    client = service.openai(max_retries=0)
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**service.body("hi") | {"model": "other"})
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**service.body("hi", max_tokens=10**6))
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**service.body("hi", temperature=-1))
    assert httpx.post(f"{service.url}/v1/chat/completions", content=b"{", timeout=30).status_code in (400, 415)
    service.assert_idle()


def test_64_callers_at_once_get_what_each_would_get_alone(service: Any) -> None:
    bodies = [service.body(f"Repeat the number {index}.", max_tokens=8) for index in range(64)]

    async def ask(client: httpx.AsyncClient, body: Mapping[str, Any]) -> str:
        answer = await client.post(f"{service.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    async def ask_all() -> list[str]:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=64)) as client:
            return await asyncio.gather(*(ask(client, body) for body in bodies))

    together = asyncio.run(ask_all())
    client = service.openai()
    for index in (0, 31, 63):
        alone = client.chat.completions.create(**bodies[index]).choices[0].message.content
        assert together[index] == alone
    service.assert_idle()


def test_clients_that_leave_take_their_work_with_them(service: Any) -> None:
    steps = service.figures()["sgray:engine_aborted_requests"]

    async def leave(client: httpx.AsyncClient, index: int) -> None:
        body = service.body(f"Tell me a long story, number {index}.", max_tokens=1500, stream=True)
        async with client.stream("POST", f"{service.url}/v1/chat/completions", json=body) as answer:
            if index % 3:
                await anext(answer.aiter_lines())

    async def leave_all() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            await asyncio.gather(*(leave(client, index) for index in range(24)))
        async with httpx.AsyncClient(timeout=0.3) as client:  # leaves while an answer that is no stream is computed
            bodies = [service.body(f"A poem, number {index}.", max_tokens=1500) for index in range(8)]
            await asyncio.gather(
                *(client.post(f"{service.url}/v1/chat/completions", json=body) for body in bodies),
                return_exceptions=True,
            )

    asyncio.run(leave_all())
    service.assert_idle()
    aborted = service.figures()["sgray:engine_aborted_requests"]
    assert all(aborted[replica] - steps[replica] >= 24 for replica in aborted)
    assert service.openai().chat.completions.create(**service.body("Name a fruit.")).choices[0].message.content


def test_the_routes_beside_calls_reach_the_replica(service: Any) -> None:
    with httpx.Client(base_url=service.url, timeout=60) as client:
        assert client.get("/health_generate").status_code == 200
        told = client.get("/server_info").json()
        assert len(told["internal_states"]) == 1 and told["served_model_name"] == DEFAULT_MODEL
        prompt = {"input_ids": client.post("/tokenize", json={"prompt": PROMPT * 4}).json()["tokens"]}
        body = prompt | {"sampling_params": {"max_new_tokens": 2}}
        found = [client.post("/generate", json=body).json()["meta_info"]["cached_tokens"] for _ in range(2)]
        assert client.post("/flush_cache?timeout=30").status_code == 200
        found.append(client.post("/generate", json=body).json()["meta_info"]["cached_tokens"])
        assert found[1] > found[0] and found[2] == 0  # others may have left the start of this prompt behind
        long = prompt | {"rid": "long", "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(client.post, "/generate", json=long)
            while not call.done():
                assert client.post("/abort_request", json={"rid": "long"}).status_code == 200
                time.sleep(0.05)
        meta = call.result().json()["meta_info"]
        assert meta["finish_reason"]["type"] == "abort" and meta["completion_tokens"] < 1000
    service.assert_idle()


def test_the_live_page_shows_where_requests_went_and_what_they_have_in_common(service: Any) -> None:
    page = httpx.get(f"{service.url}/", timeout=30)
    assert page.headers["content-type"].startswith("text/html") and "page/page.js" in page.text
    assert "overview" in httpx.get(f"{service.url}/page/page.js", timeout=30).text
    for end in ("the park", "the sea"):
        service.openai().chat.completions.create(**service.body(f"{PROMPT} went to {end}", max_tokens=4))
    found = httpx.get(f"{service.url}/overview", timeout=30).json()
    (replica,) = found["replicas"]
    assert replica["kv_total_tokens"] == 16_384 and replica["generation_tokens"] > 0
    latest = found["decisions"][0]
    assert latest["replica"] == replica["name"] and latest["cached_tokens"] > 0
    assert found["prefixes"] and found["prefixes"][0]["requests"] > 1


def test_a_body_that_stops_half_way_holds_nothing(service: Any) -> None:
    import socket

    for _ in range(10):
        with socket.create_connection(("127.0.0.1", int(service.url.rsplit(":", 1)[1]))) as raw:
            raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    service.assert_idle()
    assert service.openai().chat.completions.create(**service.body("Name a fruit.")).choices[0].message.content


def test_a_handle_gives_the_same_answers_as_http(service: Any) -> None:
    handle = serve.get_app_handle("sgray")
    body = service.body("Name three metals.", max_tokens=40)
    over_http = service.openai().chat.completions.create(**body).choices[0].message.content
    assert handle.chat.remote(body).result()["choices"][0]["message"]["content"] == over_http
    text = {"model": DEFAULT_MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    whole = handle.completions.remote(text).result()["choices"][0]["text"]
    assert whole == service.openai().completions.create(**text).choices[0].text
    response = {"model": DEFAULT_MODEL, "input": "Name three metals.", "max_output_tokens": 40, "temperature": 0}
    assert handle.responses.remote(response).result()["output"][0]["content"][0]["text"] == over_http
    message = {name: body[name] for name in ("model", "messages", "max_tokens", "temperature")}
    assert handle.messages.remote(message).result()["content"][0]["text"] == over_http
    native = handle.generate.remote({"text": PROMPT, "sampling_params": {"max_new_tokens": 12, "temperature": 0}})
    assert native.result()["text"] == whole


def test_a_handle_streams_in_packed_items(service: Any) -> None:
    handle = serve.get_app_handle("sgray").options(stream=True)
    body = service.body("Name three metals.", max_tokens=40, stream=True, stream_options={"include_usage": True})
    chunks = list(handle.chat.remote(body))
    whole = service.openai().chat.completions.create(**service.body("Name three metals.", max_tokens=40))
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == whole.choices[0].message.content
    num_tokens = chunks[-1]["usage"]["completion_tokens"]
    assert len(chunks) <= 5 + num_tokens / 8


def test_a_handle_stream_that_is_dropped_is_aborted(service: Any) -> None:
    handle = serve.get_app_handle("sgray").options(stream=True)
    stream = handle.chat.remote(service.body("Tell me a long story.", max_tokens=1500, stream=True))
    next(iter(stream))
    stream.cancel()
    service.assert_idle()


def test_a_handle_raises_what_http_would_answer(service: Any) -> None:
    handle = serve.get_app_handle("sgray")
    with pytest.raises(Exception, match="does not exist") as caught:
        handle.chat.remote(service.body("hi") | {"model": "other"}).result()
    assert "ModelNotFoundError" in f"{type(caught.value)} {caught.value}"


def test_a_program_says_the_same_through_a_handle_and_over_http(service: Any) -> None:
    @sgl.function
    def talk(s: Any) -> None:
        s += sgl.user("What is the capital of France?")
        s += sgl.assistant(sgl.gen("answer", max_new_tokens=8))
        s += "\nSo it is:" + sgl.select("choice", [" Rome", " Paris"])
        forks = s.fork(3)
        forks += " and" + sgl.gen("more", max_new_tokens=4)
        forks.join()

    handle = sgl.ServeHandle(serve.get_app_handle("sgray"))
    endpoint = sgl.RuntimeEndpoint(service.url)
    found = []
    for host in (handle, endpoint):
        state = talk.run(backend=host, temperature=0)
        streamed = talk.run(backend=host, temperature=0, stream=True)
        pieces = list(streamed.text_iter("answer"))
        assert len(pieces) > 1
        found.append((state["answer"], state["choice"], state["more"], state.text(), "".join(pieces)))
        with pytest.raises(InvalidRequestError, match="top_p"):
            talk.run(backend=host, top_p=7.0)
    assert found[0] == found[1]
    assert found[0][0] == found[0][4] == "The capital of France is Paris."
    for host in (handle, endpoint):
        left = sgl.function(lambda s: s.__iadd__("Once" + sgl.gen(max_tokens=4000, ignore_eos=True)))
        state = left.run(backend=host, stream=True)
        next(state.text_iter())
        state.cancel()
        # Figures are as old as the last report, which may be from before the call; a flush is refused while one runs.
        service.until(handle.flush_cache, "the cancelled call has ended", 15)
    service.assert_idle()
    assert sgl.get_server_info(handle)["architecture"] == "LlamaForCausalLM"
    handle.close()
    endpoint.close()
