"""The console script; probes, which run every few seconds, skip the console's slow imports."""

from __future__ import annotations

import sys


def main() -> None:
    if sys.argv[1:2] == ["health"]:
        from fleet import health

        sys.exit(health.main(sys.argv[2:]))
    from fleet import main as cli

    cli.main()


if __name__ == "__main__":
    main()
