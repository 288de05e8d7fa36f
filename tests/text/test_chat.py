from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from transformers import PreTrainedTokenizerFast

from sgray.errors import InvalidRequestError, ModelLoadError
from sgray.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

HI = [{"role": "user", "content": "Hi"}]
HI_PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
PARTS_ONLY = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}<{{ m.content }}>"
    "{% else %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture
def with_template(model_dir: Path, tmp_path: Path) -> Callable[[str], Tokenizer]:
    """Makes the default model's tokenizer with another template, given as a file."""

    def make(template: str) -> Tokenizer:
        path = tmp_path / "template.jinja"
        path.write_text(template, encoding="utf-8")
        return Tokenizer.load(model_dir, str(path))

    return make


def tokenizer_dir(model_dir: Path, target: Path, *, template_in_config: str | None, template_file: str | None) -> Path:
    shutil.copy(model_dir / "tokenizer.json", target)
    config = json.loads((model_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
    config.pop("chat_template")
    if template_in_config is not None:
        config["chat_template"] = template_in_config
    (target / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template_file is not None:
        (target / "chat_template.jinja").write_text(template_file, encoding="utf-8")
    return target


def test_the_models_own_template_gives_its_default_system_prompt(tokenizer: Tokenizer) -> None:
    assert tokenizer.render_chat(HI) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_list_of_text_parts_gives_the_same_prompt_as_text_pub_069(tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template(HI)
    assert len(ids) == 31
    assert tokenizer.apply_chat_template(HI_PARTS) == ids


def test_several_text_parts_all_reach_the_prompt(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    assert "user\nfirst\nsecond<|im_end|>" in tokenizer.render_chat([{"role": "user", "content": parts}])


def test_a_template_that_knows_parts_alone_gets_text_as_a_part(with_template: Callable[[str], Tokenizer]) -> None:
    tokenizer = with_template(PARTS_ONLY)
    assert tokenizer.render_chat(HI) == tokenizer.render_chat(HI_PARTS) == "<Hi>"


def test_a_template_that_knows_both_gets_messages_as_they_are(with_template: Callable[[str], Tokenizer]) -> None:
    tokenizer = with_template(BOTH)
    assert (tokenizer.render_chat(HI), tokenizer.render_chat(HI_PARTS)) == ("<Hi>", "[Hi]")


@pytest.mark.parametrize("empty", [{"content": None}, {}], ids=["null", "left out"])
def test_an_assistant_message_with_tool_calls_needs_no_content_pub_070(
    tokenizer: Tokenizer, empty: dict[str, Any]
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":2,"b":2}'}}
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "tool_calls": [call], **empty},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "user", "content": "so?"},
    ]
    text = tokenizer.render_chat(messages)
    assert "<|im_start|>assistant\n<|im_end|>" in text and "None" not in text


def test_no_messages_are_refused_and_an_assistant_alone_is_not_pub_071(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="at least one message") as caught:
        tokenizer.apply_chat_template([])
    assert caught.value.param == "messages"
    assert tokenizer.apply_chat_template([{"role": "assistant", "content": "Hello"}])


@pytest.mark.parametrize("content", ["OK!", "OK!\n", "OK! "])
def test_a_continued_message_keeps_its_end_pub_072(tokenizer: Tokenizer, model_dir: Path, content: str) -> None:
    messages = [{"role": "user", "content": "Tell a joke"}, {"role": "assistant", "content": content}]
    text = tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\n" + content)
    theirs = PreTrainedTokenizerFast.from_pretrained(model_dir)
    assert text == theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)


def test_continuing_and_prompting_for_an_answer_exclude_each_other(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        tokenizer.render_chat(HI, add_generation_prompt=True, continue_final_message=True)


def test_what_the_template_raises_is_the_clients_error_pub_074(with_template: Callable[[str], Tokenizer]) -> None:
    tokenizer = with_template(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(InvalidRequestError, match="System role not supported") as caught:
        tokenizer.render_chat([{"role": "system", "content": "Be brief"}, *HI])
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert tokenizer.render_chat(HI) == "Hi"


@pytest.mark.parametrize("expression", ["1 / 0", "messages + 1", "messages[9].role", "none.x.y", "'a'.nope()"])
def test_an_error_in_the_template_is_never_a_fault_of_the_server(
    with_template: Callable[[str], Tokenizer], expression: str
) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        with_template("{{ " + expression + " }}").render_chat(HI)


def test_a_template_cannot_leave_its_sandbox(with_template: Callable[[str], Tokenizer]) -> None:
    with pytest.raises(InvalidRequestError, match="unsafe"):
        with_template("{{ ''.__class__.__mro__[1].__subclasses__() }}").render_chat(HI)
    with pytest.raises(InvalidRequestError, match="unsafe"):
        with_template("{{ messages.append(1) }}").render_chat(HI)


@pytest.mark.parametrize(
    ("in_config", "in_file", "text"),
    [(None, "file", "file"), ("config", "file", "file"), ("config", None, "config")],
    ids=["file alone", "both", "config alone"],
)
def test_the_separate_template_file_comes_first_pub_075(
    model_dir: Path, tmp_path: Path, in_config: str | None, in_file: str | None, text: str
) -> None:
    tokenizer = Tokenizer.load(tokenizer_dir(model_dir, tmp_path, template_in_config=in_config, template_file=in_file))
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(HI) == text


def test_without_a_template_only_chat_is_refused_pub_075(model_dir: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_dir(model_dir, tmp_path, template_in_config=None, template_file=None))
    assert not tokenizer.has_chat_template
    assert tokenizer.encode("DEF") == [33203]
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.apply_chat_template(HI)


def test_an_image_is_refused_and_not_dropped_pub_076(tokenizer: Tokenizer) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    message = {"role": "user", "content": [{"type": "text", "text": "what is this"}, image]}
    with pytest.raises(InvalidRequestError, match=r"text alone.*image_url") as caught:
        tokenizer.apply_chat_template([message])
    assert caught.value.param == "messages"


def test_variables_reach_the_template_but_cannot_replace_it(with_template: Callable[[str], Tokenizer]) -> None:
    tokenizer = with_template("{{ mood }}")
    assert tokenizer.render_chat(HI, template_kwargs={"mood": "calm"}) == "calm"
    for name in ("chat_template", "tokenize", "conversation", "messages", "tools", "add_generation_prompt"):
        with pytest.raises(InvalidRequestError, match=name):
            tokenizer.render_chat(HI, template_kwargs={name: "{{ 1 }}"})


def test_tools_reach_the_template(with_template: Callable[[str], Tokenizer]) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    tokenizer = with_template("{{ tools[0].function.name if tools else 'none' }}")
    assert tokenizer.render_chat(HI, tools=[tool]) == "add"
    assert tokenizer.render_chat(HI) == "none"


def test_a_broken_or_missing_template_file_is_refused_at_load(
    with_template: Callable[[str], Tokenizer], model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match="not valid Jinja"):
        with_template("{% for m in messages %}")
    with pytest.raises(ModelLoadError, match="nowhere"):
        Tokenizer.load(model_dir, str(tmp_path / "nowhere.jinja"))


def test_a_template_with_a_generation_block_is_fine(with_template: Callable[[str], Tokenizer]) -> None:
    assert with_template("{% generation %}{{ messages[0].content }}{% endgeneration %}").render_chat(HI) == "Hi"


def test_the_callers_messages_are_left_alone(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "content": None}]
    before = json.dumps(messages)
    tokenizer.render_chat(messages)
    assert json.dumps(messages) == before
