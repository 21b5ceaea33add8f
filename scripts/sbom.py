"""Write the packages of our environments as CycloneDX: python scripts/sbom.py FOLDER

One file for the daemon, one for training with CUDA; the same requirements give the same bytes.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere
from scripts import pins
from scripts.install import DAEMON, TORCH, TRAINING
from scripts.pins import FOLDER, ROOT, Pin, normalized

CONTENTS = {"daemon": DAEMON["daemon"], "training": (*TRAINING["training"], "sources", *TORCH["CUDA"])}


def component(pin: Pin) -> dict[str, Any]:
    """One package; its hashes are those of the files that may be installed."""
    purl = f"pkg:pypi/{normalized(pin.name)}@{pin.version}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": pin.name,
        "version": pin.version,
        "purl": purl,
        "hashes": [{"alg": "SHA-256", "content": value} for value in pin.hashes],
    }


def sbom(name: str) -> dict[str, Any]:
    [version] = re.findall(r'__version__ = "(.*)"', (ROOT / "miner" / "__init__.py").read_text("utf-8"))
    found: dict[str, dict[str, Any]] = {}
    for file in dict.fromkeys(CONTENTS[name]):
        for pin in pins.read(FOLDER / f"{file}.txt"):
            one = component(pin)
            # The wheels and the source of one version are one component.
            found.setdefault(one["purl"], {**one, "hashes": []})["hashes"] += one["hashes"]
    components = [found[purl] for purl in sorted(found)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, f"{name} {version} {json.dumps(components)}").urn,
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": f"god-miner-{name}@{version}",
                "name": f"god-miner-{name}",
                "version": version,
            }
        },
        "components": components,
    }


def main() -> int:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in CONTENTS:
        path = folder / f"god-miner-{name}.cdx.json"
        document = sbom(name)
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{path}: {len(document['components'])} packages")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
