from __future__ import annotations

import subprocess
import sys

import pytest

from sgray import __version__
from sgray.cli import build_parser, explanation, main
from sgray.config import leaves


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {name} " in shown for name in ("serve", "chat", "generate", "pull", "config", "bench"))


def test_without_a_command_the_help_is_shown_and_the_status_is_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: sgray" in capsys.readouterr().out


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"sgray {__version__}\n"


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "sgray", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"sgray {__version__}\n"


@pytest.mark.parametrize("leaf", sorted(leaves()))
def test_every_leaf_is_explained_with_type_default_and_flag(leaf: str) -> None:
    text = explanation(leaf)
    assert text.startswith(leaf)
    assert all(f"\n  {word}: " in text for word in ("type", "default", "flag"))


def test_explain_shows_one_leaf_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "tp_size"]) == 0
    one = capsys.readouterr().out
    assert one.startswith("parallel.tp_size\n")
    assert main(["config", "explain"]) == 0
    every = capsys.readouterr().out
    assert one.strip() in every
    assert every.count("  flag: ") == len(leaves())


@pytest.mark.usefixtures("model_dir")
def test_explain_with_flags_shows_what_each_rank_and_node_would_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "nnodes", "--tp", "3", "--nnodes", "3", "--dtype", "bfloat16"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("parallel.nnodes\n") and "3 ranks on 3 nodes" in text
    rows = [line.split() for line in text.splitlines()[-3:]]
    assert [row[:4] for row in rows] == [["0", "0", "3", "1"], ["1", "1", "3", "1"], ["2", "2", "3", "1"]]
    # 30 layers, one key and one value of 64 numbers of two bytes each; 134.5 million weights, but for the small norms.
    assert [row[5] for row in rows] == ["7.5"] * 3
    assert sum(float(row[4]) for row in rows) == pytest.approx(134_515_008 * 2 / 2**20, rel=0.01)


def test_explain_of_an_unknown_leaf_fails_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "tpsize"]) == 1
    assert "nearest one is 'tp_size'" in capsys.readouterr().err


def test_show_prints_every_leaf_with_no_auto_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--device", "cpu", "--chunked-prefill-size", "77"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == list(leaves())
    assert lines["schedule.chunked_prefill_size"] == "77"
    assert "auto" not in lines.values()


def test_a_missing_model_directory_is_an_explained_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "./no/such/model"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("sgray: ")
    assert "no/such/model" in message


def test_pull_prints_the_directory_of_the_default_model(model_dir: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull"]) == 0
    assert capsys.readouterr().out.strip() == str(model_dir)


def test_flags_may_not_be_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "model", "--max-run", "3"])
    assert "unknown flag --max-run" in capsys.readouterr().err


def test_generate_prints_the_continuation(model_dir: object, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "What is the capital of France?", "--chat", "--max-tokens", "12", "--device", "cpu"]
    argv += ["--dtype", "float32"]
    assert main(argv) == 0
    assert "Paris" in capsys.readouterr().out


def test_chat_with_a_model_in_this_process_remembers_the_conversation(
    model_dir: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["The secret word is Paris. Say only: ok", "What is the capital of France?"])

    def read(_prompt: str = "") -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert main(["chat", "--max-tokens", "16", "--device", "cpu", "--dtype", "float32"]) == 0
    assert "Paris" in capsys.readouterr().out


def test_every_command_has_help() -> None:
    names = ("serve", "chat", "generate", "pull", "config show", "config explain", "bench serve", "bench offline")
    for name in names:
        with pytest.raises(SystemExit) as caught:
            build_parser().parse_args([*name.split(), "--help"])
        assert caught.value.code == 0
