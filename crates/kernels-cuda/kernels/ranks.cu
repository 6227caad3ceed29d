// What ranks of a model exchange: sums, and parts of rows.
#include "common.cuh"

struct SumRanksParams {
    const float* parts;  // values of rank 0, then those of rank 1 and so on
    float* out;
    u64 count;
    u32 ranks;
};
CHECK_LAYOUT(SumRanksParams);

// In rank order, so that every rank gets the same bits. `out` may be the part of any rank.
extern "C" __global__ void sum_ranks(SumRanksParams p) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += (u64)gridDim.x * blockDim.x) {
        float sum = p.parts[i];
        for (u32 rank = 1; rank < p.ranks; ++rank) sum = __fadd_rn(sum, p.parts[rank * p.count + i]);
        p.out[i] = sum;
    }
}

struct CopyColumnsParams {
    const float* from;
    float* to;
    u32 from_stride;
    u32 to_stride;
    u32 width;
};
CHECK_LAYOUT(CopyColumnsParams);

// The first `width` columns of rows. Grid: blocks of columns by rows.
extern "C" __global__ void copy_columns(CopyColumnsParams p) {
    const u32 column = blockIdx.x * blockDim.x + threadIdx.x;
    const u64 row = blockIdx.y;
    if (column < p.width) p.to[row * p.to_stride + column] = p.from[row * p.from_stride + column];
}
