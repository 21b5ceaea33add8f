"""Fetch NLTK's data for validators' rewards, and check the hashes: python nltk_data.py FOLDER [ADDRESS]

For a reviewer: a pronouncing dictionary and a sentence splitter, which textstat imports when a validator's
reward function asks it how readable a text is. No training reads them.
"""

import hashlib
import io
import sys
import urllib.request
import zipfile
from pathlib import Path

ADDRESS = "https://raw.githubusercontent.com/nltk/nltk_data/550b6625bcef1f2abff2ff770a5a0d272c9c6b2a/packages"
FILES = {
    "corpora/cmudict.zip": "d07cca47fd72ad32ea9d8ad1219f85301eeaf4568f8b6b73747506a71fb5afd6",
    "tokenizers/punkt_tab.zip": "e57f64187974277726a3417ca6f181ec5403676c717672eef6a748a7b20e0106",
}


def fetch(folder: Path, address: str = ADDRESS) -> None:
    for name, expected in FILES.items():
        with urllib.request.urlopen(f"{address}/{name}", timeout=60) as answer:  # noqa: S310 - ours
            data = answer.read()
        found = hashlib.sha256(data).hexdigest()
        if found != expected:
            raise SystemExit(f"{address}/{name} has sha256 {found}, not {expected}: it is not used")
        zipfile.ZipFile(io.BytesIO(data)).extractall((folder / name).parent)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]), *sys.argv[2:])
