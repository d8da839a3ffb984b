#!/usr/bin/env bash
# One node of a StellaTrain training on real digits, or with --dataset dummy on noise; call it on every node:
#   test_script.sh --master-ip-address A --my-ip-address B --world-size NODES --num-gpus G --rank NODE
# `lastgood stellatrain node --help` lists all arguments. Paths count from this folder.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
lastgood=$here/.venv/bin/lastgood
[ -x "$lastgood" ] || lastgood=$(command -v lastgood) || { echo "test_script.sh: run \`bash install.sh\` first" >&2; exit 2; }
cd "$here"
exec "$lastgood" stellatrain node "$@"
