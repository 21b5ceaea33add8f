"""Print what a base lacks of a file of requirements/: python lacking.py FILE

What the base has keeps its version.
"""

import re
import sys
from importlib.metadata import distributions
from pathlib import Path


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lacking(text: str, installed: set[str]) -> str:
    """The entries whose package is not among the installed ones."""
    entries = re.findall(r"^([\w.-]+)(=(?:.*\\\n)*.*\n)", text, re.MULTILINE)
    return "".join(name + rest for name, rest in entries if normalized(name) not in installed)


def installed() -> set[str]:
    names = [one.metadata["Name"] for one in distributions()]
    return {normalized(name) for name in names if name}  # None: the remains of a package that was removed


if __name__ == "__main__":
    sys.stdout.write(lacking(Path(sys.argv[1]).read_text("utf-8"), installed()))
