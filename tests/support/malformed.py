"""Requests that are wrong in ways that clients and attackers find, drawn from a seed, and a bare client to send them.

The client speaks ASGI, so that it can send what no HTTP library would: half a body, odd headers, a broken length.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
JSON_TYPE = (b"content-type", b"application/json")

WORDS = ["", "a", "\u0000", "\ud800", "x\udfff", "\ufeff", "🦤" * 40, "null", "-1", "true", "../..", "${jndi}", "%00"]
NUMBERS = [0, -1, 1, 2, 0.5, -0.0, 1e308, 5e-324, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, True, False]
LITERALS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "0x10", "01", "1.", "+1", "nul", "'a'"]
REGEXES = [
    "(a+)+$", "(a|a)*b", "(", "[", "a{1,100000}", "(?=a)b", "(?<n>a)\\1", "\\p{L}+", "(" * 200 + ")" * 200, "\\", "^$",
    "a{99999999999}", "((a{1,50}){1,50}){1,50}", "[\\ud800]", "(?P<x>.)(?P<x>.)", "\\u0000", "[z-a]", "(?i:a)",
    ".*" * 300,
]  # fmt: skip
SCHEMAS: list[Any] = [
    {"type": "string", "maxLength": 50}, {"enum": list(range(500))}, {"type": "array", "items": {"type": "integer"}},
    {"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": "https://example.com/x.json"}, {"$ref": 5}, {"type": "wizard"},
    {"allOf": [{"$ref": "#"}]}, {"anyOf": []}, {"enum": []}, {"minLength": 5, "maxLength": 1, "type": "string"},
    {"type": "integer", "minimum": 1e400}, {"type": "string", "pattern": "("}, {"type": ["object", "null", "x"]},
    {"properties": {"\ud800": {}}, "required": ["\ud800"]}, {"required": "a"}, {"patternProperties": {"(a+)+$": {}}},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 10**9}, {"not": {}}, {"const": "\udc00"}, {"if": True}, True,
    {"definitions": {"a": {"$ref": "#/definitions/b"}, "b": {"$ref": "#/definitions/a"}}, "$ref": "#/definitions/a"},
    {"type": "string", "minLength": 10**12}, {"type": "object", "properties": 5}, {"type": "number", "multipleOf": 0},
]  # fmt: skip
CONTENT_TYPES = [b"text/plain", b"", b"application/x-www-form-urlencoded", b"application/json; charset=utf-16",
                 b"multipart/form-data; boundary=x", b"application/json;charset=\xff", b"APPLICATION/JSON", b"\xff\xfe",
                 b"application/xml", b"application/json, text/plain", b"application/" + b"a" * 5000]  # fmt: skip


@dataclass
class Sent:
    """One request. `parts` are the pieces of its body; `is_cut`: the client leaves before the last."""

    method: str = "POST"
    path: str = "/"
    query: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=lambda: [JSON_TYPE])
    parts: list[bytes] = field(default_factory=list)
    is_cut: bool = False
    kind: str = ""

    def __str__(self) -> str:
        body = b"".join(self.parts)
        return f"{self.kind}: {self.method} {self.path[:100]} {self.headers!r:.300} {body[:600]!r} ({len(body)} bytes)"


@dataclass
class Got:
    """One answer."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


async def send(app: Callable[..., Any], sent: Sent) -> Got:
    """The answer of an application, whatever was sent."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in sent.parts] or [
        {"type": "http.request", "body": b"", "more_body": True}
    ]
    if sent.is_cut:
        messages.append({"type": "http.disconnect"})
    else:
        messages[-1]["more_body"] = False
    answered, found = asyncio.Event(), Got(0, {}, b"")

    async def receive() -> Mapping[str, Any]:
        if messages:
            return messages.pop(0)
        await answered.wait()
        return {"type": "http.disconnect"}

    async def take(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            found.status, found.headers = message["status"], dict(message["headers"])
        else:
            found.body += message.get("body", b"")
            if not message.get("more_body", False):
                answered.set()

    path = sent.path.encode("utf-8", "surrogatepass")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
        "method": sent.method, "path": sent.path, "raw_path": path, "query_string": sent.query,
        "headers": [(b"host", b"test"), *sent.headers], "server": ("test", 80), "client": ("test", 1),
    }  # fmt: skip
    await app(scope, receive, take)
    return found


class Malformed:
    """Draws requests. `bodies` are good bodies by path; `fields` further names that a body of the path may have."""

    def __init__(
        self, seed: int, bodies: Mapping[str, Json], fields: Mapping[str, Sequence[str]], others: Sequence[str]
    ):
        self._random = random.Random(seed)
        self._bodies = bodies
        self._fields = fields
        self._others = others
        self._kinds: list[Callable[[], Sent]] = [
            self._broken_text, self._broken_text, self._wrong_field, self._wrong_field, self._wrong_field,
            self._wrong_inside, self._wrong_inside, self._wrong_root, self._literal, self._surrogate, self._deep,
            self._repeated, self._content_type, self._cut, self._length, self._header, self._path, self._giant,
            self._regex, self._schema, self._query,
        ]  # fmt: skip

    def draw(self, count: int) -> Iterator[Sent]:
        """So many requests, each of a random kind."""
        for _ in range(count):
            kind = self._random.choice(self._kinds)
            sent = kind()
            sent.kind = kind.__name__.strip("_")
            yield sent

    def _target(self) -> tuple[str, Json]:
        path = self._random.choice(sorted(self._bodies))
        return path, json.loads(json.dumps(self._bodies[path]))

    def _sent(self, path: str, raw: bytes) -> Sent:
        if self._random.random() < 0.2 and raw:
            cuts = sorted(self._random.randrange(len(raw)) for _ in range(3))
            return Sent(path=path, parts=[raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)])
        return Sent(path=path, parts=[raw])

    def _json(self, path: str, body: Any) -> Sent:
        return self._sent(
            path, json.dumps(body, ensure_ascii=self._random.random() < 0.7).encode(errors="surrogatepass")
        )

    def _value(self, depth: int = 0) -> Any:
        draw = self._random
        kind = draw.randrange(9 if depth < 3 else 6)
        if kind == 0:
            return draw.choice([None, [], {}])
        if kind < 3:
            return draw.choice(WORDS)
        if kind < 6:
            return draw.choice(NUMBERS)
        if kind == 6:
            return [self._value(depth + 1) for _ in range(draw.randrange(4))]
        if kind == 7:
            return {draw.choice(WORDS): self._value(depth + 1) for _ in range(draw.randrange(3))}
        return {"type": draw.choice(["text", "function", "json_schema", "x", 5]), "name": self._value(depth + 1)}

    def _broken_text(self) -> Sent:
        path, body = self._target()
        raw, draw = bytearray(json.dumps(body).encode()), self._random
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(raw))
            act = draw.randrange(4)
            if act == 0:
                del raw[place:]
            elif act == 1:
                raw[place] = draw.randrange(256)
            elif act == 2:
                raw[place:place] = draw.choice([b",", b"}", b'"', b"\xff", b"\x00", b"//", b"\xef\xbb\xbf", b"\\u"])
            else:
                del raw[place]
            if not raw:
                break
        return self._sent(path, bytes(raw))

    def _wrong_field(self) -> Sent:
        path, body = self._target()
        for _ in range(self._random.randrange(1, 4)):
            body[self._random.choice([*self._fields[path], "unheard", ""])] = self._value()
        return self._json(path, body)

    def _wrong_inside(self) -> Sent:
        """A value somewhere inside a good body is replaced or taken away."""
        path, body = self._target()
        place: Any = body
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                return self._json(path, body)
            key = self._random.choice(keys)
            if isinstance(place[key], dict | list) and self._random.random() < 0.7:
                place = place[key]
            elif self._random.random() < 0.2:
                del place[key]
                return self._json(path, body)
            else:
                place[key] = self._value()
                return self._json(path, body)

    def _wrong_root(self) -> Sent:
        path, _ = self._target()
        return self._json(path, self._value())

    def _literal(self) -> Sent:
        path, body = self._target()
        name = self._random.choice(self._fields[path])
        text = json.dumps(body | {name: "@@"}).replace('"@@"', self._random.choice(LITERALS))
        return self._sent(path, text.encode())

    def _surrogate(self) -> Sent:
        path, body = self._target()
        name = self._random.choice(self._fields[path])
        half = self._random.choice(["\ud800", "a\udfff", ["\udc00"], {"\ud9ff": 1}, [{"role": "\ud800"}]])
        return self._json(path, body | {name: half})

    def _deep(self) -> Sent:
        path, body = self._target()
        depth = self._random.choice([30, 65, 500, 5000, 100_000])
        opened, closed = self._random.choice([("[", "]"), ('{"a":', "}"), ('{"items":', "}")])
        inner = opened * depth + "1" + (closed * depth if self._random.random() < 0.8 else "")
        name = self._random.choice(self._fields[path])
        if self._random.random() < 0.3:  # as a text, which some fields read as JSON
            return self._json(path, body | {name: inner})
        return self._sent(path, json.dumps(body | {name: "@@"}).replace('"@@"', inner).encode())

    def _repeated(self) -> Sent:
        path, body = self._target()
        name = self._random.choice(self._fields[path])
        text = json.dumps(body)[:-1]
        again = "".join(f', "{name}": {json.dumps(self._value())}' for _ in range(3))
        text += again * self._random.choice([1, 1, 700])
        return self._sent(path, (text + "}").encode())

    def _content_type(self) -> Sent:
        path, body = self._target()
        sent = self._json(path, body)
        sent.headers = [(b"content-type", self._random.choice(CONTENT_TYPES))]
        return sent

    def _cut(self) -> Sent:
        path, body = self._target()
        raw = json.dumps(body).encode()
        cut = self._random.randrange(len(raw))
        return Sent(path=path, parts=[raw[:cut]], is_cut=True)

    def _length(self) -> Sent:
        path, body = self._target()
        sent = self._json(path, body)
        length = self._random.choice([b"0", b"-1", b"9" * 30, b"1e3", b"\xff", b"", b"999999999999", b"0x5"])
        sent.headers = [JSON_TYPE, (b"content-length", length)]
        return sent

    def _header(self) -> Sent:
        path, body = self._target()
        sent, draw = self._json(path, body), self._random
        name = draw.choice(
            [b"authorization", b"x-api-key", b"x-request-id", b"cookie", b"expect", b"accept", b"x", b""]
        )
        value = draw.choice(
            [b"\xff\xfe", b"Bearer", b"Bearer " + b"k" * 9000, b"x" * 20_000, b"\r\nx: y", b"\x00", b"a b"]
        )
        sent.headers = [JSON_TYPE] + [(name, value)] * draw.choice([1, 1, 2, 500])
        return sent

    def _path(self) -> Sent:
        draw = self._random
        known = draw.choice([*self._bodies, *self._others])
        odd = ["/\ud800", "/../etc/passwd", "/v1/models/" + "m" * 5000, "", "*", "/v1/models/%2e%2e", "/🦤"]
        path = draw.choice([known, known + "/", known.upper(), "/" + known, known + "\x00", *odd])
        verb = draw.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "WIZARD", "post"])
        return Sent(verb, path, parts=[draw.choice([b"", b"{}", b"[]", b"\xff"])])

    def _query(self) -> Sent:
        draw = self._random
        value = draw.choice(
            [b"timeout=x", b"timeout=-1", b"timeout=NaN", b"timeout=", b"timeout=1e99", b"\xff=%ff", b"a" * 5000]
        )
        return Sent(draw.choice(["GET", "POST"]), draw.choice([*self._others, *self._bodies]), query=value)

    def _giant(self) -> Sent:
        path, body = self._target()
        draw, size = self._random, self._random.choice([3000, 3000, 50_000, 400_000])
        few = size // 100
        value = draw.choice([
            "a" * size, "🦤" * (size // 4), ["a"] * few, [1] * few, {str(index): 1 for index in range(few)}, " " * size,
            [{"role": "user", "content": "a"}] * few, [[5]] * few, "\n" * size, [{"type": "text", "text": "b"}] * few,
        ])  # fmt: skip
        name = draw.choice(self._fields[path])
        sent = self._json(path, body | {name: value})
        if draw.random() < 0.02:
            sent.parts.append(b" " * (8 * 2**20 + 1))
        return sent

    def _regex(self) -> Sent:
        path, body = self._target()
        regex = self._random.choice(REGEXES)
        schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": regex}}, "required": ["a"]}
        strict = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
        changes: list[Json] = [
            {"regex": regex},
            {"guided_regex": regex},
            {"structured_outputs": {"regex": regex}},
            {"ebnf": f'root ::= "{regex}'},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
            {"tools": [strict]},
            {"sampling_params": {"regex": regex, "max_new_tokens": 2}},
            {"stop": [regex]},
            {"guided_choice": [regex, regex]},
        ]
        return self._json(path, body | self._random.choice(changes))

    def _schema(self) -> Sent:
        path, body = self._target()
        draw = self._random
        schema = draw.choice(SCHEMAS)
        for _ in range(draw.choice([0, 0, 1, 3, 40])):
            schema = draw.choice(
                [{"properties": {"a": schema}}, {"anyOf": [schema, schema]}, {"items": schema}, [schema]]
            )
            if len(json.dumps(schema)) > 20_000:
                break
        function = {"name": "f", "parameters": schema, "strict": draw.choice([True, False, None])}
        named = {"name": "a", "schema": schema, "strict": True}
        changes: list[Json] = [
            {"response_format": {"type": "json_schema", "json_schema": named}},
            {"response_format": {"type": "json_schema", "json_schema": schema}},
            {"guided_json": schema},
            {"response_format": {"type": "structural_tag", "format": schema}},
            {"json_schema": json.dumps(schema)},
            {"tools": [{"type": "function", "function": function}], "tool_choice": draw.choice(["auto", "required"])},
            {"tools": [{"type": "function", **function}]},
            {"tools": [{"name": "f", "input_schema": schema}]},
            {"sampling_params": {"json_schema": json.dumps(schema), "max_new_tokens": 2}},
            {"text": {"format": {"type": "json_schema", **named}}},
            {"structural_tag": json.dumps(schema)},
            {"structured_outputs": {"json": schema}},
        ]
        return self._json(path, body | draw.choice(changes))
