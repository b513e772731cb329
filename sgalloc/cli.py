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
        print(
            f"sgalloc: {missing.name} is not installed: pip install 'sgalloc[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a sign gets a question mark, not a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    cli()


if __name__ == "__main__":
    main()
