"""The live page in a real browser over scripted answers: what a model must not be able to do, keys, and a new start."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from browser import Page
from starlette.applications import Starlette
from waiting import until

from sgray.text.tokenizer import Tokenizer

MARKUP = '<img src=x onerror="window.ran = 1"><a href="javascript:window.ran = 1">x</a>'
ANSWER = "document.querySelector('#talk p.assistant:last-child')?.textContent"
IS_DONE = "!document.getElementById('send').hidden"
STATE = "document.getElementById('state').textContent"


@pytest.fixture
def served() -> Iterator[Callable[[Starlette], str]]:
    """Serves an application on a socket; its address."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def serve(app: Starlette) -> str:
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="none", lifespan="off"))
        thread = threading.Thread(target=asyncio.run, args=(server.serve(),))
        running.append((server, thread))
        thread.start()
        until(lambda: server.started)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield serve
    for server, thread in running:
        server.should_exit = server.force_exit = True
        thread.join(timeout=30)


def ask(page: Page, text: str) -> None:
    """Begin to say something."""
    page.value("document.getElementById('say').focus()")
    page.write(text)
    page.press("Enter")


def test_markup_in_an_answer_is_shown_and_not_run(
    page: Page, served: Any, app: Starlette, backend: Any, tokenizer: Tokenizer
) -> None:
    backend.script = [*tokenizer.encode(MARKUP), 2]
    page.open(served(app))
    page.until(f"{STATE} === 'live'")
    ask(page, "hi")
    page.until(f"{IS_DONE} && {ANSWER} !== ''")
    assert page.value(ANSWER) == MARKUP
    assert page.value("window.ran === undefined && !document.querySelector('#talk :is(img, a)')")
    assert page.complaints() == []


def test_an_answer_that_is_cleared_away_is_no_part_of_the_next_talk(
    page: Page, served: Any, app: Starlette, backend: Any
) -> None:
    backend.pause_s = 0.05
    page.open(served(app))
    page.until(f"{STATE} === 'live'")
    ask(page, "hi")
    page.until(f"({ANSWER} ?? '') !== ''")
    page.value("document.getElementById('clear').click()")
    page.until(IS_DONE)
    for count in (1, 2):
        ask(page, "hi")
        until(lambda count=count: len(backend.requests) == count + 1)
        page.until(f"({ANSWER} ?? '') !== ''")  # what got no answer would not be said again
        page.value("document.getElementById('stop').click()")
        page.until(IS_DONE)
    first, second, third = (request.tokens for request in backend.requests)
    assert second == first and len(third) > len(second)
    assert page.complaints() == []


def test_a_stopped_answer_that_said_nothing_is_no_turn_of_the_talk(
    page: Page, served: Any, app: Starlette, backend: Any, tokenizer: Tokenizer
) -> None:
    backend.pause_s = 5
    page.open(served(app))
    page.until(f"{STATE} === 'live'")
    ask(page, "hi")
    until(lambda: backend.requests)
    page.value("document.getElementById('stop').click()")
    page.until(IS_DONE)
    backend.pause_s, backend.script = 0, [28, 2]
    ask(page, "there")
    page.until(f"{IS_DONE} && document.querySelectorAll('#talk p.assistant').length === 1")
    text = tokenizer.decode(backend.requests[-1].tokens, skip_special_tokens=False)
    assert text.count("<|im_start|>user") == 1 and "there" in text
    assert not page.value("[...document.querySelectorAll('#talk p')].some((one) => one.textContent === '')")
    assert page.complaints() == []


def test_the_keyboard_is_never_left_on_a_button_that_went(
    page: Page, served: Any, app: Starlette, backend: Any
) -> None:
    backend.pause_s = 0.05
    page.open(served(app))
    page.until(f"{STATE} === 'live'")
    page.tab_to("say")
    page.write("hi")
    for button in ("send", "stop"):
        page.tab_to(button)
        page.press("Enter")
        page.until("document.activeElement.id === 'say'")
    page.until(IS_DONE)
    assert page.complaints() == []


def test_a_state_that_lasts_is_told_once(page: Page, served: Any, app: Starlette) -> None:
    page.open(served(app))
    page.until(f"{STATE} === 'live'")
    page.value("window.changes = 0; window.looks = performance.getEntriesByType('resource').length")
    options = "{ childList: true, characterData: true, subtree: true }"
    page.value(f"new MutationObserver(() => window.changes++).observe(document.getElementById('state'), {options})")
    page.until("performance.getEntriesByType('resource').length > window.looks + 1")
    assert page.value(f"window.changes === 0 && {STATE} === 'live'")


def test_the_page_asks_for_a_key_and_goes_on_with_it(
    page: Page, served: Any, make_app: Any, backend: Any, tmp_path: Path
) -> None:
    backend.pause_s = 0.05
    (tmp_path / "keys").write_text("caller\n")
    page.open(served(make_app(api_keys_file=str(tmp_path / "keys"))))
    page.until(f"{STATE} === 'a key is needed'")
    page.tab_to("key")
    page.write("caller")
    page.press("Enter")
    page.until(f"{STATE} === 'live' && document.getElementById('key-form').hidden")
    ask(page, "hi")
    page.until(f"({ANSWER} ?? '') !== ''")
    page.value("document.getElementById('stop').click()")
    page.until(IS_DONE)
    assert all("401" in complaint for complaint in page.complaints())


def test_prefixes_that_go_on_with_another_stand_under_it(page: Page, served: Any, app: Starlette, backend: Any) -> None:
    for number in range(12):
        backend.history.asked([1, 2, 3 + number // 6, 4 + number // 6], 16)
    page.open(served(app))
    rows = "[...document.querySelectorAll('#prefixes tbody code')]"
    page.until(f"{rows}.length === 3")
    found = page.value(f"{rows}.map((row) => [Number('0x' + row.textContent), row.style.marginLeft])")
    assert found == [[2, "0em"], [4, "1.5em"], [5, "1.5em"]]
