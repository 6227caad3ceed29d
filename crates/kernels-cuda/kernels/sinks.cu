// Attention sinks under centred keys. A key mean takes scale * q.mean off every score of a row, so the
// sinks of the row move by as much. Queries are rotated, and so is the mean that the host gives.
#include "common.cuh"

struct ShiftSinksParams {
    const float* sinks;    // [query head]
    const float* queries;  // [row][query head][head_dim], rotated
    const float* means;    // [KV head][head_dim], rotated
    float* out;            // [row][query head]
    u32 rows;
    u32 query_heads;
    u32 group;             // query heads of a KV head
    u32 head_dim;          // a multiple of 32
    float scale;
};
CHECK_LAYOUT(ShiftSinksParams);

// A warp takes a query head of a row.
extern "C" __global__ void shift_sinks(ShiftSinksParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const u32 lane = threadIdx.x & 31, warps = blockDim.x / 32;
    const u64 count = (u64)p.rows * p.query_heads;
    for (u64 i = (u64)blockIdx.x * warps + threadIdx.x / 32; i < count; i += (u64)gridDim.x * warps) {
        const u32 head = i % p.query_heads;
        const float *query = p.queries + i * p.head_dim, *mean = p.means + head / p.group * p.head_dim;
        float dot = 0.0f;
        for (u32 c = lane; c < p.head_dim; c += 32) dot = __fmaf_rn(query[c], mean[c], dot);
        dot = warp_sum(dot);
        if (lane == 0) p.out[i] = p.sinks[head] - p.scale * dot;
    }
}
