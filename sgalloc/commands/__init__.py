"""What the command line can do."""

from __future__ import annotations

import click

from sgalloc import __version__
from sgalloc.commands.bench import bench
from sgalloc.commands.fuzz import fuzz
from sgalloc.commands.replay import replay


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sgalloc")
def cli() -> None:
    """sgalloc: which slots of the KV pool every request holds, decided on the host."""


cli.add_command(bench)
cli.add_command(fuzz)
cli.add_command(replay)
