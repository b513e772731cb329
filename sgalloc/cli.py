"""The command ``sgalloc``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without its extra, say how to get it."""
    try:
        from sgalloc.commands import cli
    except ModuleNotFoundError as missing:
        if missing.name not in ("click", "rich"):
            raise
        sys.exit(f"sgalloc: {missing.name} is not installed: pip install 'sgalloc[cli]'")
    cli()


if __name__ == "__main__":
    main()
