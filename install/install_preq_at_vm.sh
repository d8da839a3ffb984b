#!/usr/bin/env bash
# Brings a bare Debian or Ubuntu VM to the point where `bash install.sh` works: compiler, Python with headers and venv, git.
# GPU drivers are left alone: clouds ship images with them, and a driver must match its kernel.
set -euo pipefail

fail() { printf 'install_preq_at_vm.sh: %s\n' "$*" >&2; exit 1; }

[ "$(uname -s)" = Linux ] || fail "this is $(uname -s); Lastgood runs on Linux"
command -v apt-get >/dev/null || fail "no apt-get here; install by hand: git, a C++17 compiler, Python 3.11 or newer with headers and venv"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || fail "run this as root, or install sudo"
    as_root=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update
"${as_root[@]}" apt-get install -y --no-install-recommends git g++ python3 python3-dev python3-venv
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || fail "this release's Python is $(python3 -V 2>&1); the workflow needs 3.11 (Debian 12, Ubuntu 24.04 or newer)"
if [ -e /proc/driver/nvidia/version ]; then
    head -n 1 /proc/driver/nvidia/version
else
    echo "no NVIDIA driver loaded: Lastgood will run on the CPU (for a GPU, choose a cloud image with drivers, and reboot)"
fi
echo "next: bash install.sh"
