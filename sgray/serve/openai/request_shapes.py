"""What the fields of a body look like that are read by hand: types for the schema, which check nothing.

Such a field may hold one of several things, and its own reader tells best what is wrong with it; here it only says
what a good one is. Nothing here is imported for its behaviour.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, TypeAdapter


class Like:
    """Marks a field that another place checks: the schema shows it as this type."""

    def __init__(self, shape: Any) -> None:
        self._shape = shape

    def __get_pydantic_json_schema__(self, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Called by pydantic: the schema of the type instead of that of anything."""
        return handler(TypeAdapter(self._shape).core_schema)


class Shape(BaseModel):
    """An object with these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class ContentPart(Shape):
    """A part of a message."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Shape):
    """What an assistant's tool call calls."""

    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")


class MessageToolCall(Shape):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Shape):
    """A chat message. All but an assistant's with tool calls need content; a tool's needs `tool_call_id`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = Field(None, description="Of an assistant alone; so the next two.")
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = Field(None, description="Of a tool: the call that it answers.")


class Function(Shape):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_./:-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object.")
    strict: bool | None = None


class Tool(Shape):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class PlainFormat(Shape):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(Shape):
    """A JSON schema with a name."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None


class SchemaFormat(Shape):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class TagFormat(BaseModel):
    """Text with constrained parts between tags."""

    type: Literal["structural_tag"]


class StructuredOutputs(Shape):
    """vLLM's form of a constraint; one of its fields."""

    json_schema: str | dict[str, Any] | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1)]

ResponseFormat = PlainFormat | SchemaFormat | TagFormat
JsonSchema = str | dict[str, Any] | bool
Tag = str | dict[str, Any]
Choices = Annotated[list[str], Field(min_length=1)]
Messages = Annotated[list[Message], Field(min_length=1)]
Tools = list[Tool]
LogitBias = dict[str, Bias]
Stop = StopText | list[StopText]
Texts = str | Annotated[list[str], Field(min_length=1)]
Ids = TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
Prompt = Texts | Ids
ToolChoice = Literal["auto", "none", "required"] | dict[str, Any]
Counts = Annotated[int, Field(ge=0, le=20)] | list[Annotated[int, Field(ge=0, le=20)]]
Starts = Annotated[int, Field(ge=-1)] | list[Annotated[int, Field(ge=-1)]]
TemplateVariables = dict[str, bool | int | float | str]
