"""Makes the model directory of the HTTP measurements: a configuration of ours beside the default model's tokenizer.

The weights are not there: it is served with `--load-format dummy`. Knows files, nothing of engines.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tarfile
from pathlib import Path

from sgray.config import DEFAULT_MODEL
from sgray.models.hub import resolve_model

SHAPES = Path(__file__).parents[1] / "models" / "llama-3.1-8b" / "config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def make_model(shapes: Path, target: Path) -> None:
    """Writes `target`: the shapes of one model with the vocabulary, the text and the end of another.

    Raises OSError where a file is missing.
    """
    source = resolve_model(DEFAULT_MODEL, progress=False)
    config = json.loads(shapes.read_text())
    own = json.loads((source / "config.json").read_text())
    config |= {name: own[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copyfile(source / name, target / name)


def pack(folder: Path, archive: Path) -> None:
    """The folder as one compressed file, with its name as the only top folder."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz") as file:
        file.add(folder, folder.name)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="the folder to write")
    parser.add_argument("--shapes", type=Path, default=SHAPES, help="config.json of the model (default: %(default)s)")
    parser.add_argument("--archive", type=Path, metavar="FILE.tar.xz", help="also pack the folder")
    arguments = parser.parse_args()
    make_model(arguments.shapes, arguments.target)
    if arguments.archive:
        pack(arguments.target, arguments.archive)


if __name__ == "__main__":
    main()
