"""The programs of SGLang's frontend quick start, and the forms that users type, as one list of runs.

Each run takes a backend and words in one language, and gives plain values that are the same wherever the model is the
same. Knows no backend and nothing of what is right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel

import sgray as sgl

Run = Callable[[Any, Mapping[str, str]], Any]

# ruff: noqa: RUF001 - Chinese has signs of its own
WORDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "english": {
            "system": "You are a helpful assistant.",
            "question": "List 3 countries and their capitals.",
            "again": "And three rivers.",
            "tips": "Here are two tips for staying healthy: 1. Balanced diet. 2. Regular exercise.\n\n",
            "expand": "Now, expand this tip into a paragraph: ",
            "sum": "To summarize the above two tips, I can say:\n",
            "need": "To answer this question I need to use a ",
            "tools": "calculator|search engine",
            "address": "What is the IP address of the Google DNS servers?",
            "person": "Who wrote Hamlet?",
        },
        "chinese": {
            "system": "你是一个乐于助人的助手。",
            "question": "请列出三个国家和它们的首都。",
            "again": "再说三条河流的名字。",
            "tips": "保持健康的两个建议：1. 均衡饮食。2. 经常锻炼。\n\n",
            "expand": "现在，把这个建议写成一段话：",
            "sum": "总结以上两个建议，我可以说：\n",
            "need": "要回答这个问题，我需要使用",
            "tools": "计算器|搜索引擎",
            "address": "谷歌域名服务器的地址是什么？",
            "person": "谁写了《哈姆雷特》？",
        },
    }
)


class Person(BaseModel):
    name: Literal["Shakespeare", "莎士比亚", "Goethe"]
    is_alive: bool


@sgl.function
def basic_qa(s, words):
    s += sgl.system(words["system"])
    s += sgl.user(words["question"])
    s += sgl.assistant(sgl.gen("answer", max_tokens=4))


@sgl.function
def multi_turn_qa(s, words):
    s += sgl.system(words["system"])
    s += sgl.user(words["question"])
    s += sgl.assistant(sgl.gen("first", max_tokens=3))
    s += sgl.user(words["again"])
    s += sgl.assistant(sgl.gen("second", max_tokens=3))
    return s["first"], s["second"]


@sgl.function
def tool_use(s, words):
    s += sgl.user(words["question"])
    s += sgl.assistant(words["need"] + sgl.gen("tool", choices=words["tools"].split("|")) + ". ")
    if s["tool"] == words["tools"].split("|")[0]:
        s += sgl.assistant("1 + 1 = " + sgl.gen("result", max_tokens=2))
    else:
        s += sgl.assistant("Paris: " + sgl.gen("result", max_tokens=2))


@sgl.function
def tip_suggestion(s, words):
    s += sgl.assistant(words["tips"])
    forks = s.fork(2)
    for number, fork in enumerate(forks):
        fork += sgl.assistant(words["expand"] + f"{number + 1}. " + sgl.gen("tip", max_tokens=3, stop="\n\n"))
    s += sgl.assistant("1: " + forks[0]["tip"] + "\n")
    s += sgl.assistant("2: " + forks[1]["tip"] + "\n")
    s += sgl.assistant(words["sum"] + sgl.gen("summary", max_tokens=3))


@sgl.function
def regular_expression(s, words):
    s += sgl.user(words["address"])
    s += sgl.assistant(
        sgl.gen("answer", regex=r"((25[0-5]|2[0-4]\d|[01]?\d\d?).){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)", max_tokens=12)
    )


@sgl.function
def text_qa(s, question):
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=3, stop="\n"))


@sgl.function
def several(s, question, n=3):
    s += sgl.system("Be short.")
    s += sgl.user(question)
    forks = s.fork(n)
    for fork in forks:
        fork += sgl.assistant(sgl.gen("answer", max_new_tokens=3))
    s.join(forks)


@sgl.function
def person(s, words):
    s += sgl.user(words["person"])
    s += sgl.assistant(sgl.gen("person", max_tokens=40, json_schema=Person))


def _batched(backend: Any, words: Mapping[str, str]) -> Any:
    items = [{"question": words[name]} for name in ("question", "person", "address")]
    return [state["answer"] for state in text_qa.run_batch(items, backend=backend, temperature=0, progress_bar=False)]


def _streamed(backend: Any, words: Mapping[str, str]) -> Any:
    state = text_qa.run(question=words["question"], backend=backend, temperature=0, stream=True)
    return "".join(state.text_iter("answer"))


def _several(backend: Any, words: Mapping[str, str]) -> Any:
    state = several.run(question=words["question"], backend=backend, temperature=0)
    assert state["answer"] == [state["answer_0"], state["answer_1"], state["answer_2"]]
    return state["answer"], state.messages()


def _plain(program: Any, *names: str) -> Run:
    def run(backend: Any, words: Mapping[str, str]) -> Any:
        state = program.run(words=words, backend=backend, temperature=0)
        return [state[name] for name in names], state.messages()

    return run


def _person(backend: Any, words: Mapping[str, str]) -> Any:
    return Person(**json.loads(person.run(words=words, backend=backend, temperature=0)["person"])).model_dump()


EVERYWHERE: Mapping[str, Run] = MappingProxyType(
    {
        "basic_qa": _plain(basic_qa, "answer"),
        "multi_turn_qa": _plain(multi_turn_qa, "first", "second"),
        "tip_suggestion": _plain(tip_suggestion, "summary"),
        "batched": _batched,
        "streamed": _streamed,
        "several": _several,
        "person": _person,
    }
)
"""Programs that any backend can run."""

NATIVE: Mapping[str, Run] = MappingProxyType(
    {
        "tool_use": _plain(tool_use, "tool", "result"),
        "regular_expression": _plain(regular_expression, "answer"),
    }
)
"""Those that OpenAI's form has no words for."""


def results(backend: Any, language: str, runs: Mapping[str, Run]) -> dict[str, Any]:
    """What each of these runs gives, by its name."""
    return {name: run(backend, WORDS[language]) for name, run in runs.items()}
