"""Writes the table of settings into settings.md.

python docs/write_settings.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fleet import options

PAGE = Path(__file__).with_name("settings.md")

_TABLE = re.compile(r"(<!-- settings: .*? -->\n).*(<!-- /settings -->)", re.DOTALL)


def current(page: str) -> str:
    """The page with the table that the program's settings give now."""
    return _TABLE.sub(lambda match: match[1] + options.markdown_table() + match[2], page)


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
