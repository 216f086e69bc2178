"""The console script; probes, which run every few seconds, skip the console's slow imports."""

from __future__ import annotations

import sys

#: The exit code of `fleet.console` after an interrupt; that module is one of the slow imports.
EXIT_INTERRUPTED = 130


def main() -> None:
    if sys.argv[1:2] == ["health"]:
        from fleet import health

        sys.exit(health.main(sys.argv[2:]))
    try:
        from fleet import main as cli

        cli.main()
    except KeyboardInterrupt:  # before a command has begun: the imports take a second
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
