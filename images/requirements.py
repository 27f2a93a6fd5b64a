"""Prints the requirements of one extra of pyproject.toml, a line each, for a Dockerfile's pip.

usage: requirements.py EXTRA [NAME TO LEAVE OUT ...]

So that an image's layer of dependencies is built again only when they change, not with each
change of the code.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Read pyproject.toml of the current folder."""
    extra, left_out = sys.argv[1], set(sys.argv[2:])
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    for requirement in project["optional-dependencies"][extra]:
        if re.match(r"[\w.-]+", requirement)[0] not in left_out:
            print(requirement)


if __name__ == "__main__":
    main()
