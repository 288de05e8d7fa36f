"""Anthropic's messages as chat messages: checked block by block, and gathered in turns. Text only.

Marks for the cache are accepted wherever they may stand and change nothing: prefixes are found by their content.
"""

from __future__ import annotations

import json
from typing import NoReturn

from sgray.serve.openai.conversation import Conversation
from sgray.serve.openai.forms import Json
from sgray.serve.openai.validate import checked_text, missing, shown, unknown_name, wrong_type, wrong_value

PARAM = "messages"

_ROLES = ("user", "assistant", "system")
_FIELDS: dict[str, tuple[str, ...]] = {
    "text": ("text", "citations"),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input", "caller", "toolset_name"),
    "tool_result": ("tool_use_id", "content", "is_error", "toolset_name"),
}
_ALLOWED = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
    "tool_result": ("text",),
}
_MEDIA = {"image": "images", "document": "documents", "search_result": "search results", "container_upload": "files"}
_ERROR_MARK = "Error: "  # chat knows no failed results, so the text says it


def chat_messages(messages: list[Json], system: object) -> tuple[list[Json], bool]:
    """Chat's messages, and whether the last is the beginning of the answer, which goes on in it.

    Raises InvalidRequestError that names the first wrong place.
    """
    conversation = Conversation()
    if system is not None:
        for text in _texts("system", "system", system):
            conversation.extend("system", text)
    for index, message in enumerate(messages):
        _message(f"{PARAM}[{index}]", message, conversation)
    last = conversation.messages[-1]
    if last["role"] != "assistant":
        return conversation.messages, False
    if "tool_calls" in last:
        place = f"{PARAM}[{len(messages) - 1}]"
        wrong_value(PARAM, place, "its tool_use blocks need tool_result blocks in a user message after them.")
    if last["content"]:
        return conversation.messages, True
    return conversation.messages[:-1], False  # an empty beginning is none


def check_cache_control(param: str, place: str, value: object) -> None:
    """Accept a mark for the cache; raises where it is none."""
    if value is None:
        return
    if not isinstance(value, dict):
        wrong_type(param, place, "an object", value)
    if value.get("type") != "ephemeral":
        wrong_value(param, f"{place}.type", f"{shown(value.get('type'))} is not 'ephemeral'.")
    if value.get("ttl") not in (None, "5m", "1h"):
        wrong_value(param, f"{place}.ttl", f"{shown(value['ttl'])} is not '5m' or '1h'.")


def _message(place: str, message: Json, conversation: Conversation) -> None:
    role = message.get("role")
    if role is None:
        missing(PARAM, f"{place}.role")
    if not isinstance(role, str) or role not in _ROLES:
        wrong_value(PARAM, f"{place}.role", f"{shown(role)} is not one of {', '.join(_ROLES)}.")
    for name in message:
        if name not in ("role", "content"):
            raise unknown_name(PARAM, f"{place}.{name}", ["role", "content"])
    content = message.get("content")
    if content is None:
        missing(PARAM, f"{place}.content")
    if not content and isinstance(content, str | list):
        _empty(f"{place}.content", role, content, conversation)
        return
    for at, block in _blocks(PARAM, f"{place}.content", content, role):
        _block(at, block, role, conversation)


def _empty(place: str, role: str, content: object, conversation: Conversation) -> None:
    if isinstance(content, list) and role != "assistant":
        wrong_value(PARAM, place, "the array of blocks is empty.")
    conversation.extend(role, "")


def _block(place: str, block: Json, role: str, conversation: Conversation) -> None:
    """One block of a message into the conversation."""
    match block["type"]:
        case "text":
            conversation.extend(role, _text(PARAM, place, "text", block))
        case "thinking":
            conversation.muse(_text(PARAM, place, "thinking", block))
        case "redacted_thinking":
            return  # its maker alone can read it; thoughts of another model are left out
        case "tool_use":
            conversation.call(_tool_use(place, block))
        case _:
            _tool_result(place, block, conversation)


def _tool_use(place: str, block: Json) -> Json:
    """Chat's form of a call."""
    if block.get("caller", {"type": "direct"}) != {"type": "direct"}:
        wrong_value(PARAM, f"{place}.caller", "the model alone calls tools here.")
    given = block.get("input")
    if not isinstance(given, dict):
        wrong_type(PARAM, f"{place}.input", "an object", given)
    arguments = checked_text(PARAM, f"{place}.input", json.dumps(given, ensure_ascii=False))
    function = {"name": _text(PARAM, place, "name", block), "arguments": arguments}
    return {"id": _text(PARAM, place, "id", block), "type": "function", "function": function}


def _tool_result(place: str, block: Json, conversation: Conversation) -> None:
    identity = _text(PARAM, place, "tool_use_id", block)
    if identity not in conversation.call_ids:
        wrong_value(PARAM, f"{place}.tool_use_id", f"no tool_use with the id {shown(identity)} stands before it.")
    is_error = block.get("is_error", False)
    if not isinstance(is_error, bool):
        wrong_type(PARAM, f"{place}.is_error", "a boolean", is_error)
    texts = _texts(PARAM, f"{place}.content", block.get("content", ""), role="tool_result")
    text = (_ERROR_MARK if is_error else "") + "\n".join(texts)
    conversation.add("tool", text, tool_call_id=identity)


def _texts(param: str, place: str, value: object, role: str = "system") -> list[str]:
    """The texts of a string, or of blocks of text."""
    if value in ("", []):
        return [""]
    return [_text(param, at, "text", block) for at, block in _blocks(param, place, value, role)]


def _blocks(param: str, place: str, value: object, role: str) -> list[tuple[str, Json]]:
    """Blocks, each with its place and a type that may stand there; a string is one of text."""
    if isinstance(value, str):
        return [(place, {"type": "text", "text": checked_text(param, place, value)})]
    if not isinstance(value, list):
        wrong_type(param, place, "a string or an array of blocks", value)
    return [
        (f"{place}[{index}]", _checked(param, f"{place}[{index}]", block, role)) for index, block in enumerate(value)
    ]


def _checked(param: str, place: str, block: object, role: str) -> Json:
    """A block without its null fields and its mark for the cache. Media are refused, never dropped."""
    if not isinstance(block, dict):
        wrong_type(param, place, "an object", block)
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in _ALLOWED[role]:
        _wrong_kind(param, place, kind, role)
    check_cache_control(param, f"{place}.cache_control", block.get("cache_control"))
    given = {name: value for name, value in block.items() if value is not None and name != "cache_control"}
    for name in given:
        if name not in ("type", *_FIELDS[kind]):
            raise unknown_name(param, f"{place}.{name}", ["type", *_FIELDS[kind], "cache_control"])
    if given.get("citations"):
        wrong_value(param, f"{place}.citations", "the model reads no citations; leave them out.")
    if "toolset_name" in given:
        wrong_value(param, f"{place}.toolset_name", "there are no tool sets here.")
    return given


def _wrong_kind(param: str, place: str, kind: object, role: str) -> NoReturn:
    if kind is None:
        missing(param, f"{place}.type")
    if isinstance(kind, str) and kind in _MEDIA:
        wrong_value(param, place, f"this model takes no {_MEDIA[kind]}, only text.")
    wrong_value(param, f"{place}.type", f"{shown(kind)} is not one of {', '.join(_ALLOWED[role])}, which may be here.")


def _text(param: str, place: str, name: str, block: Json) -> str:
    """A field that must be there and be a text."""
    if name not in block:
        missing(param, f"{place}.{name}")
    return checked_text(param, f"{place}.{name}", block[name])
