"""Lets the tests of this directory import what is in `tests/support`, and shares what is slow to make."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

if TYPE_CHECKING:
    from sgray.engine.grammar_queue import GrammarQueue


@pytest.fixture(scope="session")
def grammar_model(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """A tiny random model with the default model's tokenizer."""
    from grammars import make_model

    return make_model(tmp_path_factory.mktemp("grammar_model"), model_dir)


@pytest.fixture(scope="session")
def grammars(grammar_model: Path) -> GrammarQueue:
    """What compiles grammars for `grammar_model`; a third of a second is too long for it."""
    from grammars import make_queue

    queue = make_queue(grammar_model, compile_timeout_s=0.3)
    queue.prepare()
    return queue
