"""What `sgalloc bench` compares with, made from the committed results.

`python -m profiling.shipped --write` puts it into the package; a test holds that it is current.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from profiling.headline import HOST
from sgalloc.bench import short
from sgalloc.bench.harness import SUBJECT

ROOT = Path(__file__).resolve().parents[1]
STEPS = ROOT / "profiling" / "results" / "nvidia-h200" / "steps.json"
INTO = ROOT / "sgalloc" / "bench" / short.SHIPPED


def made() -> str:
    """The text of the file."""
    host = json.loads(HOST.read_text(encoding="utf-8"))
    gpu = json.loads(STEPS.read_text(encoding="utf-8"))
    alone = [r for r in gpu["records"] if r["at"].get("calls", "one at a time") == "one at a time"]
    steps = [r for r in alone if r["name"] != "release" and r["at"]["batch"] == 256]
    parts = {
        "host": _part(host, short.kept(host["benches"]["aim"], SUBJECT)),
        "gpu": _part(gpu, short.kept(steps, short.ON_GPU)),
    }
    return json.dumps(parts, indent=1) + "\n"


def _part(data: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    return {"environment": data["environment"], "run": data["run"], "records": records}


@click.command()
@click.option("--write", is_flag=True, help="Put it into the package.")
def main(write: bool) -> None:
    """Print what `sgalloc bench` compares with, or put it into the package."""
    if write:
        INTO.write_text(made(), encoding="utf-8")
    else:
        click.echo(made(), nl=False)


if __name__ == "__main__":
    main()
