#!/usr/bin/env bash
# Collect what `python -m benchmarks gpu --wheels FOLDER` needs on a machine without a network that has torch 2.11
# (CUDA 13), transformers and what comes with them, for Python 3.12 on x86-64:
#
#   scripts/gpu_wheels.sh FOLDER [--mib N]     at most so many MiB (52), the most valuable first
#
# Versions are those of requirements/. torch itself, and what such a machine has anyway, stay out.
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/.."

folder=${1:?usage: scripts/gpu_wheels.sh FOLDER [--mib N]}
limit=$((52 * 1024 * 1024))
[ "${2:-}" = --mib ] && limit=$(($3 * 1024 * 1024))
python=${PYTHON:-python3}

# In order of value: the folder of a part that alone gets them (. is for all), and the packages.
groups=(
    ". pydantic pydantic-core annotated-types datasets dill multiprocess"
    "trainers liger-kernel"
    "fp8 torchao"
    "pictures diffusers importlib-metadata zipp"
    "axolotl trl bitsandbytes axolotl axolotl-contribs-lgpl axolotl-contribs-mit kernels kernels-data addict fire termcolor
     posthog backoff distro fastcore evaluate wandb platformdirs opentelemetry-api opentelemetry-sdk opentelemetry-proto
     opentelemetry-semantic-conventions opentelemetry-exporter-otlp-common opentelemetry-exporter-otlp-proto-common
     opentelemetry-exporter-otlp-proto-http opentelemetry-exporter-http-transport googleapis-common-protos"
)
# Published as source alone, and nothing to compile.
source_only=" axolotl-contribs-lgpl axolotl-contribs-mit "

platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform linux_x86_64)
for minor in 5 12 17 24 26 27 28 31 34 35 39; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done

locked() { # NAME: as requirements/ pins it for a training, or the newest
    local version
    version=$(cat requirements/demo.txt requirements/training.txt requirements/sources.txt requirements/pictures.txt |
        sed -n "s/^$1==\([^ ]*\).*/\1/p" | head -n 1)
    echo "$1${version:+==$version}"
}

fetch() { # NAME FOLDER
    if [[ $source_only == *" $1 "* ]]; then
        "$python" -m pip wheel -q --no-deps -w "$2" "$(locked "$1")"
    else
        "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
            "${platforms[@]}" -d "$2" "$(locked "$1")"
    fi
}

without_other_cudas() { # WHEEL: most of its 43 MB are libraries for other CUDA versions
    "$python" - "$1" <<'PYTHON'
import re, sys, zipfile
from pathlib import Path

wheel = Path(sys.argv[1])
smaller = wheel.with_suffix(".part")
with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as new:
    for entry in old.infolist():
        if not re.search(r"_(cuda(?!130)\d+|rocm\w*|xpu\w*)\.so$", entry.filename):
            new.writestr(entry, old.read(entry), zipfile.ZIP_DEFLATED)
smaller.replace(wheel)
PYTHON
}

mkdir -p "$folder"
rm -f "$folder"/*.whl "$folder"/*/*.whl
for group in "${groups[@]}"; do
    read -r part packages <<<"${group//$'\n'/ }"
    new=$(mktemp -d)
    for name in $packages; do fetch "$name" "$new"; done
    for wheel in "$new"/bitsandbytes-*.whl; do without_other_cudas "$wheel"; done
    size=$(cat "$folder"/*.whl "$folder"/*/*.whl "$new"/*.whl | wc -c)
    if [ "$size" -gt "$limit" ]; then
        echo "left out, over $((limit >> 20)) MiB: $packages" >&2
    else
        mkdir -p "$folder/$part"
        mv "$new"/*.whl "$folder/$part"
        echo "$((size >> 20)) MiB with $packages"
    fi
    rm -rf "$new"
done
