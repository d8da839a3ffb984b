#!/usr/bin/env bash
# Makes .venv with everything Lastgood needs, the native core included. Safe to run again: a second run only looks.
#
#   bash install.sh                   the tested versions of constraints.txt
#   bash install.sh --system-torch    keep the torch, torchvision and transformers that this Python already has (clusters,
#                                     containers); only what is missing is installed beside them. Later calls keep
#                                     this choice; --own-torch takes it back
#   bash install.sh --wheels FOLDER   without a network, from wheels that install/offline.py put into FOLDER elsewhere
#   bash install.sh --extras LIST     of pyproject.toml, in place of harness,test; later calls keep this choice as well
#   PYTHON=python3.12 bash install.sh choose the interpreter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }
say() { printf '== %s\n' "$*"; }

# One at a time in a folder: of a provisioning that was stopped, this may still run on the host.
exec 9<.
flock --nonblock 9 || { say "waiting for another install.sh in this folder"; flock --timeout 3600 9; } \
    || fail "another install.sh has been running in this folder for an hour"

venv=$PWD/.venv
# An earlier choice holds until another one is made, so that tests/run.sh keeps it.
system_torch=no
extras=
[ -f "$venv/lastgood.choice" ] && read -r system_torch extras <"$venv/lastgood.choice"
[ -n "$extras" ] || extras=harness,test
chosen=$system_torch
wheels=()
while [ "$#" -gt 0 ]; do
    case $1 in
        --system-torch) system_torch=yes ;;
        --own-torch) system_torch=no ;;
        --wheels | --extras)
            [ "$#" -gt 1 ] || fail "$1 needs a value"
            if [ "$1" = --extras ]; then
                extras=$2
            else
                [ -d "$2" ] || fail "--wheels: there is no folder $2; install/offline.py makes one on a machine with a network"
                wheels=(--no-index --find-links "$(cd "$2" && pwd)")
            fi
            shift
            ;;
        *) fail "unknown argument $1 (known: --system-torch, --own-torch, --wheels FOLDER, --extras LIST)" ;;
    esac
    shift
done

stamp=$venv/lastgood.stamp
python=${PYTHON:-python3}

command -v "$python" >/dev/null || fail "there is no $python; install Python 3.11 or newer (Debian, Ubuntu: apt-get install python3 python3-venv python3-dev)"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
    || fail "$python is Python $version, 3.10 or newer is needed; name another with PYTHON=... bash install.sh"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || say "Python $version: the library works, but Snakemake 9 needs 3.11 (PYTHON=python3.11 bash install.sh)"

# What the installation depends on; the same text as last time means that nothing is to be done.
wanted=$(
    { printf '%s %s %s %s\n' "$version" "$system_torch" "$extras" "$PWD"
      cat pyproject.toml constraints.txt
      find native -type f | LC_ALL=C sort | xargs -d '\n' cat; } | sha256sum | cut -d' ' -f1
)
is_complete() {
    "$venv/bin/python" - "$extras" 2>/dev/null <<'PY'
import importlib.metadata
import sys

import lastgood._native
from packaging.requirements import Requirement

waiting, asked = ["", *sys.argv[1].split(",")], set()
while waiting:
    extra = waiting.pop()
    if extra in asked:
        continue
    asked.add(extra)
    for text in importlib.metadata.requires("lastgood"):
        need = Requirement(text)
        if need.marker is None or need.marker.evaluate({"extra": extra}):
            importlib.metadata.version(need.name)
            if need.name == "lastgood":
                waiting += need.extras
PY
}
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && is_complete; then
    say "already installed in .venv; next: . .venv/bin/activate && snakemake fig8"
    exit 0
fi

"$python" -c 'import venv, ensurepip' 2>/dev/null \
    || fail "$python cannot make virtual environments (Debian, Ubuntu: apt-get install python3-venv)"
compiler=${CXX:-$(command -v c++ || command -v g++ || command -v clang++ || true)}
[ -n "$compiler" ] || fail "there is no C++ compiler (Debian, Ubuntu: apt-get install g++)"
printf '#include <charconv>\nint main() { return 0; }\n' | "$compiler" -std=c++17 -x c++ -fsyntax-only - 2>/dev/null \
    || fail "$compiler cannot compile C++17; install g++ 9 or clang 10 or newer, or name one with CXX=..."
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
[ -f "$headers/Python.h" ] || fail "Python's headers are missing in $headers (Debian, Ubuntu: apt-get install python3-dev)"

needed_mib=$([ "$system_torch" = yes ] && echo 1024 || echo 8192)
[ -x "$venv/bin/python" ] && "$venv/bin/python" -c 'import torch' 2>/dev/null && needed_mib=1024
free_mib=$(df -Pm . | awk 'NR == 2 {print $4}')
[ "$free_mib" -ge "$needed_mib" ] || fail "$PWD has $free_mib MiB free, $needed_mib MiB are needed; make room, or clone onto a larger disk"
[ -w . ] || fail "$PWD cannot be written to; clone into a folder of your own"

[ "$chosen" = "$system_torch" ] || rm -rf "$venv"
if ! "$venv/bin/python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
    say "making .venv with Python $version"
    rm -rf "$venv"
    if [ "$system_torch" = yes ]; then "$python" -m venv --system-site-packages "$venv"; else "$python" -m venv "$venv"; fi
fi
rm -f "$stamp"
printf '%s %s\n' "$system_torch" "$extras" >"$venv/lastgood.choice"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)

if [ "$system_torch" = yes ]; then
    constraints=()
    "$venv/bin/python" -c 'import torch' 2>/dev/null || fail "--system-torch: $python has no torch; leave the option out"
else
    # Build environments read constraints from this variable only.
    # A relative path: pip splits the variable at blanks, and a checkout may lie in a folder with blanks.
    export PIP_CONSTRAINT=constraints.txt
    constraints=(-c constraints.txt)
fi
say "installing packages (torch alone takes some gigabytes and a few minutes the first time)"
"${pip[@]}" install "${constraints[@]}" "${wheels[@]}" -e ".[$extras]" \
    || fail "pip could not install the packages; its message is above. Behind a proxy or mirror, set pip up first (pip config); without a network see install/offline.py"

say "checking"
"$venv/bin/python" - <<'PY' || fail "the installation does not work; the message is above. Remove .venv and run install.sh again"
import ctypes.util
import importlib.util

import torch
import lastgood._native

print(f"   torch {torch.__version__}, native core built")
if importlib.util.find_spec("torchvision"):
    import torchvision  # fails if it does not fit torch

    print(f"   torchvision {torchvision.__version__}")
if torch.cuda.is_available():
    print(f"   CUDA device: {torch.cuda.get_device_name(0)}; use --configfile config/gpu.yaml for its scale")
elif ctypes.util.find_library("cuda"):
    print("   there is a CUDA driver, but this torch cannot use it: the driver may be too old for CUDA", torch.version.cuda)
else:
    print("   no CUDA device: everything runs on the CPU")
PY
printf '%s\n' "$wanted" >"$stamp"
say "done; next: . .venv/bin/activate && snakemake fig8"
