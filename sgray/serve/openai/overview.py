"""What the live page shows: its files, which hold nothing of the server's, and the figures behind it, as JSON.

The figures are those of one ingress. They hold no text, no token, no id and no key of anybody's call: whoever has a key
may see them.
"""

from __future__ import annotations

import importlib.resources

from starlette.responses import Response

import sgray
from sgray.config import Config
from sgray.protocol import Load
from sgray.serve.openai.backend import Backend
from sgray.serve.openai.forms import Json

MAX_PREFIXES_SHOWN = 12
MAX_DECISIONS_SHOWN = 20

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_file(name: str) -> Response:
    """One file of the page; it loads nothing from other servers, and may not."""
    content = importlib.resources.files("sgray.serve.openai").joinpath(f"page/{name}").read_bytes()
    return Response(content, headers=_HEADERS, media_type=_KINDS[name.rpartition(".")[2]])


def overview(config: Config, backend: Backend) -> Json:
    """The replicas, the prefixes that are asked for most, and where the latest requests went."""
    loads = backend.loads()
    page_size = backend.info.page_size if loads else 0
    history = backend.history
    return {
        "model": config.model_name,
        "version": sgray.__version__,
        "policy": config.serve.routing_policy,
        "hit_rate": _share(
            sum(load.cached_tokens for load in loads.values()), sum(load.prompt_tokens for load in loads.values())
        ),
        "replicas": [_replica(name, load, page_size) for name, load in sorted(loads.items())],
        "prefixes": [
            {
                "hash": _told(one.hash),
                "tokens": one.num_tokens,
                "requests": one.num_requests,
                "parent": None if one.parent is None else _told(one.parent),
            }
            for one in history.hot(MAX_PREFIXES_SHOWN)
        ],
        "decisions": [
            {
                "time": one.at,
                "replica": one.replica,
                "prompt_tokens": one.num_tokens,
                "predicted_cached_tokens": one.predicted,
                "cached_tokens": one.cached,
            }
            for one in history.recent(MAX_DECISIONS_SHOWN)
        ],
    }


def _replica(name: str, load: Load, page_size: int) -> Json:
    return {
        "name": name,
        "running": load.running,
        "waiting": load.waiting,
        "waiting_tokens": load.waiting_tokens,
        "kv_total_tokens": load.total_pages * page_size,
        "kv_used_tokens": load.leased_pages * page_size,
        "kv_cached_tokens": load.cached_pages * page_size,
        "hit_rate": _share(load.cached_tokens, load.prompt_tokens),
        "generation_tokens": load.generation_tokens,
        "prefill_tokens_per_s": load.prefill_tokens_per_s,
        "decode_step_s": load.decode_step_s,
    }


def _told(hash: int) -> str:
    """A prefix's name: JSON's readers may round a number as large."""
    return f"{hash & (2**64 - 1):016x}"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
