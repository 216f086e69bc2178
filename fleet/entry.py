"""The console script; probes, which run every few seconds, skip the console's slow imports."""

import sys


def main() -> None:
    if sys.argv[1:2] == ["health"]:
        from fleet import health

        sys.exit(health.main(sys.argv[2:]))
    try:
        from fleet import main

        main.main()
    except KeyboardInterrupt:  # before a command has begun: the imports take a second
        sys.exit(
            130
        )  # `console.EXIT_INTERRUPTED`, whose import is one of the slow ones


if __name__ == "__main__":
    main()
