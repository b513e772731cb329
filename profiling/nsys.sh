#!/usr/bin/env bash
# Nsight Systems: host ranges, launches and kernels of steady steps on one timeline.
#
#   profiling/nsys.sh OUT                 every kernel's step: OUT.nsys-rep, and sums on the terminal
#   profiling/nsys.sh OUT COMMAND...      a program of one's own instead, the whole run
#
# PYTHON names the interpreter, NSYS the profiler.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() { sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[[ $# -ge 1 && $1 != -* ]] || usage
out=$(realpath -m "$1")
shift

# Only sgalloc's domain of ranges, each kernel of a graph by itself, no sampling of the CPU.
options=(
    --trace cuda,nvtx
    --nvtx-domain-include sgalloc
    --cuda-graph-trace node
    --sample none --cpuctxsw none
    --force-overwrite true
    --output "$out"
)
if [[ $# -eq 0 ]]; then
    cd "$here"
    # From the first range "profiled" on; Python's ranges are registered strings or not alike.
    export NSYS_NVTX_PROFILER_REGISTER_ONLY=0
    options+=(--capture-range nvtx --nvtx-capture "profiled@sgalloc" --capture-range-end none)
    set -- "${PYTHON:-python3}" -m profiling.gpu.profiled --repeat 20
fi
"${NSYS:-nsys}" profile "${options[@]}" "$@"
"${NSYS:-nsys}" stats --force-export true \
    --report nvtx_pushpop_sum --report nvtx_kern_sum --report cuda_gpu_kern_sum \
    --report cuda_api_sum "$out.nsys-rep"
