#!/bin/sh
# Every test: sh scripts/test.sh BIN PYTHON
# BIN is the daemon's environment's folder of programs, PYTHON the training environment's interpreter, or
# nothing where there is none. The two suites share no process and run side by side; of the daemon's, those
# that only compute come after the training stack's, so that both lanes are about as long. The daemon's closing
# line comes last.
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

computing="tests/core tests/trainer tests/benchmarks"
log=$(mktemp)
daemon=
failed=0
trap 'rm -f "$log"' EXIT
trap 'kill $daemon 2>/dev/null; exit 130' INT TERM
echo "== the daemon's tests, beside those of the training stack; their output comes after it"
# shellcheck disable=SC2046,SC2086 # words, all of them
"$bin/python" -m pytest $(printf -- '--ignore=%s ' $computing) >"$log" 2>&1 &
daemon=$!
# The daemon's tests watch clocks; these only compute.
nice -n 19 "$training" scripts/training_tests.py "$bin/../training-tests" || failed=1
echo "== the tests that only compute, with the daemon's packages"
# shellcheck disable=SC2086
"$bin/python" -m pytest $computing || failed=1
echo "== the daemon's tests"
tail -n +1 -f --pid="$daemon" "$log"
wait "$daemon" || exit 1
[ "$failed" -eq 0 ] || echo "tests failed before those of the daemon, see above" >&2
exit "$failed"
