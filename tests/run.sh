#!/usr/bin/env bash
# All everyday tests. Installs what it needs. Arguments go to pytest: bash tests/run.sh -k slots, bash tests/run.sh -m slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash install.sh
.venv/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt -r tests/requirements.txt
exec .venv/bin/python -m pytest "$@"
