#!/usr/bin/env bash
# All that needs a Hopper GPU, on a machine with Python 3.12, JAX and CUDA but without a network.
#
#   benchmarks/gpu_session.sh -w WHEELS -o OUT [-p PEERS] [-b 'BENCH OPTIONS'] [-t SECONDS] [STAGE...]
#
#   -w  folder with jax_kda's wheel and, if it was built elsewhere, kda_sanitizer_driver
#   -p  folder with wheels of the libraries to compare with, and of what the tests need
#   -o  folder for one log per stage and for bench.py's results
#   -t  limit for each stage (default 540)
#
#   main      the main job
#   tests     pytest -m gpu
#   graphs    with command buffers and without: the same bits
#   sanitize  compute-sanitizer over the launcher
#   bench     bench.py
#   decode    decode.py
#
# Runs all stages by default, after a look at which handlers run here. A failing stage stops no other; the exit status says that one failed.
set -u
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2; }

root=$(cd "$(dirname "$0")/.." && pwd)
wheels='' peers='' out='' bench_options='' limit=540
while getopts w:p:o:b:t: option; do
  case $option in
    w) wheels=$(realpath "$OPTARG") ;;
    p) peers=$(realpath "$OPTARG") ;;
    o) mkdir -p "$OPTARG" && out=$(realpath "$OPTARG") ;;
    b) bench_options=$OPTARG ;;
    t) limit=$OPTARG ;;
    *) usage ;;
  esac
done
shift $((OPTIND - 1))
[ -n "$wheels" ] && [ -n "$out" ] || usage
[ $# -gt 0 ] || set -- main tests graphs sanitize bench decode

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
install() { python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$@"; }
install "$wheels"/jax_kda-*.whl || exit 1
for wheel in ${peers:+"$peers"/*.whl}; do
  install "$wheel" || echo "not installed: $wheel"
done
export PYTHONPATH=$site PYTHONUNBUFFERED=1
if nvcc=$(command -v nvcc); then
  export CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$nvcc")")")}
fi
cd "$site" || exit 1  # in the clone, its jax_kda folder would hide the installed package

gpu_tests() { timeout "$limit" python3 -m pytest -p no:cacheprovider -c "$root/pyproject.toml" -m gpu "$@"; }

stage_handlers() {
  python3 - <<'PYTHON'
import jax, jax_kda

print(jax.__version__, jax.devices(), handlers := jax_kda.handlers())
if not handlers["kda_chunk_fwd"].get("cuda"):
    raise SystemExit("no CUDA handler runs here")
PYTHON
}

stage_main() { timeout "$limit" python3 -m jax_kda; }

# Side by side where pytest-xdist is: most of the time is compilation. The largest want most of the
# memory, and come by themselves.
stage_tests() {
  local parallel=() status=0
  python3 -c 'import xdist' 2>/dev/null && parallel=(-n 8 --dist worksteal -p no:benchmark)
  XLA_PYTHON_CLIENT_PREALLOCATE=false \
    gpu_tests -q "${parallel[@]}" -k 'not beyond_32_bits' "$root/tests" || status=1
  gpu_tests -q -k beyond_32_bits "$root/tests/test_gpu.py" || status=1
  return $status
}

stage_graphs() { gpu_tests -v -k command_buffers "$root/tests/test_gpu_execution.py"; }

stage_sanitize() {
  local driver=$wheels/kda_sanitizer_driver
  if [ ! -e "$driver" ]; then
    cmake -S "$root" -B build -G Ninja -DKDA_CUDA=ON -DKDA_SANITIZER_DRIVER=ON \
      -DPython_EXECUTABLE="$(python3 -c 'import sys; print(sys.executable)')" \
      -Dnanobind_DIR="$(python3 -m nanobind --cmake_dir)" &&
      cmake --build build --target kda_sanitizer_driver || return 1
    driver=build/kda_sanitizer_driver
  fi
  timeout "$limit" "$root/tests/sanitizer/run.sh" "$driver" "$out/sanitizer"
}

stage_bench() {
  # shellcheck disable=SC2086  # several options in one word
  timeout "$limit" python3 "$root/benchmarks/bench.py" --output "$out" $bench_options
}

stage_decode() { timeout "$limit" python3 "$root/benchmarks/decode.py" --output "$out"; }

# What of a stage's log belongs in the summary.
digest() {
  if [ "$1" = bench ]; then
    grep -E '^\| (case|.*\| (jax_kda|flash_kda) )|copy .* TB/s' "$out/bench.log"
  elif [ "$1" = decode ]; then
    grep '^|' "$out"/decode-*.md
  else
    tail -n 12 "$out/$1.log"
  fi
}

status=0
summary=()
for stage in handlers "$@"; do
  SECONDS=0
  if "stage_$stage" >"$out/$stage.log" 2>&1; then
    verdict=passed
  else
    verdict="FAILED ($?)" status=1
  fi
  summary+=("$(printf '=== %-9s %s in %d s' "$stage" "$verdict" "$SECONDS")" "$(digest "$stage")")
  echo "${summary[-2]}"
done
printf '%s\n' '' "${summary[@]}"
exit $status
