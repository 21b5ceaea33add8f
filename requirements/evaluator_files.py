"""Fetch, while an image is built, what evaluators of pictures load and validators' caches lack.

For a reviewer: these are public files, unchanged, each checked against the digest below, and the very ones
that the evaluator encodes texts and pictures with (`FlowRules` in core/models/image_families.py names them).
They are read and never trained. Nothing else is fetched. `EVALUATOR_FILES=no` builds without them: then the
nearest thing in the cache is used, or ai-toolkit or sd-scripts trains, and the log says which.

python evaluator_files.py FOLDER NAME…   a file that does not come in time is left out, and the build goes on
"""

from __future__ import annotations

import hashlib
import http.client
import os
import sys
import time
import urllib.request
from pathlib import Path

HUB = os.environ.get("HUB", "https://huggingface.co")
#: By name: where it lies, and its SHA-256. Ideogram's base (9.3 GB) is what evaluators load whatever the task
#: names, and what they cache is in another format; several public model lists have its digest, all the same.
FILES = {
    "clip_l.safetensors": (
        "comfyanonymous/flux_text_encoders/resolve/main/clip_l.safetensors",
        "660c6f5b1abae9dc498ac2d21e1347d2abdb0cf6c0c0c8576cd796491d9a6cdd",
    ),
    "t5xxl_fp16.safetensors": (
        "comfyanonymous/flux_text_encoders/resolve/main/t5xxl_fp16.safetensors",
        "6e480b09fae049a72d2a8c5fbccb8d3e92febeb233bbe9dfe7256958a9167635",
    ),
    "ae.safetensors": (
        "rayonlabs/FLUX.1-dev/resolve/main/ae.safetensors",
        "afc8e28272cd15db3919bacdb6918ce9c1ed22e96cb12c4d5ed0fba823529e38",
    ),
    "qwen_image_vae.safetensors": (
        "Comfy-Org/Krea-2/resolve/main/vae/qwen_image_vae.safetensors",
        "a70580f0213e67967ee9c95f05bb400e8fb08307e017a924bf3441223e023d1f",
    ),
    "flux2-vae.safetensors": (
        "Comfy-Org/Ideogram-4/resolve/main/vae/flux2-vae.safetensors",
        "d64f3a68e1cc4f9f4e29b6e0da38a0204fe9a49f2d4053f0ec1fa1ca02f9c4b5",
    ),
    "ideogram4_fp8_scaled.safetensors": (
        "Comfy-Org/Ideogram-4/resolve/main/diffusion_models/ideogram4_fp8_scaled.safetensors",
        "49a946f1b0f8bcf5eab7d3b1ecc7b453c104e034cb1b592032745692724bd306",
    ),
}
#: Seconds for all of them: validators end a build after 30 minutes.
BUDGET_S = 480.0
#: Where base images may have them already.
PRESENT = Path("/app/flux")


def main(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + BUDGET_S
    for name in names:
        try:
            print(f"{name}: {bring(folder / name, end)}", flush=True)  # noqa: T201
        except (OSError, ValueError, http.client.HTTPException) as error:
            (folder / name).unlink(missing_ok=True)
            print(f"{name}: left out: {error}", flush=True)  # noqa: T201


def bring(target: Path, end: float) -> str:
    """Fetch a file; return what was done."""
    path, digest = FILES[target.name]
    if (PRESENT / target.name).is_file():
        return "is in the base image"
    seen = hashlib.sha256()
    address = f"{HUB}/{path}"
    with urllib.request.urlopen(address, timeout=60) as source, target.open("wb") as file:  # noqa: S310
        # What has come, not what was asked for: a server that trickles must not stretch the time.
        while block := source.read1(1 << 22):
            if time.monotonic() > end:
                raise TimeoutError(f"not here after {BUDGET_S:.0f} s")
            seen.update(block)
            file.write(block)
    if seen.hexdigest() != digest:
        raise ValueError(f"its digest is {seen.hexdigest()}, not {digest}")
    target.chmod(0o644)
    return f"{target.stat().st_size:,} bytes"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
