#!/bin/sh
# Builds the checks and timings of decode attention with nvcc and runs them on the GPU at hand:
#   sh run.sh [folder for build outputs]
# The kernels are the product's; only the host side here is the CUDA driver API instead of Rust.
set -e
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-/tmp/oscar-attention-bench}
mkdir -p "$out"
for program in check time; do
    g++ -std=c++17 -O2 -pthread -I"${CUDA_HOME:-/usr/local/cuda}/include" "$here/$program.cpp" -o "$out/$program" -lcuda
done
cubin() { nvcc -std=c++17 -fmad=false -arch=sm_90 -cubin "$@"; }
cubin -o "$out/plan.cubin" "$here/../kernels/attention_plan.cu"
cubin -o "$out/read.cubin" "$here/read.cu"
cubin -DHEAD_DIM=128 -o "$out/append.cubin" "$here/../kernels/append.cu"
# head size, query tiles, reading warps, stages, split query
for v in "128 1 15 3 1" "128 1 15 3 2" "128 2 7 3 0" "64 1 15 4 0" "64 2 7 4 0" "256 1 7 3 0" "256 2 4 3 0"; do
    set -- $v
    cubin -DHEAD_DIM=$1 -DQUERY_TILES=$2 -DWARPS=$3 -DSTAGES=$4 -DSPLIT_QUERY=$5 -DBLOCKS=1 -DSHARED_BYTES=232448 \
        -o "$out/decode_$1_$2_$3_$4_$5.cubin" "$here/../kernels/attention_decode.cu"
done
for split in 1 2; do
    cubin -DHEAD_DIM=128 -DQUERY_TILES=1 -DWARPS=15 -DSTAGES=3 -DSPLIT_QUERY=$split -DBLOCKS=1 -DSHARED_BYTES=232448 \
        -DFROM_PROJECTIONS=1 -o "$out/from_projections_decode_128_1_15_3_$split.cubin" "$here/../kernels/attention_decode.cu"
done
"$out/check" "$out"
"$out/time" "$out"
"$out/time" "$out" layer
