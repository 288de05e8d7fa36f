"""Fills a decoder from safetensors files and proves that every parameter was filled exactly once.

Tensors are read one at a time, and of each the part that this rank holds, so that loading needs little more memory than
the rank's share of the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from sgray.errors import ModelLoadError
from sgray.layers.parameter import Parameter, Stored
from sgray.models.decoder import Decoder
from sgray.models.mapping import Mapping, Target

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MOST_NAMES = 8


def load_weights(decoder: Decoder, model_dir: Path) -> None:
    """Reads the checkpoint in `model_dir` into `decoder` and finishes it.

    Raises ModelLoadError that names every file and tensor that is missing, unknown, damaged or of a wrong shape.
    """
    mapping = decoder.spec.mapping()
    parameters = dict(decoder.parameters())
    unexpected = []
    for name, tensor in read_tensors(model_dir):
        if _is_needless(name, mapping, decoder):
            continue
        target = mapping.target(name)
        if target is None or target.name not in parameters:
            unexpected.append(name)
            continue
        _fill(parameters[target.name], target, name, tensor)
    _check_complete(parameters, mapping, unexpected, model_dir)
    decoder.finish()


def read_tensors(model_dir: Path) -> Iterator[tuple[str, Stored]]:
    """Everything in the checkpoint by name, not yet read, in one file or in the shards of an index."""
    if (model_dir / INDEX).exists():
        yield from _read_shards(model_dir)
    elif (model_dir / SINGLE).exists():
        yield from _read_file(model_dir / SINGLE, None)
    else:
        raise ModelLoadError(
            f"{model_dir} holds neither {SINGLE} nor {INDEX}; weights in other formats must be converted to safetensors"
        )


def _read_shards(model_dir: Path) -> Iterator[tuple[str, Stored]]:
    shards = _read_index(model_dir / INDEX)
    if absent := sorted(file for file in shards if not (model_dir / file).is_file()):
        raise ModelLoadError(f"{model_dir} lacks {_listed(absent)}, named in {INDEX}")
    for file, names in shards.items():
        yield from _read_file(model_dir / file, names)


def _read_index(path: Path) -> dict[str, list[str]]:
    """Tensor names by shard file."""
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not an index of shards: {error!r}") from None
    shards: dict[str, list[str]] = {}
    for name, file in places:
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelLoadError(f"{path}: {name} is said to be in {file!r}, which is not a file name")
        shards.setdefault(file, []).append(name)
    return shards


def _read_file(path: Path, names: list[str] | None) -> Iterator[tuple[str, Stored]]:
    """The tensors `names` of one file, or all of them."""
    try:
        with safe_open(path, framework="pt") as file:
            held = set(file.keys())
            wanted = sorted(held) if names is None else names
            if absent := [name for name in wanted if name not in held]:
                raise ModelLoadError(f"{path} does not hold {_listed(absent)}, which {INDEX} says is there")
            for name in wanted:
                yield name, file.get_slice(name)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged or cut short: {error}") from None


def _is_needless(name: str, mapping: Mapping, decoder: Decoder) -> bool:
    """Dropped by a rule, or an output matrix beside tied embeddings (some checkpoints carry a copy)."""
    return mapping.is_dropped(name) or (decoder.spec.is_tied and name == "lm_head.weight")


def _fill(parameter: Parameter, target: Target, name: str, tensor: Stored) -> None:
    try:
        parameter.fill(target.piece, tensor)
    except ModelLoadError as error:
        raise ModelLoadError(f"tensor {name}: {error.message}") from None


def _check_complete(parameters: dict[str, Parameter], mapping: Mapping, unexpected: list[str], model_dir: Path) -> None:
    missing = [
        mapping.source(Target(name, piece)) for name, parameter in parameters.items() for piece in parameter.missing()
    ]
    problems = []
    if missing:
        problems.append(f"the checkpoint lacks {_listed(missing)}")
    if unexpected:
        problems.append(f"config.json has no place for {_listed(unexpected)}")
    if problems:
        raise ModelLoadError(f"{model_dir}: {'; '.join(problems)}")


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
