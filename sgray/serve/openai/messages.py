"""Chat messages: checked by role, and brought into the plain form that chat templates take. Text only.

Lists of text parts stay lists: the text side knows in which form a template reads them. The role "developer" becomes
"system", its older name, which is the one that templates know.
"""

from __future__ import annotations

import json
from typing import Any

from sgray.serve.openai.validate import checked_text, kind, missing, shown, unknown_name, wrong_type, wrong_value

PARAM = "messages"

_COMMON = ("role", "content", "name")
_FIELDS: dict[str, tuple[str, ...]] = {
    "system": _COMMON,
    "developer": _COMMON,
    "user": _COMMON,
    "assistant": (*_COMMON, "tool_calls", "refusal", "reasoning_content", "annotations", "audio", "function_call"),
    "tool": (*_COMMON, "tool_call_id"),
}
_MEDIA = {"image_url": "images", "input_audio": "audio", "video_url": "videos", "file": "files"}


def check_counts(messages: list[dict[str, Any]], max_messages: int, max_parts: int) -> None:
    """Raises InvalidRequestError where there are more messages, or more parts in one of them, than allowed."""
    if len(messages) > max_messages:
        wrong_value(PARAM, PARAM, f"{len(messages)} messages, at most {max_messages} are allowed.")
    for index, message in enumerate(messages):
        parts = message.get("content")
        if isinstance(parts, list) and len(parts) > max_parts:
            place = f"{PARAM}[{index}].content"
            wrong_value(PARAM, place, f"{len(parts)} parts in one message, at most {max_parts} are allowed.")


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a chat template; raises InvalidRequestError that names the first wrong place."""
    return [_message(f"{PARAM}[{index}]", message) for index, message in enumerate(messages)]


def num_chars(messages: list[dict[str, Any]]) -> int:
    """How long the texts of checked messages are together."""
    contents = [message["content"] for message in messages]
    return sum(len(text) for text in contents if isinstance(text, str)) + sum(
        len(part["text"]) for parts in contents if isinstance(parts, list) for part in parts
    )


def _message(place: str, message: dict[str, Any]) -> dict[str, Any]:
    """One checked message."""
    role = message.get("role")
    if role is None:
        missing(PARAM, f"{place}.role")
    if not isinstance(role, str):
        wrong_type(PARAM, f"{place}.role", "a string", role)
    if role not in _FIELDS:
        wrong_value(PARAM, f"{place}.role", f"{shown(role)} is not one of {', '.join(_FIELDS)}.")
    given = {name: value for name, value in message.items() if value is not None}
    for name in message:
        if name not in _FIELDS[role]:
            raise unknown_name(PARAM, f"{place}.{name}", list(_FIELDS[role]))
    plain: dict[str, Any] = {"role": "system" if role == "developer" else role}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if name in given:
            plain[name] = checked_text(PARAM, f"{place}.{name}", given[name])
    if role == "tool" and "tool_call_id" not in plain:
        wrong_value(PARAM, place, "a tool message needs tool_call_id, the id of the call that it answers.")
    return plain | (_assistant(place, given) if role == "assistant" else {"content": _required_content(place, given)})


def _assistant(place: str, given: dict[str, Any]) -> dict[str, Any]:
    """The content and the tool calls of an assistant message, of which one must be there."""
    for name in ("audio", "function_call"):
        if name in given:
            wrong_value(PARAM, f"{place}.{name}", "it is not supported; leave it out.")
    calls = _tool_calls(f"{place}.tool_calls", given.get("tool_calls", []))
    said = given.get("content", given.get("refusal"))
    if said is None and not calls:
        wrong_value(PARAM, place, "an assistant message needs content unless it has tool_calls.")
    content = "" if said is None else _content(f"{place}.content", said)
    return {"content": content, "tool_calls": calls} if calls else {"content": content}


def _required_content(place: str, given: dict[str, Any]) -> str | list[dict[str, str]]:
    if "content" not in given:
        wrong_value(
            PARAM, f"{place}.content", f"a message of role {given['role']} needs a string or an array of parts."
        )
    return _content(f"{place}.content", given["content"])


def _content(place: str, value: object) -> str | list[dict[str, str]]:
    """Text given as a string or as parts."""
    if isinstance(value, str):
        return checked_text(PARAM, place, value)
    if not isinstance(value, list):
        wrong_type(PARAM, place, "a string or an array of parts", value)
    if not value:
        wrong_value(PARAM, place, "the array of parts is empty.")
    return [{"type": "text", "text": _part(f"{place}[{index}]", part)} for index, part in enumerate(value)]


def _part(place: str, part: object) -> str:
    """The text of one part; media are refused, never dropped."""
    if not isinstance(part, dict):
        wrong_type(PARAM, place, "an object", part)
    part_type = part.get("type")
    if isinstance(part_type, str) and part_type in _MEDIA:
        wrong_value(PARAM, place, f"this model takes no {_MEDIA[part_type]}, only text.")
    if part_type not in ("text", "refusal"):
        wrong_value(PARAM, f"{place}.type", f"{shown(part_type)} is not 'text', the only type this model takes.")
    return checked_text(PARAM, f"{place}.{part_type}", part.get(part_type))


def _tool_calls(place: str, calls: object) -> list[dict[str, Any]]:
    """Earlier tool calls, their arguments as objects where they are JSON objects: templates write them out again."""
    if not isinstance(calls, list):
        wrong_type(PARAM, place, "an array", calls)
    return [_tool_call(f"{place}[{index}]", call) for index, call in enumerate(calls)]


def _tool_call(place: str, call: object) -> dict[str, Any]:
    if not isinstance(call, dict):
        wrong_type(PARAM, place, "an object", call)
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        wrong_value(PARAM, place, f"expected type 'function' with an object 'function', got {kind(function)}.")
    name = checked_text(PARAM, f"{place}.function.name", function.get("name"))
    arguments = checked_text(PARAM, f"{place}.function.arguments", function.get("arguments"))
    identity = checked_text(PARAM, f"{place}.id", call.get("id"))
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": _parsed(arguments)}}


def _parsed(arguments: str) -> dict[str, Any] | str:
    """The arguments as an object; what a model once wrote badly stays text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
