"""The input of a response as chat messages: checked item by item, and gathered in turns. Text only."""

from __future__ import annotations

from typing import Any, NoReturn

from sgray.serve.openai.conversation import Conversation
from sgray.serve.openai.forms import Json
from sgray.serve.openai.validate import checked_text, missing, shown, unknown_name, wrong_type, wrong_value

PARAM = "input"

_ROLES = ("user", "assistant", "system", "developer")
_FIELDS: dict[str, tuple[str, ...]] = {
    "message": ("type", "role", "content", "id", "status", "phase"),
    "function_call": ("type", "call_id", "name", "arguments", "id", "status", "async", "caller", "namespace"),
    "function_call_output": ("type", "call_id", "output", "id", "status", "caller", "name", "namespace"),
    "reasoning": ("type", "summary", "content", "encrypted_content", "id", "status"),
}
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_PART_FIELDS = ("type", "text", "refusal", "annotations", "logprobs", "prompt_cache_breakpoint")
_MEDIA = {"input_image": "images", "input_file": "files", "input_audio": "audio"}


def chat_messages(given: object, instructions: str | None) -> list[Json]:
    """The messages that instructions and input make; raises InvalidRequestError that names the first wrong place."""
    conversation = Conversation()
    if instructions is not None:
        conversation.add("system", checked_text("instructions", "instructions", instructions))
    if given is None:
        missing(PARAM, PARAM)
    if isinstance(given, str):
        conversation.add("user", checked_text(PARAM, PARAM, given))
        return conversation.messages
    if not isinstance(given, list):
        wrong_type(PARAM, PARAM, "a string or an array of items", given)
    if not given:
        wrong_value(PARAM, PARAM, "the array needs at least one item.")
    for index, item in enumerate(given):
        _read(f"{PARAM}[{index}]", item, conversation)
    return conversation.messages


def _read(place: str, item: object, conversation: Conversation) -> None:
    """One item into the conversation."""
    if not isinstance(item, dict):
        wrong_type(PARAM, place, "an object", item)
    item_type = item.get("type") or ("message" if "role" in item else None)
    if item_type is None:
        missing(PARAM, f"{place}.type")
    if item_type == "item_reference":
        wrong_value(PARAM, place, "items are not stored; send the item itself.")
    if not isinstance(item_type, str) or item_type not in _FIELDS:
        wrong_value(PARAM, f"{place}.type", f"{shown(item_type)} is not one of {', '.join(_FIELDS)}.")
    given = {name: value for name, value in item.items() if value is not None}
    for name in given:
        if name not in _FIELDS[item_type]:
            raise unknown_name(PARAM, f"{place}.{name}", list(_FIELDS[item_type]))
    if item_type == "message":
        _message(place, given, conversation)
    elif item_type == "reasoning":
        conversation.think(_thought(place, given))
    else:
        _tool_item(place, item_type, given, conversation)


def _message(place: str, given: Json, conversation: Conversation) -> None:
    role = given.get("role")
    if role not in _ROLES:
        wrong_value(PARAM, f"{place}.role", f"{shown(role)} is not one of {', '.join(_ROLES)}.")
    if "content" not in given:
        missing(PARAM, f"{place}.content")
    content = _content(f"{place}.content", given["content"])
    if role == "assistant":
        conversation.say(content)
    else:
        conversation.add(role, content)


def _tool_item(place: str, item_type: str, given: Json, conversation: Conversation) -> None:
    """A call, or what came of one."""
    if given.get("async"):
        wrong_value(PARAM, f"{place}.async", "calls are returned in the answer, and waited for.")
    if "namespace" in given:
        wrong_value(PARAM, f"{place}.namespace", "tools have no namespaces here.")
    if given.get("caller", {"type": "direct"}) != {"type": "direct"}:
        wrong_value(PARAM, f"{place}.caller", "the model alone calls tools here.")
    call_id = _text(place, "call_id", given)
    if item_type == "function_call":
        function = {"name": _text(place, "name", given), "arguments": _text(place, "arguments", given)}
        conversation.call({"id": call_id, "type": "function", "function": function})
        return
    if call_id not in conversation.call_ids:
        reason = f"no function_call with the call_id {shown(call_id)} stands before it, and earlier calls are not kept."
        wrong_value(PARAM, f"{place}.call_id", reason)
    if "output" not in given:
        missing(PARAM, f"{place}.output")
    conversation.add("tool", _content(f"{place}.output", given["output"]), tool_call_id=call_id)


def _thought(place: str, given: Json) -> str:
    """The text of a reasoning item: all of it where it is there, else its summary. Encrypted text is its maker's."""
    for name, part_type in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = given.get(name, [])
        if not isinstance(parts, list):
            wrong_type(PARAM, f"{place}.{name}", "an array", parts)
        texts = [_thought_part(f"{place}.{name}[{index}]", part, part_type) for index, part in enumerate(parts)]
        if texts:
            return "\n".join(texts)
    return ""


def _thought_part(place: str, part: object, part_type: str) -> str:
    if not isinstance(part, dict) or part.get("type") != part_type:
        wrong_value(PARAM, place, f"expected an object of type {part_type!r}.")
    return _text(place, "text", part)


def _content(place: str, value: object) -> str | list[Json]:
    if isinstance(value, str):
        return checked_text(PARAM, place, value)
    if not isinstance(value, list):
        wrong_type(PARAM, place, "a string or an array of parts", value)
    if not value:
        wrong_value(PARAM, place, "the array of parts is empty.")
    return [_part(f"{place}[{index}]", part) for index, part in enumerate(value)]


def _part(place: str, part: object) -> Json:
    """A part as chat has it; media are refused, never dropped."""
    if not isinstance(part, dict):
        wrong_type(PARAM, place, "an object", part)
    part_type = part.get("type")
    if isinstance(part_type, str) and part_type in _MEDIA:
        wrong_value(PARAM, place, f"this model takes no {_MEDIA[part_type]}, only text.")
    if not isinstance(part_type, str) or part_type not in _TEXTS:
        _no_text(place, part_type)
    for name, value in part.items():
        if value is not None and name not in _PART_FIELDS:
            raise unknown_name(PARAM, f"{place}.{name}", list(_PART_FIELDS))
    return {"type": "text", "text": _text(place, _TEXTS[part_type], part)}


def _no_text(place: str, part_type: object) -> NoReturn:
    if part_type is None:
        missing(PARAM, f"{place}.type")
    reason = f"{shown(part_type)} is not one of {', '.join(_TEXTS)}, the types that this model takes."
    wrong_value(PARAM, f"{place}.type", reason)


def _text(place: str, name: str, given: dict[str, Any]) -> str:
    if given.get(name) is None:
        missing(PARAM, f"{place}.{name}")
    return checked_text(PARAM, f"{place}.{name}", given[name])
