#!/bin/sh
# Rewrites constraints.txt: a fresh environment with everything, frozen. Usage: scripts/lock.sh [python]
set -eu
python=${1:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check ".[dev,bench]"
{
    echo "# Exact versions for reproducible installs (pip install -c constraints.txt). Rewritten by: make lock"
    "$work/venv/bin/pip" freeze --exclude god-miner | grep -v '^-e '
} > constraints.txt
echo "constraints.txt: $(grep -vc '^#' constraints.txt) packages"
