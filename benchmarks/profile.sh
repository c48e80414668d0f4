#!/bin/sh
# ncu of one variant: profile.sh OUT NAME JSON
ncu --clock-control none -k regex:kernel_cutlass -s 1 -c 1 --metrics \
sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active,sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active,sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active,smsp__issue_active.avg.pct_of_peak_sustained_active,l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed,sm__cycles_elapsed.max,gpu__time_duration.sum,smsp__cycles_active.avg,sm__throughput.avg.pct_of_peak_sustained_elapsed,lts__t_sectors_op_read.sum,dram__bytes_read.sum \
--section WarpStateStats --section SourceCounters --import-source no \
python3 -m benchmarks.sm90_forward --profile "$3" > "$1/ncu_$2.txt" 2>&1
