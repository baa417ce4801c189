"""Results as a table to read, and as JSON where a file is named."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Report:
    """Prints one table after another and keeps all of them for `--json`."""

    def __init__(self, name: str, json_path: str | None):
        self._json_path = json_path
        self._content: dict[str, Any] = {"benchmark": name, "machine": describe_machine(), "tables": {}}
        print(f"{name}: {self._content['machine']}")

    def table(self, title: str, rows: Sequence[dict[str, Any]]) -> None:
        """rows: of the same keys, which are the headings."""
        self._content["tables"][title] = list(rows)
        if not rows:
            return
        headings = list(rows[0])
        cells = [headings, *([_shown(row[heading]) for heading in headings] for row in rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(headings))]
        print(f"\n{title}")
        for line in cells:
            first, *rest = line
            print("  " + "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip())

    def note(self, text: str) -> None:
        self._content.setdefault("notes", []).append(text)
        print(text)

    def keep(self, key: str, value: Any) -> None:
        """Goes into the JSON file alone."""
        self._content[key] = value

    def close(self) -> None:
        if self._json_path:
            Path(self._json_path).write_text(json.dumps(self._content, indent=1) + "\n")


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return (
            f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 100 else f"{value:.3f}"
        )
    return str(value)


def describe_machine() -> str:
    """Cores, load and versions, which every number depends on."""
    from importlib import metadata

    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "ray"))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores, load {load}, Python {platform.python_version()}, {versions}"


def parser(doc: str) -> argparse.ArgumentParser:
    """With the option that all benchmarks have."""
    made = argparse.ArgumentParser(description=doc.strip().splitlines()[0])
    made.add_argument("--json", metavar="OUT", help="also write the numbers to this file")
    return made
