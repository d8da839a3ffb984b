#!/usr/bin/env bash
# All tests that need a CUDA device, and one folder with what they said: bash tests/gpu.sh FOLDER [PYTEST ARGUMENTS]
#
# FOLDER gets tests.xml (JUnit), tests.log, machine.json and, where nvidia-smi is, devices.txt. Tests that need more devices than there are
# are skipped. Not the slow ones: bash tests/gpu.sh FOLDER -m gpu takes these as well. PYTHON names the interpreter that
# has Lastgood and the extra `test` (.venv/bin/python).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ "$#" -gt 0 ] && [ "${1#-}" = "$1" ] || { echo "tests/gpu.sh: name a folder for the results: bash tests/gpu.sh FOLDER" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
python=${PYTHON:-$PWD/.venv/bin/python}
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
    || { echo "tests/gpu.sh: torch of $python sees no CUDA device" >&2; exit 1; }
nvidia-smi >"$folder/devices.txt" 2>&1 || true
"$python" -m lastgood doctor --json >"$folder/machine.json" 2>"$folder/doctor.log" || true
[ "$#" -gt 0 ] || set -- -m 'gpu and not slow'
status=0
"$python" -m pytest -p no:cacheprovider --junit-xml="$folder/tests.xml" --durations=20 "$@" >"$folder/tests.log" 2>&1 || status=$?
tail -n 40 "$folder/tests.log"
exit "$status"
