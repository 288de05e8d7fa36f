"""Programs on the small model: what they write, in which order, and what is left when something fails."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import psutil
import pytest
from waiting import until

import sgray as sgl
from sgray.errors import InvalidRequestError
from sgray.lang.chat_template import get_chat_template
from sgray.lang.errors import EndpointError, ProgramCancelledError, UnavailableError, WouldBlockError
from sgray.lang.native import NativeBackend

GREEDY = {"temperature": 0, "max_new_tokens": 6}


@sgl.function
def chat(s, question, n=1):
    s += sgl.system("You are helpful.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_new_tokens=10))


@sgl.function
def continued(s, text):
    s += text + sgl.gen("answer")


@pytest.fixture
def dead_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_conversation_is_what_a_chat_call_would_send(small: sgl.Engine) -> None:
    state = chat.run(question="What is the capital of France?", temperature=0)
    assert state["answer"] == "The capital of France is Paris."
    assert state.text() == (
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\nThe capital of France is Paris.<|im_end|>\n"
    )
    assert state.messages()[-1] == {"role": "assistant", "content": "The capital of France is Paris."}
    body = {"model": "small", "messages": state.messages()[:2], "temperature": 0, "max_tokens": 10}
    told = small.loop.run(small.service.chat(body))
    assert told["choices"][0]["message"]["content"] == state["answer"]
    assert state.get_meta_info("answer")["prompt_tokens"] == told["usage"]["prompt_tokens"]


def test_roles_as_contexts_and_as_marks_write_the_same(backend: sgl.Engine) -> None:
    @sgl.function
    def contexts(s):
        with s.system():
            s += "You are helpful."
        with s.user():
            s += "Name a colour."
        with s.assistant():
            s += "Colour: " + sgl.gen("answer")

    @sgl.function
    def marks(s):
        s += sgl.system_begin() + "You are helpful." + sgl.system_end()
        s += sgl.user_begin() + "Name a colour." + sgl.user_end()
        s += sgl.assistant_begin()
        s += "Colour: "
        s += sgl.gen("answer")
        s += sgl.assistant_end()

    one, other = contexts.run(**GREEDY), marks.run(**GREEDY)
    assert one.text() == other.text()
    assert one["answer"] == other["answer"] != ""


def test_text_beside_messages_stands_where_it_was_written(backend: sgl.Engine) -> None:
    @sgl.function
    def mixed(s):
        s += "Preface.\n"
        s += sgl.user("Hi")
        s += "(a note)\n"
        s += sgl.assistant("Well, " + sgl.gen("answer"))

    state = mixed.run(**GREEDY)
    text = state.text()
    assert text.startswith("Preface.\n<|im_start|>system\n")
    assert "<|im_start|>user\nHi<|im_end|>\n(a note)\n<|im_start|>assistant\nWell, " in text
    assert text.count("<|im_start|>system") == 1


def test_the_model_may_speak_for_the_user(backend: sgl.Engine) -> None:
    @sgl.function
    def asks(s):
        s += sgl.user("What is " + sgl.gen("question"))

    state = asks.run(**GREEDY)
    assert state.text().endswith(f"<|im_start|>user\nWhat is {state['question']}<|im_end|>\n")


def test_a_named_template_replaces_the_models_own(backend: sgl.Engine) -> None:
    endpoint = NativeBackend(backend.backend.transport, backend.loop)
    endpoint.chat_template = get_chat_template("vicuna_v1.1")
    state = chat.run(question="Hi", backend=endpoint, **GREEDY)
    assert state.text().startswith("You are helpful. USER:Hi ASSISTANT:")
    with pytest.raises(ValueError, match="there are chatml"):
        sgl.RuntimeEndpoint("http://127.0.0.1:1", chat_template_name="nonsense")


def test_variables_scopes_and_membership(backend: sgl.Engine) -> None:
    @sgl.function
    def scoped(s):
        with s.var_scope("all"):
            s += "One, two, " + sgl.gen("next", max_tokens=2)
        s["mine"] = 7
        assert "next" in s and "mine" in s and "nothing" not in s
        return s["all"]

    state = scoped.run(temperature=0)
    assert state["all"] == "One, two, " + state["next"] == state.return_value
    assert state["mine"] == 7
    with pytest.raises(KeyError, match="nothing"):
        state["nothing"]


def test_a_loop_that_reads_sees_each_new_value(small: sgl.Engine) -> None:
    @sgl.function
    def counts(s):
        s += "1, 2, 3, 4,"
        found = []
        for _ in range(3):
            s += sgl.gen("next", max_tokens=3, stop=",")
            found.append(s["next"])
            s += ","
        return found

    assert counts.run(temperature=0).return_value == [" 5", " 6", " 7"]


def test_several_answers_are_a_list_and_the_first_is_the_text(backend: sgl.Engine) -> None:
    state = continued.run(text="The sky is", n=2, max_new_tokens=3, temperature=0.8)
    assert len(state["answer"]) == 2
    assert state.text() == "The sky is" + state["answer"][0]
    assert len(state.get_meta_info("answer")) == 2


def test_branches_go_on_alone_and_come_back_as_lists_and_by_number(backend: sgl.Engine) -> None:
    @sgl.function
    def tips(s, mode):
        s += "Tips: "
        forks = s.fork(2)
        forks += lambda number: f"({number}) " + sgl.gen("tip", max_tokens=3)
        forks.join(mode)
        s += "|"

    plain = tips.run(mode="gather_variable", temperature=0)
    assert plain["tip"] == [plain["tip_0"], plain["tip_1"]]
    assert plain.text() == "Tips: |"
    whole = tips.run(mode="concate_and_append", temperature=0)
    assert whole.text() == f"Tips: (0) {plain['tip_0']}(1) {plain['tip_1']}|"
    with pytest.raises(ValueError, match="concate_and_append"):
        tips.run(mode="other")


def test_a_branch_keeps_the_open_message_and_a_copy_is_joined(backend: sgl.Engine) -> None:
    @sgl.function
    def branched(s):
        s += sgl.user("Name a river.")
        s += sgl.assistant_begin() + "The river "
        with s.copy() as other:
            other += sgl.gen("river", max_tokens=3) + sgl.assistant_end()
        forks = s.fork(2)
        for fork in forks:
            fork += sgl.gen("name", max_tokens=3)
            fork += sgl.assistant_end()
        s.join(forks)

    state = branched.run(temperature=0)
    assert state["river"] == [state["name_0"]]
    assert state["name"][0] == state["name"][1]


def test_pub_116_branches_of_an_empty_state_write_texts(backend: sgl.Engine) -> None:
    @sgl.function
    def begins_with_a_fork(s):
        forks = s.fork(2)
        for fork, text in zip(forks, ("The sky is", "Grass is"), strict=True):
            fork += text + sgl.gen("a", max_tokens=4)
        forks.join()

    before = backend.get_server_info()["internal_states"][0]["requests"]
    state = begins_with_a_fork.run(temperature=0)
    assert all(state["a"]) and len(state["a"]) == 2
    assert backend.get_server_info()["internal_states"][0]["requests"] == before + 2


def test_a_fork_costs_one_request_a_branch_and_the_prefix_once(backend: sgl.Engine) -> None:
    prefix = (
        "A long beginning that all the branches of this program share, word for word, so that it is computed once. " * 4
    )

    @sgl.function
    def wide(s):
        s += prefix
        forks = s.fork(6)
        for number, fork in enumerate(forks):
            fork += f"{number}:" + sgl.gen("a", max_tokens=1)
        return forks

    state = wide.run(temperature=0)
    cached = sorted(fork.get_meta_info("a")["cached_tokens"] for fork in state.return_value)
    assert cached[0] < 20 and cached[1] >= 80


def test_a_branch_needs_no_thread(backend: sgl.Engine) -> None:
    @sgl.function
    def wide(s, item):
        s += f"{item}:"
        forks = s.fork(64)
        for number, fork in enumerate(forks):
            fork += f"{number}" + sgl.gen("a", max_tokens=1)
        forks.join()
        s["count"] = len(s["a"])

    process, most, is_done = psutil.Process(), [0, 0], threading.Event()
    before = [threading.active_count(), process.num_threads()]  # other tests' as well

    def watch() -> None:
        while not is_done.wait(0.01):
            most[0] = max(most[0], threading.active_count())
            most[1] = max(most[1], process.num_threads())

    watcher = threading.Thread(target=watch)
    watcher.start()
    states = wide.run_batch([{"item": number} for number in range(16)], temperature=0)
    is_done.set()
    watcher.join()
    assert [len(state["a"]) for state in states] == [64] * 16
    assert [state["count"] for state in states] == [64] * 16
    more = [most[index] - before[index] for index in range(2)]
    assert 16 <= more[0] <= 28, more  # the bodies read, so each of the 16 has its thread; the 1,024 branches have none
    assert more[1] <= 32, more  # also of those that are not Python's


def test_a_batch_keeps_order_and_takes_tuples_and_options(backend: sgl.Engine) -> None:
    texts = ["One, two,", "The sky is", "A, B, C,"]
    alone = [continued.run(text=text, **GREEDY)["answer"] for text in texts]
    assert [
        s["answer"] for s in continued.run_batch([{"text": text} for text in texts], num_threads=1, **GREEDY)
    ] == alone
    assert [s["answer"] for s in continued.run_batch([(text,) for text in texts], progress_bar=True, **GREEDY)] == alone
    states = continued.run_batch([{"text": text} for text in texts], generator_style=True, **GREEDY)
    assert next(states)["answer"] == alone[0]
    states.close()
    assert sgl.batch_infer(texts, **GREEDY) == alone
    assert [s["answer"] for s in sgl.batch_infer(continued, [{"text": texts[0]}], **GREEDY)] == alone[:1]
    assert continued.run_batch([]) == []


def test_bound_arguments_and_traces(backend: sgl.Engine) -> None:
    @sgl.function
    def shots(s, examples, question):
        s += "Answer as in the examples.\n"
        s += examples
        s += question + sgl.gen("answer")
        s += "!" if s["answer"] else "?"

    bound = shots.bind(examples="Q: 1+1\nA: 2\n")
    trace = bound.trace()
    assert trace.prefix == "Answer as in the examples.\nQ: 1+1\nA: 2\n"
    assert [type(one).__name__ for one in trace.expressions[-2:]] == ["Argument", "Gen"] and not trace.is_whole
    assert bound.run(question="Q: 2+2\nA:", temperature=0, max_new_tokens=3)["answer"]
    with pytest.raises(TypeError, match="no argument 'exampels'"):
        shots.bind(exampels="")


def test_a_program_can_be_a_part_of_another(backend: sgl.Engine) -> None:
    @sgl.function
    def outer(s):
        continued(s, "The sky is")
        s += "."

    assert outer.run(**GREEDY).text().startswith("The sky is")
    assert continued("The sky is", **GREEDY)["answer"]


def test_texts_come_in_pieces(backend: sgl.Engine) -> None:
    whole = chat.run(question="Name a colour.", temperature=0)
    state = chat.run(question="Name a colour.", temperature=0, stream=True)
    pieces = list(state.text_iter("answer"))
    assert len(pieces) > 2 and "".join(pieces) == whole["answer"]
    state = chat.run(question="Name a colour.", temperature=0, stream=True)
    assert "".join(state.text_iter()) == whole.text() == state.text()
    assert "".join(whole.text_iter("answer")) == whole["answer"]

    async def read() -> list[tuple[str, object]]:
        state = chat.run(question="Name a colour.", temperature=0, stream=True)
        return [item async for item in state.text_async_iter("answer", return_meta_data=True)]

    found = asyncio.run(read())
    assert "".join(text for text, _ in found) == whole["answer"]


def test_async_programs_and_coroutines(backend: sgl.Engine) -> None:
    @sgl.function
    async def twice(s, text):
        s += text + sgl.gen("one", max_tokens=3)
        first = await s.get("one")
        forks = s.fork(2)
        for fork in forks:
            fork += sgl.gen("two", max_tokens=3)
        forks.join()
        return first, await s.get("two")

    expected = twice.run(text="The sky is", temperature=0).return_value
    assert expected[0] and expected[1][0] == expected[1][1]

    async def gathered() -> list[object]:
        runs = [twice.run_async(text="The sky is", temperature=0), continued.run_async(text="The sky is", **GREEDY)]
        states = await asyncio.gather(*runs)
        return [states[0].return_value, states[1]["answer"].startswith(states[0]["one"])]

    assert asyncio.run(gathered()) == [expected, True]
    streamed = twice.run(text="The sky is", temperature=0, stream=True)
    assert "".join(streamed.text_iter("one")) == expected[0]
    streamed.sync()
    assert streamed.return_value == expected


def test_a_blocking_read_in_an_async_program_is_an_error_and_not_a_deadlock(backend: sgl.Engine) -> None:
    @sgl.function
    async def blocks(s):
        s += "The sky is" + sgl.gen("one", max_tokens=3)
        return s["one"]

    with pytest.raises(WouldBlockError, match=r"await s\.get"):
        blocks.run()


def test_a_cancelled_program_frees_the_engine(backend: sgl.Engine) -> None:
    @sgl.function
    def endless(s):
        forks = s.fork(3)
        for fork in forks:
            fork += "Once" + sgl.gen("a", max_tokens=4000, ignore_eos=True)
        forks.join()

    def runs() -> int:
        return backend.get_server_info()["internal_states"][0]["running"]

    state = endless.run(stream=True)
    until(lambda: runs() == 3)
    state.cancel()
    with pytest.raises(ProgramCancelledError):
        state["a"]
    until(lambda: runs() == 0)
    state = endless.run(stream=True)
    until(lambda: runs() == 3)
    del state  # nobody can read it any more
    until(lambda: runs() == 0)

    async def left() -> None:
        task = asyncio.create_task(endless.run_async())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(left())
    until(lambda: runs() == 0)


def test_an_error_of_the_function_stops_what_it_started(backend: sgl.Engine) -> None:
    @sgl.function
    def breaks(s):
        s += "Once" + sgl.gen("a", max_tokens=4000, ignore_eos=True)
        raise LookupError("of my own")

    with pytest.raises(LookupError, match="of my own"):
        breaks.run()
    state = breaks.run(stream=True)
    with pytest.raises(LookupError):
        list(state.text_iter())
    until(lambda: backend.get_server_info()["internal_states"][0]["running"] == 0)


def test_pub_118_a_branch_that_fails_tells_its_caller_and_spares_the_others(backend: sgl.Engine) -> None:
    kept = []

    @sgl.function
    def one_fails(s, wrong):
        s += "The sky is"
        forks = s.fork(3)
        kept[:] = forks
        for number, fork in enumerate(forks):
            fork += sgl.gen("a", max_tokens=3, top_p=7.0 if number == 1 and wrong else None)
        forks.join()
        return s["a"]

    with pytest.raises(InvalidRequestError, match="top_p"):
        one_fails.run(wrong=True, temperature=0)
    assert kept[0]["a"] == kept[2]["a"] != ""
    assert isinstance(kept[1].error(), InvalidRequestError)
    good, bad = one_fails.run_batch([{"wrong": False}, {"wrong": True}], temperature=0)
    assert len(good["a"]) == 3 and good.error() is None
    assert isinstance(bad.error(), InvalidRequestError)
    assert bad["a_0"] == bad["a_2"] == kept[0]["a"]
    with pytest.raises(InvalidRequestError):
        bad["a"]
    with pytest.raises(InvalidRequestError):
        list(one_fails.run(wrong=True, stream=True).text_iter())


def test_pub_118_a_bad_pattern_is_refused_where_it_is_written(backend: sgl.Engine) -> None:
    @sgl.function
    def one_is_bad(s):
        for number, fork in enumerate(s.fork(3)):
            fork += "x" + sgl.gen("a", max_tokens=2, regex="a(" if number == 1 else None)

    with pytest.raises(ValueError, match="is not a regular expression"):
        one_is_bad.run()
    assert isinstance(one_is_bad.run_batch([{}])[0].error(), ValueError)
    for schema in ("{", 7):
        with pytest.raises(ValueError, match="json_schema"):
            sgl.gen("x", json_schema=schema)


def test_pub_118_a_server_that_is_down_is_an_error_within_seconds(dead_url: str) -> None:
    endpoint = sgl.RuntimeEndpoint(dead_url)
    started = time.monotonic()
    with pytest.raises(EndpointError, match="cannot reach"):
        chat.run(question="Hi", backend=endpoint)
    states = chat.run_batch([{"question": "Hi"}, {"question": "Ho"}], backend=endpoint)
    assert all(isinstance(state.error(), EndpointError) for state in states)
    for name in (None, "answer"):
        with pytest.raises(EndpointError):
            list(chat.run(question="Hi", backend=endpoint, stream=True).text_iter(name))
    assert time.monotonic() - started < 10
    endpoint.close()


def test_what_cannot_be_is_refused_by_name(backend: sgl.Engine) -> None:
    for refused in (lambda: sgl.image("a.png"), lambda: sgl.video("a.mp4", 4)):
        with pytest.raises(UnavailableError, match="text alone"):
            refused()
    with pytest.raises(UnavailableError, match="num_api_spec_tokens"):
        sgl.function(num_api_spec_tokens=64)
    with pytest.raises(ValueError, match="called s"):
        sgl.function(lambda state: None)
    with pytest.raises(ValueError, match="None was appended"):
        sgl.function(lambda s: s.__iadd__(None)).run()
    with pytest.raises(TypeError, match="text or an expression"):
        sgl.function(lambda s: s.__iadd__(7)).run()
    with pytest.raises(TypeError, match="questoin"):
        chat.run(questoin="Hi")
    with pytest.raises(AttributeError, match=r"use sgray\.OpenAI"):
        sgl.Anthropic  # noqa: B018
    with pytest.raises(ValueError, match="begins inside"):
        sgl.function(lambda s: s.__iadd__(sgl.user_begin() + sgl.assistant("x"))).run()
    with pytest.raises(ValueError, match="has not begun"):
        sgl.function(lambda s: s.__iadd__(sgl.user_end())).run()


def test_without_a_backend_it_is_said_how_to_give_one() -> None:
    with pytest.raises(ValueError, match="set_default_backend"):
        chat.run(question="Hi")
    with pytest.raises(TypeError, match="str is no backend"):
        sgl.set_default_backend("http://127.0.0.1:30000")


def test_every_public_name_is_there() -> None:
    for name in sgl.__all__:
        assert getattr(sgl, name) is not None
        assert name in dir(sgl)
