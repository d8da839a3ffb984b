#!/usr/bin/env bash
# One node of a StellaTrain training on ImageNet (class folders, in /datasets unless --dataset names another); call it on every node:
#   test_script_imagenet.sh --master-ip-address A --my-ip-address B --world-size NODES --num-gpus G --rank NODE
# `lastgood stellatrain node --help` lists all arguments. Paths count from this folder.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
lastgood=$here/.venv/bin/lastgood
[ -x "$lastgood" ] || lastgood=$(command -v lastgood) || { echo "test_script_imagenet.sh: run \`bash install.sh\` first" >&2; exit 2; }
cd "$here"
exec "$lastgood" stellatrain node --dataset /datasets "$@"
