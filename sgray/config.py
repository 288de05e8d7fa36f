"""The one typed configuration, and the only place that reads the environment.

Sections are frozen, unknown keys are errors, names are SGLang's where the meaning is the same. `resolve` turns every
`auto` into a value, once, in a new object.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sgray.errors import ConfigError

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m-instruct"

# Keys that others have, and what there is for the same wish.
NOT_HERE: Mapping[str, str] = MappingProxyType(
    {
        "parallel.dp_size": "copies of the model are replicas: set serve.min_replicas and serve.max_replicas, to one "
        "number where num_replicas would say it",
    }
)

_MAX_KEY_BYTES = 1024  # far more than any key has, and less than a header may have

Auto = Literal["auto"]
Count = Annotated[int, Field(strict=True, ge=1)]
ToolCallParser = Literal[
    "deepseekv3",
    "deepseekv31",
    "glm45",
    "gpt-oss",
    "hermes",
    "kimi_k2",
    "llama3",
    "mistral",
    "pythonic",
    "qwen",
    "qwen25",
    "qwen3_coder",
]
ReasoningParser = Literal[
    "deepseek-r1", "deepseek-v3", "glm45", "gpt-oss", "kimi", "kimi_k2", "qwen3", "qwen3-thinking"
]
RoutingPolicy = Literal["cost", "round_robin", "least_load", "consistent_hash", "sglang", "ray_prefix", "llmd_sticky"]


class Section(BaseModel):
    """A frozen group of leaves that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelConfig(Section):
    """Which model, and how to hold it."""

    model_path: str = Field(
        DEFAULT_MODEL, description="Hugging Face repo id, local directory, or the embedded default's name."
    )
    tokenizer_path: str | None = Field(None, description="Another place for the tokenizer; the model's own if unset.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub repository.")
    served_model_name: str | None = Field(None, description="The name clients use; model_path if unset.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Computing type; auto is bfloat16 where the hardware has it, else float32."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto is cuda where a GPU is visible.")
    num_threads: Count | Auto = Field(
        "auto",
        description="Threads that compute on the CPU; auto is all cores, in a service a share of all but one.",
    )
    context_length: int | None = Field(None, ge=1, description="Lower the model's own limit on prompt plus answer.")
    chat_template: str | None = Field(
        None, description="A file with a Jinja chat template; the tokenizer's own if unset."
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto",
        description="auto is safetensors; dummy: random weights of the right shapes and no checkpoint, for measuring.",
    )
    skip_tokenizer_init: bool = Field(
        False, description="Token ids in and out, no tokenizer loaded; text requests are refused."
    )


class ParallelConfig(Section):
    """How many ranks share one model."""

    tp_size: int = Field(
        1,
        ge=1,
        description="Tensor parallel ranks a replica, spread evenly over its nnodes: each holds its share of the "
        "weights and of the key-value heads, on a GPU of its own or with its share of num_threads.",
    )
    ep_size: int = Field(
        1,
        ge=1,
        description="How ranks share the experts of a mixture: 1, each has its share of every expert's columns; "
        "tp_size, each has its share of the experts, whole.",
    )
    nnodes: int = Field(
        1,
        ge=1,
        description="Nodes of the Ray cluster that share one replica, each with tp_size / nnodes of its ranks; more "
        "than 1 where the GPUs of one node do not hold the model.",
    )

    @model_validator(mode="after")
    def _expert_ranks(self) -> ParallelConfig:
        if self.ep_size not in (1, self.tp_size):
            raise ValueError(
                f"ep_size ({self.ep_size}) has to be 1 or tp_size ({self.tp_size}): the ranks that share the experts "
                "are those that share the rest of the model, all of them"
            )
        return self

    @model_validator(mode="after")
    def _even(self) -> ParallelConfig:
        if self.tp_size % self.nnodes:
            fitting = [number for number in range(1, self.tp_size + 1) if self.tp_size % number == 0]
            raise ValueError(
                f"nnodes ({self.nnodes}) does not divide tp_size ({self.tp_size}), and every node holds as many ranks; "
                f"set nnodes to one of {', '.join(map(str, fitting))}, or tp_size to a multiple of it"
            )
        return self

    @property
    def ranks_per_node(self) -> int:
        """Ranks that one node holds."""
        return self.tp_size // self.nnodes


class MemoryConfig(Section):
    """The key-value memory of one replica."""

    mem_fraction_static: float = Field(
        0.85, gt=0, lt=1, description="Share of the device's free memory for weights and key-value pages."
    )
    max_total_tokens: int | None = Field(
        None, ge=1, description="Size of the key-value pool in tokens; from memory if unset."
    )
    page_size: Count | Auto = Field("auto", description="Tokens a page; auto is 64 on cuda, 16 on cpu.")
    disable_radix_cache: bool = Field(False, description="Compute every prompt from its first token.")


class ScheduleConfig(Section):
    """The order and the size of work."""

    chunked_prefill_size: Annotated[Count, Field(ge=2)] | Auto = Field(
        "auto", description="Token budget a step; auto is 8192 on cuda, 512 on cpu."
    )
    mixed_prefill_size: Count | Auto = Field(
        "auto",
        description="Prompt tokens a step computes beside decoding sequences, and up to 7/3 as many while many wait: "
        "less keeps streams smooth, more raises throughput; auto is 192 on cuda, chunked_prefill_size on cpu.",
    )
    max_running_requests: Count | Auto = Field(
        "auto", description="Sequences computed together; auto is 512 on cuda, 64 on cpu."
    )
    max_queued_requests: int = Field(1024, ge=0, description="Waiting requests a replica holds before it answers 429.")
    max_queued_tokens: Count | Auto = Field(
        "auto",
        description="Uncached prompt tokens that waiting requests of a replica may have before it answers 429; auto is "
        "512 times chunked_prefill_size.",
    )
    schedule_policy: Literal["fcfs", "lpm"] = Field(
        "fcfs", description="fcfs: by age; lpm: longest cached prefix first, with an age cap."
    )
    random_seed: int | None = Field(None, ge=0, description="Fixes the seeds drawn for requests that bring none.")
    disable_overlap: bool = Field(
        False, description="Plan a step only when the one before it has been answered; for finding faults."
    )
    cuda_graph_max_bs: Count | Auto = Field(
        "auto", description="Largest decode batch that is run as a CUDA graph; auto is max_running_requests."
    )
    disable_cuda_graph: bool = Field(False, description="Launch every kernel of a decode step by itself.")


class GrammarConfig(Section):
    """What one request's grammar may cost."""

    max_source_bytes: int = Field(
        131072, ge=1, description="Size of a schema, regular expression or grammar; a larger one is refused with 400."
    )
    compile_timeout_s: float = Field(
        5.0, gt=0, description="CPU seconds for compiling one; what takes longer is refused with 400."
    )


class ApiConfig(Section):
    """Who may use the HTTP border, and its limits; each is answered by a 4xx."""

    api_keys_file: str | None = Field(
        None,
        description="A file with one key, or sha256:HEX of one, a line; read again when it changes. With any key set, "
        "here or in SGRAY_API_KEYS, calls need one.",
    )
    admin_keys_file: str | None = Field(
        None, description="The same for keys that also open the operator's routes; or one in SGRAY_ADMIN_KEY."
    )
    max_json_depth: int = Field(64, ge=8, description="Deepest nesting of arrays and objects in a body.")
    max_messages: int = Field(2048, ge=1, description="Most messages in one chat call.")
    max_content_parts: int = Field(1024, ge=1, description="Most content parts in one message.")
    max_body_bytes: int = Field(8 * 2**20, ge=1024, description="Largest request body.")
    max_n: int = Field(128, ge=1, description="Largest n of one call.")
    max_batch: int = Field(256, ge=1, description="Most prompts in one completions call.")
    max_stop: int = Field(16, ge=1, description="Most stop strings of one call.")
    max_stop_chars: int = Field(256, ge=1, description="Longest stop string, in characters.")
    max_requests_per_key: int | None = Field(
        None, ge=1, description="Most calls in work for one key at a time; more get 429. Unlimited if unset."
    )
    max_tokens_per_minute_per_key: int | None = Field(
        None,
        ge=1,
        description="Prompt and answer tokens of one key's calls a minute; more get 429. Unlimited if unset.",
    )
    request_log: str | None = Field(
        None, description="A file that gets a line of JSON for each finished request, without texts; none if unset."
    )
    request_timeout_s: float | None = Field(
        None, gt=0, description="Longest time a request may take; unlimited if unset."
    )
    tool_call_parser: ToolCallParser | None = Field(
        None, description="How the model writes tool calls; requests with tools are refused if unset."
    )
    reasoning_parser: ReasoningParser | None = Field(
        None, description="How the model marks its reasoning, which is a part of the content if unset."
    )


class BatchesConfig(Section):
    """OpenAI's batch API: where it keeps its state, and its limits."""

    batches_dir: str | None = Field(
        None,
        description="A directory for files and batches, on a disk of the node whose ingresses run them; the batch API "
        "is off if unset.",
    )
    max_batch_bytes: int = Field(
        100 * 2**20, ge=1024, description="Largest file of a batch; all files together may have 50 times that."
    )
    max_batch_rows_in_flight: int = Field(
        32, ge=1, description="Most rows of batches that one ingress runs at a time, in the slack of other calls."
    )


class ServeConfig(Section):
    """The Ray Serve side: how many replicas, how they come and go."""

    min_replicas: int = Field(1, ge=0, description="Fewest engine replicas.")
    max_replicas: int = Field(1, ge=1, description="Most engine replicas.")
    num_ingress_replicas: Count | Auto = Field(
        "auto", description="Replicas of the HTTP ingress; auto is 4 where engine replicas have GPUs, else 1."
    )
    autoscaling_policy: Literal["engine", "requests"] = Field(
        "engine",
        description="What decides on the number of replicas: engine: how busy the engines are and how long prompts "
        "wait; requests: how many requests there are.",
    )
    target_ttft_s: float = Field(
        2.0, gt=0, description="Longest that prompts should wait before they are computed; more starts a replica."
    )
    target_ongoing_requests: float | None = Field(
        None,
        gt=0,
        description="Requests a replica should hold; more starts another. Where requests decide, 32 if unset.",
    )
    upscale_delay_s: float = Field(10.0, ge=0, description="More replicas start once they were wanted for this long.")
    downscale_delay_s: float = Field(300.0, ge=0, description="The same for fewer, and for the last one.")
    graceful_shutdown_timeout_s: float = Field(
        600.0, ge=0, description="How long a replica that goes away may finish its streams."
    )
    health_check_period_s: float = Field(5.0, gt=0)
    wedge_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Work waiting and no step for this long, and for ten times as long as slow steps take: the replica "
        "is replaced.",
    )
    routing_policy: RoutingPolicy = Field(
        "cost",
        description="How the ingress picks a replica; sglang, ray_prefix and llmd_sticky are the rules of other "
        "projects, for comparison.",
    )
    num_cpus_per_replica: float = Field(
        1.0, ge=0, description="Ray CPUs an engine replica reserves; with several ranks, for each of them."
    )
    num_cpus_per_ingress: float = Field(0.1, ge=0, description="Ray CPUs an ingress replica reserves.")
    otlp_traces_endpoint: str | None = Field(
        None,
        description="URL of an OpenTelemetry collector that gets traces of calls by OTLP over HTTP, such as "
        "http://localhost:4318/v1/traces; needs the extra otel. No traces if unset.",
    )

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _collector(cls, value: str | None) -> str | None:
        if value is not None:
            _check_collector(value)
        return value

    @model_validator(mode="after")
    def _ordered(self) -> ServeConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})")
        return self


class Config(Section):
    """Everything. Build it with `Config.parse`, so that a wrong key is explained."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    grammar: GrammarConfig = Field(default_factory=GrammarConfig)
    api: ApiConfig = Field(default_factory=ApiConfig)
    batches: BatchesConfig = Field(default_factory=BatchesConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Config:
        """A configuration from nested mappings; raises ConfigError that names the wrong key and what is allowed."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(_explain(cls, error.errors())) from None

    @property
    def num_reserved_cpus(self) -> float:
        """Ray CPUs that a replica reserves on each of its nodes, for the ranks there."""
        return self.serve.num_cpus_per_replica * self.parallel.ranks_per_node

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.model.served_model_name or self.model.model_path

    def resolve(self, hardware: Hardware) -> Config:
        """A new configuration without any `auto`, each decision logged."""
        device = self.model.device
        if device == "auto":
            device = "cuda" if hardware.has_cuda else "cpu"
        if device == "cuda" and not hardware.has_cuda:
            raise ConfigError("model.device is 'cuda' but no CUDA device is visible; use 'cpu' or 'auto'")
        on_gpu = device == "cuda"
        schedule = self.schedule
        chunk = (8192 if on_gpu else 512) if schedule.chunked_prefill_size == "auto" else schedule.chunked_prefill_size
        running = (512 if on_gpu else 64) if schedule.max_running_requests == "auto" else schedule.max_running_requests
        decided = {
            "model.device": device,
            "model.dtype": "bfloat16" if hardware.has_bfloat16 or on_gpu else "float32",
            "model.num_threads": hardware.num_threads,
            "model.load_format": "safetensors",
            "memory.page_size": 64 if on_gpu else 16,
            "schedule.chunked_prefill_size": chunk,
            "schedule.mixed_prefill_size": 192 if on_gpu else chunk,
            "schedule.max_queued_tokens": 512 * chunk,
            "schedule.max_running_requests": running,
            "schedule.cuda_graph_max_bs": running,
            "serve.num_ingress_replicas": num_ingresses(has_gpus=on_gpu),
        }
        values = self.model_dump()
        for path, value in decided.items():
            section, leaf = path.split(".")
            if values[section][leaf] == "auto":
                values[section][leaf] = value
                logger.info("%s: auto is %s here", path, value)
        return Config.parse(values)


@dataclass(frozen=True)
class Hardware:
    """What a process may use; measured by whoever has torch, handed in as data."""

    num_threads: int
    memory_bytes: int
    has_cuda: bool = False
    has_bfloat16: bool = False


def num_ingresses(*, has_gpus: bool) -> int:
    """An ingress carries the text of some 13,000 tokens a second: more than a CPU makes, less than a GPU."""
    return 4 if has_gpus else 1


def leaves() -> dict[str, type[Section]]:
    """Every leaf of the configuration as "section.leaf" with the section that owns it."""
    return {
        f"{name}.{leaf}": section
        for name, field in Config.model_fields.items()
        if isinstance(section := field.annotation, type) and issubclass(section, Section)
        for leaf in section.model_fields
    }


@dataclass(frozen=True)
class KeyHashes:
    """SHA-256 digests, in hex, of the keys that open the API. The keys themselves are kept nowhere."""

    api: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()


def environment_keys() -> KeyHashes:
    """The keys in SGRAY_API_KEYS, separated by commas, and in SGRAY_ADMIN_KEY.

    Raises ConfigError where a variable is set but holds no key: a secret that was not found must not open the server.
    """
    return KeyHashes(_variable_keys("SGRAY_API_KEYS"), _variable_keys("SGRAY_ADMIN_KEY"))


def environment_openai_key() -> str:
    """The key in OPENAI_API_KEY, for OpenAI's own endpoint; raises ConfigError where there is none."""
    key = os.environ.get("OPENAI_API_KEY")
    if not key:
        raise ConfigError("OpenAI's endpoint needs a key: give api_key, or set OPENAI_API_KEY")
    return key


def client_key(given: str | None, key_file: str | None) -> str | None:
    """The key with which a client asks a server: given, the content of a file, or SGRAY_API_KEY; None for none.

    Raises ConfigError where a file or the variable holds nothing that can be one.
    """
    if given is None and key_file is not None:
        try:
            given, place = Path(key_file).read_text("utf-8").strip(), key_file
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read a key from {key_file}: {error}") from None
    elif given is None:
        given, place = os.environ.get("SGRAY_API_KEY"), "SGRAY_API_KEY"
    else:
        place = "--api-key"
    if given is None:
        return None
    if not given.isascii():
        raise ConfigError(f"{place}: a key that a client sends is ASCII")
    if given.startswith("sha256:"):
        raise ConfigError(f"{place}: this is the digest of a key, which opens nothing; give the key itself")
    key_hash(given.encode(), place)
    return given


def key_hash(text: bytes, place: str) -> str:
    """The digest of a key, given itself or as `sha256:` and 64 hex digits. Raises ConfigError that names `place`."""
    if text.startswith(b"sha256:"):
        digest = text.removeprefix(b"sha256:").lower()
        if not re.fullmatch(rb"[0-9a-f]{64}", digest):
            raise ConfigError(f"{place}: sha256: must be followed by 64 hexadecimal digits")
        return digest.decode()
    if not 1 <= len(text) <= _MAX_KEY_BYTES or any(byte <= 0x20 or byte == 0x7F for byte in text):
        raise ConfigError(f"{place}: a key has 1 to {_MAX_KEY_BYTES} bytes and no spaces or control characters")
    return hashlib.sha256(text).hexdigest()


def cache_dir() -> Path:
    """Where converted models are kept: SGRAY_CACHE, else the user's cache directory."""
    if path := os.environ.get("SGRAY_CACHE"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sgray"


def may_share_gpus() -> bool:
    """Whether ranks may share a GPU, which is slow and for tests (torch's own switch, which it reads by itself)."""
    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"


def forbid_multicast() -> None:
    """Keeps torch's symmetric memory from making an NVLink multicast object: nothing here uses one, and a program that
    ends badly with one can leave a node's GPUs in disorder. Torch has no other switch than its variable.
    """
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"


def is_offline() -> bool:
    """Whether the user forbids the network (HF_HUB_OFFLINE, the hub's own switch)."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}


def _variable_keys(name: str) -> tuple[str, ...]:
    value = os.environ.get(name)
    if value is None:
        return ()
    keys = [key for part in os.fsencode(value).split(b",") if (key := part.strip())]
    if not keys:
        raise ConfigError(f"{name} is set but holds no key; unset it to serve without keys")
    return tuple(key_hash(key, name) for key in keys)


def _check_collector(url: str) -> None:
    """ValueError where this is not the address of a collector, or holds a secret, which configurations show."""
    try:
        parts = urlsplit(url)
        is_complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port or an address that is none
        is_complete = False
    if not is_complete or not url.isascii() or any(character.isspace() for character in url):
        raise ValueError("this is no URL of OTLP over HTTP; give one such as http://localhost:4318/v1/traces")
    if "@" in parts.netloc:
        raise ValueError("a URL with a password is shown to others; give OTEL_EXPORTER_OTLP_HEADERS instead")


def _explain(root: type[Section], errors: Iterable[Any]) -> str:
    """One line for each wrong place: where it is, what is wrong, what is allowed there."""
    lines: dict[str, str] = {}
    for item in errors:
        place, owner = _locate(root, item["loc"])
        if item["type"] == "extra_forbidden":
            if place in NOT_HERE:
                lines[place] = f"{place} is not available; {NOT_HERE[place]}"
                continue
            near = difflib.get_close_matches(str(item["loc"][-1]), list(owner.model_fields), n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            allowed = ", ".join(sorted(owner.model_fields))
            lines[place] = f"unknown key {place!r}; {hint}Allowed here: {allowed}"
        elif place in lines:  # another branch of the same union
            lines[place] += f", or: {item['msg']}"
        else:
            value = item["input"]
            got = "" if isinstance(value, Mapping) else f"got {value!r}; "
            lines[place] = f"{place}: {got}{item['msg'].removeprefix('Value error, ')}"
    return "\n".join(lines.values())


def _locate(root: type[Section], loc: tuple[int | str, ...]) -> tuple[str, type[Section]]:
    """The dotted place of a pydantic location, without the branch of a union, and the section it lies in."""
    owner = root
    for number, part in enumerate(loc, start=1):
        field = owner.model_fields.get(str(part))
        annotation = field.annotation if field is not None else None
        if not (isinstance(annotation, type) and issubclass(annotation, Section)):
            return ".".join(str(part) for part in loc[:number]), owner
        owner = annotation
    return ".".join(str(part) for part in loc), owner
