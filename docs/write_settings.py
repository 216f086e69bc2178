"""Writes the table of settings into settings.md.

python docs/write_settings.py
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cli import options
from fleet import settings  # noqa: F401 - adds the models of all packages

PAGE = Path(__file__).with_name("settings.md")

_TABLE = re.compile(r"(<!-- settings: .*? -->\n).*(<!-- /settings -->)", re.DOTALL)


def table() -> str:
    """The settings of all commands as Markdown: a heading and a table for each subject."""
    sections: dict[str, list[str]] = {}
    seen: set[str] = set()
    for model, (_, commands) in options.PROJECT_SETTINGS.items():
        for name, field in model.model_fields.items():
            if name in seen:
                continue
            seen.add(name)
            heading = [f"## {options.subject(model, name)}", "", f"For {commands}.", ""]
            heading += [
                "| flag and variable | default | description |",
                "| --- | --- | --- |",
            ]
            lines = sections.setdefault(options.subject(model, name), heading)
            names = f"`{options.flag(name)}`<br>`{options.variable(name)}`"
            default = options.shown_default(field)
            shown = f"`{default}`" if default else ""
            lines.append(f"| {names} | {shown} | {field.description} |")
    return "\n".join("\n".join(lines) + "\n" for lines in sections.values())


def current(page: str) -> str:
    """The page with the table that the program's settings give now."""
    return _TABLE.sub(lambda match: match[1] + table() + match[2], page)


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
