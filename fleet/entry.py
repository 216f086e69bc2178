"""Where `imagefleet` begins: probes go a short way, everything else to the whole console."""

from __future__ import annotations

import sys


def main() -> None:
    """The console script."""
    if sys.argv[1:2] == ["health"]:
        from fleet import health

        sys.exit(health.main(sys.argv[2:]))
    from fleet import main as cli

    cli.main()


if __name__ == "__main__":
    main()
