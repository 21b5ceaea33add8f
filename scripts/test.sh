#!/bin/sh
# Every test: sh scripts/test.sh BIN PYTHON
# BIN is the daemon's environment's folder of programs, PYTHON the training environment's interpreter, or
# nothing where there is none. Two lanes run side by side: the daemon's tests that watch clocks and start
# programs, and those that only compute, the training stack's first. The closing line of the former comes last.
set -u
bin=$1 training=$2
if [ -z "$training" ]; then
    if [ "${CI:-}" = true ]; then
        echo "no training environment: run make training, or set GOD_MINER_TRAINING_PYTHON" >&2
        exit 1
    fi
    exec "$bin/python" -m pytest
fi
export GOD_MINER_TRAINING_PYTHON="$training"

computing="tests/benchmarks tests/core tests/fuzz tests/scripts tests/trainer"
log=$(mktemp)
daemon=
failed=0
trap 'rm -f "$log"' EXIT
trap 'kill $daemon 2>/dev/null; exit 130' INT TERM
echo "== the daemon's tests, beside those that only compute; their output comes after it"
# shellcheck disable=SC2046 # one option for each folder
"$bin/python" -m pytest $(printf -- '--ignore=%s ' $computing) >"$log" 2>&1 &
daemon=$!
nice -n 10 "$training" scripts/training_tests.py "$bin/../training-tests" || failed=1
echo "== the tests of $computing"
# shellcheck disable=SC2086 # several words
nice -n 10 "$bin/python" -m pytest $computing || failed=1
echo "== the daemon's tests"
tail -n +1 -f --pid="$daemon" "$log"
wait "$daemon" && exit "$failed"
