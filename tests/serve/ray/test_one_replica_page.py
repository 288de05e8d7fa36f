"""The live page of a running service in a real browser, used with the keyboard alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from browser import Page

MARKUP = '<img src=x onerror="window.ran = 1"><script>window.ran = 1</script>'
IS_LIVE = "document.getElementById('state').textContent === 'live'"
WATCH = """
window.lengths = [];
new MutationObserver(() => window.lengths.push(document.querySelector('#talk p:last-child')?.textContent.length))
  .observe(document.getElementById('talk'), { childList: true, subtree: true, characterData: true });
"""


@pytest.fixture(scope="module")
def service(deploy: Callable[[Mapping[str, Any]], Any]) -> Any:
    return deploy({})


def cells(page: Page, table: str) -> list[list[str]]:
    """The texts of a table's body."""
    rows = f"[...document.querySelectorAll('#{table} tbody tr')]"
    return page.value(f"{rows}.map((row) => [...row.cells].map((cell) => cell.textContent))")


def bubbles(page: Page) -> list[list[str]]:
    """Who said what in the chat."""
    return page.value("[...document.querySelectorAll('#talk p')].map((one) => [one.className, one.textContent])")


def kept_share(page: Page) -> float:
    """How much of the bar of the first replica is shown as cached, between 0 and 1."""
    width = "getBoundingClientRect().width"
    return page.value(f"document.querySelector('.bar .kept').{width} / document.querySelector('.bar').{width}")


def ask(page: Page, text: str) -> str:
    """Send a message by the Enter key, let the answer come for a while, stop it by the keyboard, and give it."""
    page.write(text)
    page.press("Enter")
    answer = "document.querySelector('#talk p.assistant:last-child').textContent.trim()"
    page.until(f"document.getElementById('stop').hidden || {answer}.length > 40")
    if not page.value("document.getElementById('stop').hidden"):
        page.tab_to("stop")
        page.press("Enter")
    page.until("!document.getElementById('send').hidden")
    page.until("document.activeElement.id === 'say'")
    return page.value(answer)


def test_what_a_person_says_and_the_service_answers_is_text_and_moves_the_figures(page: Page, service: Any) -> None:
    page.open(service.url)
    page.until(IS_LIVE)
    page.value(WATCH)
    (replica,) = httpx.get(f"{service.url}/overview", timeout=30).json()["replicas"]
    ((name, *_),) = cells(page, "replicas")
    assert name == replica["name"]
    assert "of 16,384" in page.value("document.querySelector('.bar').title")

    page.tab_to("say")
    said = [f"{MARKUP} Tell me a long story of a dog, a cat, a horse and the sea.", "Now tell me one of a mouse."]
    seen: list[tuple[float, float]] = []

    def is_shown() -> bool:
        """Whether the page shows what is so now, and more is cached than was after the last answer."""
        found = httpx.get(f"{service.url}/overview", timeout=30).json()
        cached = found["replicas"][0]["kv_cached_tokens"]
        shown = page.value("['running', 'hits'].map((id) => document.getElementById(id).textContent)")
        if shown != ["0", f"{100 * found['hit_rate']:.0f} %"] or (seen and kept_share(page) <= seen[-1][1]):
            return False
        if f" {cached:,} cached" not in page.value("document.querySelector('.bar').title"):
            return False
        seen.append((found["hit_rate"], kept_share(page)))
        return True

    for text in said:
        assert ask(page, text)
        service.assert_idle()
        service.until(is_shown, "it is shown", 15)
    (first_rate, first_share), (second_rate, second_share) = seen
    assert first_rate != second_rate and 0 < first_share < second_share < 1

    talk = bubbles(page)
    assert [who for who, _ in talk] == ["user", "assistant"] * 2 and [talk[0][1], talk[2][1]] == said
    lengths = page.value("window.lengths")
    assert len(set(lengths)) > 4, "the answers came in one piece"
    assert page.value("window.ran === undefined && !document.querySelector('#talk :is(img, script)')")

    decisions = cells(page, "decisions")
    latest, before = decisions[0], decisions[1]
    assert latest[1] == before[1] == name
    assert number(latest[2]) > number(before[2]), "the second message is sent with the first"
    assert number(latest[4]) >= number(before[2]) - 1, "what was said before is found in the cache"
    assert any(number(requests) > 1 for _, _, requests in cells(page, "prefixes"))
    assert page.complaints() == [] and page.hosts() == {urlsplit(service.url).netloc}


@pytest.mark.parametrize("width", [320, 390])
def test_nothing_is_wider_than_a_telephone(page: Page, service: Any, width: int) -> None:
    page.open(service.url, width=width, height=640)
    page.until(IS_LIVE)
    assert cells(page, "replicas")
    assert page.value("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    for element in ("say", "send", "clear", "state", "replicas"):
        box = f"document.getElementById('{element}').closest('form, section, header').getBoundingClientRect()"
        assert page.value(f"{box}.left >= 0 && {box}.right <= innerWidth"), element
    assert page.complaints() == []


def number(shown: str) -> int:
    """The number that a cell shows."""
    return int(shown.replace(",", ""))
