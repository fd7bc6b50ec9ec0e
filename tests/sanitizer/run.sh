#!/usr/bin/env bash
# Runs the driver under every tool of compute-sanitizer, then a planted overrun, which has to be reported.
# Usage: run.sh DRIVER [LOG_FOLDER]. Exit status 0: clean, and the plant was found. The driver, with
# nanobind and jaxlib installed for PYTHON:
#   cmake -S . -B build/sanitizer -DCMAKE_BUILD_TYPE=Release -DKDA_CUDA=ON -DKDA_SANITIZER_DRIVER=ON \
#     -DPython_EXECUTABLE=PYTHON -Dnanobind_DIR="$(PYTHON -m nanobind --cmake_dir)"
#   cmake --build build/sanitizer --target kda_sanitizer_driver
set -u
driver=${1:?usage: run.sh DRIVER [LOG_FOLDER]}
logs=${2:-$(mktemp -d)}
mkdir -p "$logs"
status=0

# sanitize LOG TOOL ARGUMENT...: the tool's own summary is the last word of the log.
sanitize() {
  local log=$1 tool=$2
  shift 2
  compute-sanitizer --tool "$tool" --error-exitcode 86 --print-limit 20 "$@" >"$logs/$log" 2>&1
}

report() { printf '%-10s %-6s %4ss  %s\n' "$1" "$2" "$3" "$(grep SUMMARY "$logs/$4" | tail -n 1)"; }

for tool in memcheck initcheck racecheck synccheck; do
  options=()
  arguments=()
  # Padding keeps an access past one buffer from landing in the next.
  [ "$tool" = memcheck ] && options=(--padding 65536)
  [ "$tool" = initcheck ] && arguments=(--raw)
  SECONDS=0
  if sanitize "$tool.log" "$tool" "${options[@]}" "$driver" "${arguments[@]}" &&
    grep -Eq 'SUMMARY: 0 (errors|hazards)' "$logs/$tool.log"; then
    verdict=clean
  else
    verdict=FAIL status=1
  fi
  report "$tool" "$verdict" "$SECONDS" "$tool.log"
  [ "$verdict" = clean ] || head -n 40 "$logs/$tool.log"
done

SECONDS=0
sanitize plant.log memcheck --padding 65536 "$driver" --plant
if [ $? -eq 86 ] && grep -q 'Invalid __global__ write' "$logs/plant.log"; then
  verdict=found
else
  verdict=FAIL status=1
fi
report planted "$verdict" "$SECONDS" plant.log
[ $status -eq 0 ] || echo "logs are in $logs"
exit $status
