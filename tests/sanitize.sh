#!/usr/bin/env bash
# Builds the native module with AddressSanitizer and UndefinedBehaviorSanitizer into a folder of its own, runs on it what
# reaches native code (tests/native, the kernels of tests/sparse, and those decoders of tests/fuzz), and fails on any
# report of theirs.
# The module of the installation stays as it is. More tests can be named as arguments.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$PWD/.venv/bin/python
PATH=$PWD/.venv/bin:$PATH # cmake and ninja of tests/requirements.txt
build=$PWD/build/sanitize
reports=$build/reports

cmake -S native -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Debug -DLASTGOOD_SANITIZE=ON -DPython_EXECUTABLE="$python" >/dev/null
cmake --build "$build" -j "${LASTGOOD_SANITIZE_JOBS:-1}" >/dev/null
rm -rf "$reports"
mkdir -p "$reports"

export LASTGOOD_SANITIZED
LASTGOOD_SANITIZED=$(echo "$build"/_native.*.so)
export PYTHONPATH=$PWD/tests/sanitizer
# Python's own memory is not freed at its end; the interpreter must not hide small blocks in its arenas.
export PYTHONMALLOC=malloc
# The sanitizers' own quotes, for a path with a colon or a blank.
export ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=64:log_path='$reports/address'"
export UBSAN_OPTIONS="print_stacktrace=1:log_path='$reports/undefined'"
compiler=${CXX:-g++}
# libstdc++ as well: it must be there when the sanitizer looks for what throws exceptions.
preload="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libstdc++.so.6)"

status=0
env LD_PRELOAD="$preload" "$python" -m pytest -q -p no:cacheprovider -m 'not slow and not gpu and not fuzz' \
    tests/native tests/fuzz tests/sparse/test_compress_kernels.py tests/sparse/test_index_kernels.py \
    tests/sparse/test_update.py "$@" || status=1
# A test may expect a process to die and not look at why.
if compgen -G "$reports/*" >/dev/null; then
    echo "sanitize.sh: reports of the sanitizers:" >&2
    head -n 60 "$reports"/* >&2
    status=1
fi
exit "$status"
