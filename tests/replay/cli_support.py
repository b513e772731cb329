"""Running ``sgalloc`` in this process, and reading what it printed."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path

from click.testing import CliRunner, Result

from sgalloc.commands import cli

# The package re-exports the command under the module's own name.
module = importlib.import_module("sgalloc.commands.replay")

SMALL = ("--limit", "12", "--device", "cpu")
SOUND = "sound: no law was broken, and every page and row came back"


def sgalloc(*args: object) -> Result:
    """Run the command line in this process, with stdout and stderr apart."""
    apart = "mix_stderr" in inspect.signature(CliRunner).parameters  # click before 8.2
    runner = CliRunner(mix_stderr=False) if apart else CliRunner()
    result = runner.invoke(cli, [str(arg) for arg in args], prog_name="sgalloc")
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    return result


def replayed(*args: object) -> Result:
    """A replay that has to go well."""
    result = sgalloc("replay", *args)
    assert result.exit_code == 0, result.stderr
    return result


def figure(result: Result, label: str) -> str:
    """What the table says behind a label."""
    found = re.search(rf"(?:^| ){re.escape(label)} +(\S+)", result.stdout, re.MULTILINE)
    assert found is not None, f"{label!r} is not in the table:\n{result.stdout}"
    return found[1]


def text(output: str) -> str:
    """The output without its line breaks: where it is folded depends on the width."""
    return " ".join(output.split())


def mooncake(folder: Path, prompts: list[tuple[int, list[int]]], name: str = "talk.jsonl") -> Path:
    """A trace of prompts: tokens and block ids, a second apart, 5 tokens put out each."""
    path = folder / name
    lines = [
        {
            "timestamp": 1000 * at,
            "input_length": tokens,
            "output_length": 5,
            "hash_ids": blocks,
        }
        for at, (tokens, blocks) in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def azure(folder: Path, rows: list[str]) -> Path:
    path = folder / "code.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
