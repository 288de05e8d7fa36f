"""The live page: its files, what its JSON tells and never tells, and that its script names what is there."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import httpx
import pytest

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
PAGE = files("sgray.serve.openai").joinpath("page")
FILES = {"/": "text/html", "/page/page.css": "text/css", "/page/page.js": "text/javascript"}


async def test_the_page_is_there_and_may_load_nothing_from_elsewhere(api):
    for path, kind in FILES.items():
        response = await api.http.get(path)
        assert response.status_code == 200 and response.headers["content-type"].startswith(kind)
        assert response.headers["content-security-policy"].startswith("default-src 'none'")
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "://" not in response.text and "//cdn" not in response.text
    html = (await api.http.get("/")).text
    named = set(re.findall(r'(?:src|href)="([^"]+)"', html)) - {"data:,"}
    assert {f"/{name}" for name in named} == set(FILES) - {"/"}
    assert "<script>" not in html and " style=" not in html and not re.search(r"\son\w+=", html)


async def test_the_script_puts_nothing_in_as_markup_and_names_elements_that_are_there():
    script, html = PAGE.joinpath("page.js").read_text(), PAGE.joinpath("index.html").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)
    asked = set(re.findall(r'\bat\("([\w-]+)"\)', script)) | set(re.findall(r'\bfill\("([\w-]+)"', script))
    assert len(asked) > 10 and asked <= set(re.findall(r'id="([\w-]+)"', html))


async def test_the_script_reads_only_what_the_json_has(api, backend):
    await api.post(PATH)
    for _ in range(2):
        backend.history.asked([5], 16)
    found = (await api.http.get("/overview")).json()
    script = PAGE.joinpath("page.js").read_text()
    for name, holder in (
        ("found", found),
        ("replica", found["replicas"][0]),
        ("prefix", found["prefixes"][0]),
        ("decision", found["decisions"][0]),
    ):
        read = set(re.findall(rf"\b{name}\.(\w+)", script))
        assert read and read <= holder.keys(), name


async def test_replicas_prefixes_and_decisions_are_told(api, backend):
    await api.post(PATH)
    for _ in range(3):
        backend.history.asked([7, 2**64 - 1], 16)
    backend.history.started(backend.requests[0].id, 1)
    found = (await api.http.get("/overview")).json()
    assert found["model"] == "smollm2-135m-instruct" and found["policy"] == "cost"
    (replica,) = found["replicas"]
    assert (replica["name"], replica["kv_total_tokens"], replica["kv_used_tokens"]) == ("replica-1", 16384, 8192)
    assert found["prefixes"] == [{"hash": "f" * 16, "tokens": 32, "requests": 3, "parent": None}]
    (decision,) = found["decisions"]
    assert decision.pop("time") > 1e9
    assert decision == {
        "replica": "replica-1",
        "prompt_tokens": 2,
        "predicted_cached_tokens": 0,
        "cached_tokens": 1,
    }


async def test_no_text_and_no_name_of_a_call_is_told(api):
    await api.post("/generate", text="my dog is called Bello", rid="Bello-7")
    text = (await api.http.get("/overview")).text
    assert "Bello" not in text and "generate" not in text
    assert len(json.loads(text)["decisions"]) == 1


async def test_before_a_replica_was_seen_the_page_says_so(api, backend, monkeypatch):
    monkeypatch.setattr(type(backend), "loads", lambda self: {})
    found = (await api.http.get("/overview")).json()
    assert (found["replicas"], found["hit_rate"], found["decisions"]) == ([], 0.0, [])


async def test_the_figures_need_a_key_and_the_files_do_not(make_app, tmp_path):
    (tmp_path / "keys").write_text("caller\n")
    transport = httpx.ASGITransport(make_app(api_keys_file=str(tmp_path / "keys")))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert [(await http.get(path)).status_code for path in FILES] == [200, 200, 200]
        assert (await http.get("/overview")).status_code == 401
        assert (await http.get("/overview", headers={"authorization": "Bearer caller"})).status_code == 200
        for path in ("/page/", "/page/index.html", "/page/../page.js", "/page/page.js/x"):
            assert (await http.get(path)).status_code == 401
