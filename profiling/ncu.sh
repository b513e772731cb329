#!/usr/bin/env bash
# Nsight Compute over every kernel in a steady step.
#
#   profiling/ncu.sh table OUT.csv        the numbers of the resource table, as CSV
#   profiling/ncu.sh report OUT           sections to be looked at in the GUI: OUT.ncu-rep
#
# What follows OUT goes to ncu. KERNEL is a regular expression for fewer kernels, PYTHON names the
# interpreter, NCU the profiler, REPEAT how often each step is profiled.
set -euo pipefail

usage() { sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[[ $# -ge 2 ]] || usage
what=$1 out=$(realpath -m "$2")
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Only what runs inside the range, so that what warms up is left out; clocks stay as they are.
# Caches are flushed before each pass (ncu's default), so times are those of cold caches.
common=(
    --clock-control none
    --nvtx --nvtx-include "sgalloc@profiled/"
    --kernel-name-base function
    --kernel-name "regex:${KERNEL:-^(assign_|replay_|page_watermarks|export_pages|row_digest)}"
)
# What profiling/ncu_table.py reads.
metrics=(
    gpu__time_duration.sum
    launch__registers_per_thread
    launch__shared_mem_per_block_static
    launch__shared_mem_per_block_dynamic
    launch__block_size
    launch__grid_size
    sm__maximum_warps_per_active_cycle_pct
    sm__warps_active.avg.pct_of_peak_sustained_active
    dram__bytes_write.sum
    dram__bytes_read.sum
    dram__throughput.avg.pct_of_peak_sustained_elapsed
    lts__t_bytes.sum
    lts__throughput.avg.pct_of_peak_sustained_elapsed
)
sections=(
    SpeedOfLight LaunchStats Occupancy MemoryWorkloadAnalysis MemoryWorkloadAnalysis_Tables
    SchedulerStats WarpStateStats SourceCounters
)
step=("${PYTHON:-python3}" -m profiling.gpu.profiled --repeat "${REPEAT:-3}")

case $what in
table)
    list=$(IFS=,; echo "${metrics[*]}")
    "${NCU:-ncu}" "${common[@]}" --metrics "$list" --csv --page raw --print-units base \
        --log-file "$out" "$@" "${step[@]}"
    ;;
report)
    "${NCU:-ncu}" "${common[@]}" "${sections[@]/#/--section=}" --import-source yes \
        --force-overwrite --export "$out" "$@" "${step[@]}"
    ;;
*) usage ;;
esac
