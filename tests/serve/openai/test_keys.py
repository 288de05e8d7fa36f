"""Who may call: what keys open, how they are given, compared, reloaded, and that they show up nowhere."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from pathlib import Path

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

from sgray.cli import main
from sgray.config import ApiConfig, Config, KeyHashes, environment_keys
from sgray.errors import AdminKeyRequiredError, ConfigError
from sgray.serve.openai import keys as keys_module
from sgray.serve.openai.app import app_of, create_app
from sgray.serve.openai.keys import OPEN_PATHS, Keyring, Keys, for_admin
from sgray.serve.openai.service import OpenAIService

pytestmark = pytest.mark.anyio
KEY, OTHER, ADMIN = "sk-caller-1", "sk-caller-2", "sk-operator"


def bearer(key: str | bytes) -> dict[str, bytes]:
    return {"authorization": b"Bearer " + (key.encode() if isinstance(key, str) else key)}


def over(app: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "api").write_text(f"# callers\n\n  {KEY}  \r\nsha256:{hashlib.sha256(OTHER.encode()).hexdigest()}\n")
    (tmp_path / "admin").write_text(ADMIN)
    return {"api_keys_file": str(tmp_path / "api"), "admin_keys_file": str(tmp_path / "admin")}


@pytest.fixture
def closed(make_app, files) -> httpx.AsyncClient:
    return over(make_app(**files))


async def test_without_a_key_set_nothing_is_asked(api):
    assert (await api.http.get("/v1/models")).status_code == 200
    assert (await api.http.get("/v1/models", headers=bearer("whatever"))).status_code == 200


async def test_every_route_but_those_of_load_balancers_is_closed(closed, make_app, files):
    paths = {route.path.replace("{name:path}", "x") for route in make_app(**files).routes}
    assert paths > OPEN_PATHS
    for path in [*paths, "/", "/nothing", "/health/", "//health", "/HEALTH", "/docs"]:
        for method in ("GET", "POST", "DELETE", "OPTIONS"):
            response = await closed.request(method, path)
            if path in OPEN_PATHS:
                assert response.status_code == (200 if method == "GET" else 405)
                continue
            assert response.status_code == 401, (method, path)
            error = response.json()["error"]
            if path.startswith("/v1/messages"):
                error |= {"code": "invalid_api_key", "param": None, "type": "invalid_request_error"}
            assert (error["code"], error["type"], error["param"]) == ("invalid_api_key", "invalid_request_error", None)
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]


async def test_a_good_key_opens_in_either_header(closed):
    for key in (KEY, OTHER, ADMIN):
        for headers in (
            bearer(key),
            {"authorization": f"bearer  {key}"},
            {"x-api-key": key},
            {"x-api-key": key, "authorization": "Basic eDp5"},
            {"x-api-key": "wrong", "authorization": f"Bearer {key}"},
        ):
            assert (await closed.get("/v1/models", headers=headers)).status_code == 200, headers


@pytest.mark.parametrize(
    ("headers", "word"),
    [
        ({}, "none was given"),
        ({"authorization": ""}, "none was given"),
        ({"x-api-key": ""}, "none was given"),
        ({"authorization": f"Basic {KEY}"}, "not of the form"),
        ({"authorization": KEY}, "not of the form"),
        ({"authorization": f"Bearer{KEY}"}, "not of the form"),
        ({"authorization": "Bearer"}, "not of the form"),
        ({"authorization": "Bearer "}, "not of the form"),
        (bearer(KEY + "x"), "not valid"),
        (bearer(KEY[:-1]), "not valid"),
        (bearer(KEY.upper()), "not valid"),
        (bearer(f"{KEY} {KEY}"), "not valid"),
        (bearer("sha256:" + hashlib.sha256(OTHER.encode()).hexdigest()), "not valid"),
        (bearer(hashlib.sha256(OTHER.encode()).hexdigest()), "not valid"),
        (bearer("# callers"), "not valid"),
        (bearer("schlüssel-🔑"), "not valid"),
        (bearer(b"\xff\xfe\x00"), "not valid"),
        ({"x-api-key": b"\xe9"}, "not valid"),
        (bearer("x" * 10_000), "not valid"),
    ],
)
async def test_a_wrong_key_is_a_401_that_says_why_and_quotes_nothing(closed, caplog, headers, word):
    response = await closed.get("/v1/models", headers=headers)
    assert response.status_code == 401
    assert word in response.json()["error"]["message"]
    assert KEY not in response.text + caplog.text and "callers" not in response.text


async def test_the_openai_client_tells_a_wrong_key_from_a_wrong_request(closed):
    with pytest.raises(openai.AuthenticationError) as caught:
        await openai.AsyncOpenAI(base_url="http://test/v1", api_key="no", http_client=closed).models.list()
    assert caught.value.code == "invalid_api_key"
    good = openai.AsyncOpenAI(base_url="http://test/v1", api_key=KEY, http_client=closed)
    assert [model.id for model in (await good.models.list()).data] == ["smollm2-135m-instruct"]


async def test_a_refused_call_never_reaches_the_engine(closed, api, backend):
    for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        assert (await closed.post(path, json=api.body(path))).status_code == 401
    assert not backend.requests
    assert (await closed.post(path, json=api.body(path), headers=bearer(KEY))).status_code == 200


async def test_a_key_with_letters_beyond_ascii_is_its_utf8_bytes(make_app, tmp_path):
    (tmp_path / "keys").write_bytes("schlüssel-🔑\n".encode())
    http = over(make_app(api_keys_file=str(tmp_path / "keys")))
    assert (await http.get("/v1/models", headers=bearer("schlüssel-🔑"))).status_code == 200
    assert (await http.get("/v1/models", headers=bearer("schlüssel".encode("latin-1")))).status_code == 401


async def test_a_changed_file_counts_after_a_second_without_a_restart(tmp_path):
    path, clock = tmp_path / "keys", Clock()
    path.write_text(KEY)
    keyring = Keyring(ApiConfig(api_keys_file=str(path)), KeyHashes(), now=clock)
    path.write_text(OTHER)
    assert keyring.access([KEY.encode()])
    clock.now = 1.0
    assert keyring.access([OTHER.encode()])
    assert not keyring.access([KEY.encode()])
    replacement = tmp_path / "new"
    replacement.write_text(KEY)
    replacement.replace(path)
    clock.now = 2.0
    assert keyring.access([KEY.encode()])
    assert not keyring.access([OTHER.encode()])


async def test_a_file_that_was_emptied_lets_nobody_in(tmp_path):
    path, clock = tmp_path / "keys", Clock()
    path.write_text(KEY)
    keyring = Keyring(ApiConfig(api_keys_file=str(path)), KeyHashes(), now=clock)
    path.write_text("# nobody\n")
    clock.now = 1.0
    assert keyring.is_closed and not keyring.access([KEY.encode()]) and not keyring.access([b""])


async def test_a_file_that_is_gone_or_wrong_leaves_the_last_keys_and_is_logged_once(tmp_path, caplog):
    path, clock = tmp_path / "keys", Clock()
    path.write_text(KEY)
    keyring = Keyring(ApiConfig(api_keys_file=str(path)), KeyHashes(), now=clock)
    for change in (path.unlink, lambda: path.write_text("two words\n"), lambda: path.write_text("sha256:12")):
        caplog.clear()
        change()
        for _ in range(3):
            clock.now += 1.0
            assert keyring.access([KEY.encode()])
        assert len(caplog.records) == 1
        assert "two words" not in caplog.text
    path.write_text(OTHER)
    clock.now += 1.0
    assert keyring.access([OTHER.encode()]) and not keyring.access([KEY.encode()])


@pytest.mark.parametrize(
    "content", [b"a\nb c\n", b"a\nsha256:xyz", b"a\n" + b"k" * 1025, b"a\nb\x00c", b"x" * (2**20 + 1), None]
)
async def test_a_wrong_file_at_the_start_is_explained_without_its_content(tmp_path, content):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Keyring(ApiConfig(api_keys_file=str(path)), KeyHashes())
    assert "api.api_keys_file" in caught.value.message and str(path) in caught.value.message
    assert "b c" not in caught.value.message and "xyz" not in caught.value.message
    assert content is None or len(content) > 2**20 or "line 2" in caught.value.message


async def test_an_empty_file_closes_the_server_and_no_file_at_all_does_not(make_app, tmp_path):
    (tmp_path / "keys").write_text("")
    http = over(make_app(api_keys_file=str(tmp_path / "keys")))
    assert (await http.get("/v1/models", headers=bearer(""))).status_code == 401
    assert not Keyring(ApiConfig(), KeyHashes()).is_closed


async def test_keys_of_the_environment_count(tokenizer, backend, monkeypatch):
    monkeypatch.setenv("SGRAY_API_KEYS", f" {KEY},, sha256:{hashlib.sha256(OTHER.encode()).hexdigest()} ")
    monkeypatch.setenv("SGRAY_ADMIN_KEY", ADMIN)
    assert KEY not in repr(environment_keys())
    http = over(create_app(Config(), tokenizer, backend))
    statuses = [(await http.get("/v1/models", headers=bearer(key))).status_code for key in (KEY, OTHER, ADMIN, "x")]
    assert statuses == [200, 200, 200, 401]


@pytest.mark.parametrize("name", ["SGRAY_API_KEYS", "SGRAY_ADMIN_KEY"])
@pytest.mark.parametrize("value", ["", " , ", "a b", "sha256:1"])
async def test_a_variable_without_a_good_key_is_refused_and_does_not_open_the_server(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        environment_keys()
    assert name in caught.value.message and "a b" not in caught.value.message


async def test_an_admin_key_alone_closes_the_server_too(make_app, files):
    http = over(make_app(admin_keys_file=files["admin_keys_file"]))
    statuses = [(await http.get("/v1/models", headers=bearer(key))).status_code for key in (KEY, ADMIN)]
    assert statuses == [401, 200]


async def test_the_operators_routes_need_an_admin_key_while_any_key_is_set(files, tmp_path):
    async def flush(request):
        return Response("flushed")

    async def answered(request):
        try:
            return await for_admin(flush)(request)
        except AdminKeyRequiredError as error:
            return Response(error.message, error.status)

    def app(**api):
        keyring = Keyring(ApiConfig(**api), KeyHashes())
        return over(Starlette(routes=[Route("/flush", answered)], middleware=[Middleware(Keys, keyring=keyring)]))

    closed, without_admin, opened = app(**files), app(api_keys_file=files["api_keys_file"]), app()
    assert [(await closed.get("/flush", headers=bearer(key))).status_code for key in ("x", KEY, ADMIN)] == [
        401,
        403,
        200,
    ]
    assert (await without_admin.get("/flush", headers=bearer(KEY))).status_code == 403
    assert (await opened.get("/flush")).status_code == 200


async def test_a_route_that_no_key_check_stands_before_is_closed_to_operators_calls():
    app = Starlette(routes=[Route("/flush", for_admin(lambda request: None))])
    with pytest.raises(AdminKeyRequiredError):
        await over(app).get("/flush")


async def test_a_web_socket_is_closed_too(files):
    async def session(websocket):
        raise AssertionError("the session began")

    app = Starlette(
        routes=[WebSocketRoute("/ws", session)],
        middleware=[Middleware(Keys, keyring=Keyring(ApiConfig(**files), KeyHashes()))],
    )
    sent = []

    async def send(message):
        sent.append(message)

    await app({"type": "websocket", "path": "/ws", "headers": []}, None, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_all_digests_are_compared_in_constant_time_whichever_matches(monkeypatch, files):
    compared: list[tuple[bytes, bytes]] = []
    keyring = Keyring(ApiConfig(**files), KeyHashes())
    monkeypatch.setattr(keys_module.hmac, "compare_digest", _counted(compared, hmac.compare_digest))
    for key in (KEY, OTHER, ADMIN, "wrong", "x" * 5000):
        compared.clear()
        keyring.access([key.encode()])
        assert len(compared) == 3
        assert all(len(one) == len(other) == 32 for one, other in compared)


def _counted(compared, compare):
    def counted(one, other):
        compared.append((one, other))
        return compare(one, other)

    return counted


async def test_keys_are_in_no_log_metric_or_printed_configuration(
    tokenizer, backend, files, monkeypatch, caplog, capsys
):
    monkeypatch.setenv("SGRAY_API_KEYS", "sk-from-the-environment")
    caplog.set_level(logging.DEBUG)
    http = over(create_app(Config.parse({"api": files}), tokenizer, backend))
    backend.fail_after, backend.failure = 0, ZeroDivisionError("x")
    texts = []
    for key in (KEY, "sk-from-the-environment", ADMIN, "sk-wrong"):
        texts.append((await http.post("/v1/completions", json={"prompt": "x"}, headers=bearer(key))).text)
        body = {"model": "smollm2-135m-instruct", "prompt": "x"}
        texts.append((await http.post("/v1/completions", json=body, headers=bearer(key))).text)
        texts.append((await http.get("/nothing", headers={"x-api-key": key})).text)
    texts.append((await http.get("/metrics", headers=bearer(KEY))).text)
    assert main(["config", "show", "--api-keys-file", files["api_keys_file"]]) == 0
    texts.append(capsys.readouterr().out)
    assert files["api_keys_file"] in texts[-1]
    found = "\n".join([*texts, caplog.text, repr(Keyring(ApiConfig(**files), environment_keys()))])
    assert "internal error" in found
    for key in (KEY, OTHER, ADMIN, "sk-from-the-environment", "sk-wrong"):
        assert key not in found


async def test_calls_by_handle_need_no_key(tokenizer, backend, api, files):
    config = Config.parse({"api": files})
    service = OpenAIService(config, tokenizer, backend)
    assert app_of(service, config, Keyring(config.api, KeyHashes()), batches=None)
    answer = await service.completions(api.body("/v1/completions"))
    assert answer["choices"]


async def test_a_key_file_is_named_from_the_home_folder_too(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "HOME", str(tmp_path))
    (tmp_path / "keys").write_text(KEY)
    assert Keyring(ApiConfig(api_keys_file="~/keys"), KeyHashes()).access([KEY.encode()])


async def test_under_a_prefix_the_same_paths_are_open(make_app, files):
    transport = httpx.ASGITransport(make_app(**files), root_path="/llm")
    http = httpx.AsyncClient(transport=transport, base_url="http://test")
    for path, status in (("/llm/health", 200), ("/llm/v1/models", 401), ("/llm/llm/health", 401), ("/llmhealth", 401)):
        assert (await http.get(path)).status_code == status, path
    assert (await http.get("/llm/v1/models", headers=bearer(KEY))).status_code == 200
