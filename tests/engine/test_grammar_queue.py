"""Grammars from strangers: compiled beside the engine, within limits, and whatever they are, others go on."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest
from grammars import Answer, asking, config_of, load_engine, run
from waiting import until

from sgray.engine.engine import Engine
from sgray.engine.grammar_queue import GrammarQueue
from sgray.engine.loop import EngineLoop
from sgray.errors import EngineError, InvalidRequestError
from sgray.protocol import Finish, Grammar, Request, StepReport

GOOD = Grammar("regex", "[0-9]{3}")


@pytest.fixture(scope="module")
def engine(grammar_model: Path, grammars: GrammarQueue) -> Engine:
    return load_engine(config_of(grammar_model), grammars)


def schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def chain(rule: str, count: int) -> str:
    rules = [f"r{i} ::= " + rule.replace("next", f"r{i + 1}") for i in range(count)]
    return "\n".join(["root ::= r0", *rules, f'r{count} ::= "a"'])


HOSTILE = {
    "an open bracket": Grammar("regex", "(a"),
    "a lookahead": Grammar("regex", "(?=a)b"),
    "a back reference": Grammar("regex", r"(a)\1"),
    "a NUL": Grammar("regex", "a\x00b"),
    "deep brackets": Grammar("regex", "(" * 9000 + "a" + ")" * 9000),
    "nothing in reach of the vocabulary's bytes": Grammar("ebnf", "root ::= root"),
    "rules in a circle": Grammar("ebnf", "root ::= a\na ::= b\nb ::= a"),
    "an unknown rule": Grammar("ebnf", "root ::= other"),
    "no root": Grammar("ebnf", 'other ::= "a"'),
    "a bad escape": Grammar("ebnf", r'root ::= "\q"'),
    "a number too long": Grammar("ebnf", 'root ::= "a"{99999999999999999999}'),
    "bounds the wrong way": Grammar("ebnf", 'root ::= "a"{5,2}'),
    "deep groups": Grammar("ebnf", "root ::= " + "(" * 20000 + '"a"' + ")" * 20000),
    "thousands of rules": Grammar("ebnf", chain('[a-z]* next | "x" [0-9]+', 3000)),
    "no JSON": Grammar("json_schema", '{"type":'),
    "no schema": schema([1, 2]),
    "an unknown type": schema({"type": "number or so"}),
    "deep arrays": Grammar("json_schema", '{"type":"array","items":' * 4000 + "{}" + "}" * 4000),
    "hundreds of nested arrays": Grammar("json_schema", '{"type":"array","items":' * 700 + "{}" + "}" * 700),
    "a reference to itself": schema({"$ref": "#"}),
    "references in a circle": schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "thousands of properties": schema({"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}),
    "a bad pattern": schema({"type": "string", "pattern": "(("}),
    "no tag": Grammar("structural_tag", '{"type":"structural_tag"}'),
    "an unknown format": Grammar("structural_tag", '{"type":"structural_tag","format":{"type":"x"}}'),
}  # fmt: skip


def test_hostile_grammars_end_as_the_clients_error_and_others_go_on(engine: Engine) -> None:
    requests = [asking(name, [50, 51, 52], grammar, 8) for name, grammar in HOSTILE.items()]
    free = asking("free", [50, 51, 52], None, 20)
    answers = run(engine, [free, *requests, asking("good", [50, 51], GOOD)])
    assert len(answers["free"].tokens) == 20 and len(answers["good"].tokens) > 0
    assert answers["good"].finish == Finish("stop")
    for name in HOSTILE:
        finish = answers[name].finish
        assert finish is not None and finish.error is not None, name
        assert (finish.error.status, finish.error.type) == (400, "invalid_request_error"), name
        assert finish.error.param in ("response_format", "regex", "ebnf"), name
        assert "/project" not in finish.error.message and answers[name].tokens == [], name


@pytest.mark.parametrize(
    "source",
    [
        "[a-z]{1,2000000000}",
        "((((a{1,100}){1,100}){1,100}){1,100}){1,100}",
        "(a|a)*(a|aa)*b(a|b){0,30}(a|b)*a(a|b){22}",
        "(.*a.{200})",
        "(((a*)*)*b?)*[ab]{0,30000}",
        "(.{0,300}a.{0,300}){0,300}",
    ],
)
def test_a_grammar_that_explodes_is_followed_or_refused_but_never_waited_for(engine: Engine, source: str) -> None:
    begin = time.monotonic()
    bias = {80: 100.0}  # the letter a, again and again
    answers = run(
        engine, [asking("a", [50], Grammar("regex", source), 200, logit_bias=bias), asking("b", [51], None, 20)]
    )
    assert len(answers["b"].tokens) == 20
    finish = answers["a"].finish
    assert finish is not None and (finish.error is None or finish.error.status == 400)
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("source", ['root ::= root root | "a"', 'root ::= root root root | "a" | ""'])
def test_an_ambiguous_grammar_ends_when_a_token_takes_too_long(engine: Engine, source: str) -> None:
    answer = run(engine, [asking("a", [50], Grammar("ebnf", source), 400, logit_bias={80: 100.0})])["a"]
    assert answer.finish is not None and answer.finish.error is not None and answer.finish.error.status == 400
    assert "too long to" in answer.finish.error.message and answer.finish.error.param == "ebnf"


@pytest.mark.parametrize(("source", "message"), [("a" * 200_000, "at most 131072"), ("a\ud800", "not valid Unicode")])
def test_a_source_that_is_too_long_or_no_text_is_refused_at_once(engine: Engine, source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        engine.add(asking("a", [5], Grammar("regex", source)))
    assert not engine.has_work


def test_many_requests_share_one_compile_and_later_ones_find_it(engine: Engine, grammars: GrammarQueue) -> None:
    grammar = schema({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(20)}})
    before = len(grammars._kept)
    run(engine, [asking(f"r{i}", [50 + i], grammar, 4) for i in range(6)])
    assert len(grammars._kept) == before + 1
    run(engine, [asking("bad", [5], Grammar("regex", "(a")), asking("again", [5], Grammar("regex", "(a"))])
    assert len(grammars._kept) <= before + 2


def test_an_abort_ends_the_wait_and_the_id_may_come_again(engine: Engine) -> None:
    slow = Grammar("ebnf", chain('[a-z]* next | "y" [0-9]+', 2000))
    engine.add(asking("a", [5], slow))
    assert engine.is_blocked and engine.current_load().waiting == 1
    engine.abort("a")
    assert [(d.id, d.finish) for d in engine.report().deltas] == [("a", Finish("abort"))]
    answer = run(engine, [asking("a", [5], GOOD)])["a"]
    assert answer.finish == Finish("stop")
    deadline = time.monotonic() + 30
    while not engine._grammars.has_done and time.monotonic() < deadline:  # type: ignore[union-attr]
        time.sleep(0.01)
    assert run(engine, [asking("b", [5], GOOD)])["b"].finish == Finish("stop"), "the late news is for nobody"


def test_a_request_for_no_tokens_needs_no_grammar(engine: Engine) -> None:
    assert run(engine, [asking("a", [5], GOOD, 0)])["a"].finish == Finish("length")
    assert len(run(engine, [asking("a", [5], None, 3)])["a"].tokens) == 3


def test_when_the_process_for_trials_dies_one_request_fails_and_the_next_gets_a_new_one(
    engine: Engine, grammars: GrammarQueue
) -> None:
    trials = grammars._workshop._trials
    assert trials is not None
    grammar = Grammar("ebnf", chain('[a-z]* next | "z" [0-9]+', 2500))
    engine.add(asking("a", [5], grammar))
    trials._process.kill()
    deltas = []
    while engine.has_work:
        deltas += engine.step().deltas
    assert deltas[-1].finish is not None and deltas[-1].finish.error is not None
    assert deltas[-1].finish.error.status in (400, 500)
    assert run(engine, [asking("a", [5], Grammar("regex", "[0-7]{3}"))])["a"].finish == Finish("stop")


def test_a_process_for_trials_that_is_still_ending_is_asked_no_more(
    engine: Engine, grammars: GrammarQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = grammars._workshop._trials
    assert trials is not None
    monkeypatch.setattr(trials._process, "poll", lambda: None)
    trials._process.kill()
    until(lambda: not trials.is_alive)
    with pytest.raises(EngineError, match="has ended"):
        trials.check(GOOD)
    assert run(engine, [asking("a", [5], Grammar("regex", "[0-6]{3}"))])["a"].finish == Finish("stop")


class Listener:
    """Collects what a loop publishes."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.ended = threading.Condition()

    def publish(self, report: StepReport) -> None:
        with self.ended:
            for delta in report.deltas:
                answer = self.answers.setdefault(delta.id, Answer())
                answer.tokens += delta.tokens
                answer.finish = delta.finish
            self.ended.notify_all()

    def wait(self, *names: str) -> None:
        with self.ended:
            assert self.ended.wait_for(
                lambda: all(n in self.answers and self.answers[n].finish is not None for n in names), timeout=60
            )


def slow_but_good(number: int) -> Grammar:
    """Some time of compiling."""
    return schema({"enum": [f"value {number} {i}" for i in range(500)]})


def test_a_loop_sleeps_while_grammars_compile_and_is_woken_by_them(engine: Engine) -> None:
    listener = Listener()
    loop = EngineLoop(engine, listener.publish)
    loop.start()
    try:
        steps = engine.current_load().steps
        calls = 0
        step = engine.step

        def counted() -> StepReport:
            nonlocal calls
            calls += 1
            return step()

        engine.step = counted  # type: ignore[method-assign]
        loop.submit(asking("slow", [5], slow_but_good(1), 3))
        listener.wait("slow")
        assert calls <= engine.current_load().steps - steps + 3, "it did not spin"
        loop.submit(asking("bad", [5], Grammar("regex", "(b")))
        listener.wait("bad")
        assert not loop.health().busy
    finally:
        del engine.step  # type: ignore[method-assign]
        loop.stop()


def test_compiles_do_not_hold_up_an_event_loop(engine: Engine) -> None:
    """Gaps are measured against what the same loop sees without compiles: the machine may be busy with other things."""
    listener = Listener()
    loop = EngineLoop(engine, listener.publish)
    loop.start()
    properties = {f"field {i}": {"type": ["string", "integer", "boolean", "number"][i % 4]} for i in range(64)}
    wide = [schema({"type": "object", "properties": properties, "required": [f"field {i}"]}) for i in range(2)]
    requests = [asking(f"s{i}", [5], slow_but_good(2 + i), 2) for i in range(2)]
    requests += [asking(f"w{i}", [5], grammar, 2) for i, grammar in enumerate(wide)]
    try:
        asyncio.run(watch(loop, requests, listener))
    finally:
        loop.stop()


async def watch(loop: EngineLoop, requests: list[Request], listener: Listener) -> None:
    for attempt in range(3):
        for request in requests:
            renamed = Request(f"{request.id}-{attempt}", request.tokens, request.sampling, grammar=request.grammar)
            loop.submit(renamed)
        waiting = asyncio.ensure_future(
            asyncio.to_thread(listener.wait, *(f"{request.id}-{attempt}" for request in requests))
        )
        worst, last = 0.0, time.perf_counter()
        while not waiting.done():
            await asyncio.sleep(0.002)
            now = time.perf_counter()
            worst, last = max(worst, now - last), now
        await waiting
        if worst < 0.05:
            return
        requests = [
            Request(r.id, r.tokens, r.sampling, grammar=Grammar("json_schema", r.grammar.source + " " * (attempt + 1)))
            for r in requests
            if r.grammar is not None
        ]
    raise AssertionError(f"the event loop stood still for {worst:.3f} s")
