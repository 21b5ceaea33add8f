"""Print the packages of a requirements/ file that a base image lacks: python lacking.py FILE

Packages that the base has keep their versions.
"""

import re
import sys
from importlib.metadata import distributions
from pathlib import Path


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lacking(text: str, installed: set[str]) -> str:
    """Return the entries of packages that are not installed."""
    entries = re.findall(r"^([\w.-]+)(=(?:.*\\\n)*.*\n)", text, re.MULTILINE)
    return "".join(name + rest for name, rest in entries if normalized(name) not in installed)


def installed() -> set[str]:
    names = [one.metadata["Name"] for one in distributions()]
    return {normalized(name) for name in names if name}  # None: the remains of a package that was removed


if __name__ == "__main__":
    sys.stdout.write(lacking(Path(sys.argv[1]).read_text("utf-8"), installed()))
