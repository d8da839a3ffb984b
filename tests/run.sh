#!/usr/bin/env bash
# All everyday tests. Installs what it needs. Arguments go to pytest: bash tests/run.sh -k slots, bash tests/run.sh -m slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "$#" -eq 0 ]; then
    echo "All everyday tests take about 16 minutes on 2 cores, after the installation (the first one: some minutes more)."
    echo "They run as several lists, each of which is shown once it has ended. Some only: bash tests/run.sh -k slots"
    LASTGOOD_NO_SYSTEM_PACKAGES=1 exec .ci/run library harness
fi
bash install.sh
.venv/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt -r tests/requirements.txt
exec .venv/bin/python -m pytest "$@"
