#!/usr/bin/env bash
# Builds the CPU driver with the compiler's sanitizers and runs it; planted overruns have to be found.
# Usage: run_cpu.sh [PYTHON]: a Python that has jaxlib, for its headers. Exit status 0: all clean.
set -euo pipefail
cd "$(dirname "$0")/../.."
include=$("${1:-python3}" -c 'import jaxlib, os; print(os.path.dirname(jaxlib.__file__))')/include
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
sources=(tests/sanitizer/driver_cpu.cc)
for source in ffi/cpu/*.cc; do # the kernels, without JAX
  case $source in */handlers.cc | */module.cc) ;; *) sources+=("$source") ;; esac
done

build() { # build NAME FLAG...
  "${CXX:-c++}" -std=c++20 -O1 -g -I. -isystem "$include" -pthread "${@:2}" "${sources[@]}" -o "$folder/$1"
}

build address -fsanitize=address,undefined -fno-sanitize-recover=all
"$folder/address" >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
echo "address, undefined: clean ($(grep -c ^ok "$folder/log") configurations)"
for op in chunk recurrent gradient; do
  if "$folder/address" --plant $op >"$folder/log" 2>&1 ||
    ! grep -q heap-buffer-overflow "$folder/log"; then
    echo "planted overrun, $op: NOT FOUND" && exit 1
  fi
  echo "planted overrun, $op: found"
done
build thread -fsanitize=thread
"$folder/thread" >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
echo "thread: clean"
