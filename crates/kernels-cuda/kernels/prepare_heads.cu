#include "common.cuh"

struct PrepareHeadsParams {
    float* qkv;              // rows of [queries | keys | values]
    const u32* positions;    // by row
    const float* query_norm; // or null
    const float* key_norm;
    const float* cosines;    // [position][half]
    const float* sines;
    u32 query_heads;
    u32 kv_heads;
    u32 head_dim;            // at most 256
    u32 half;                // channels 0 .. 2 * half of a head turn
    u32 all_heads;           // 1: one norm over all heads of a row
    float eps;
};
CHECK_LAYOUT(PrepareHeadsParams);

// QK-norm and RoPE in place for heads that the kernels of attention do not know: norms over all
// heads, and RoPE of part of a head. Grid: (rows, queries or keys).
extern "C" __global__ void __launch_bounds__(256) prepare_heads(const __grid_constant__ PrepareHeadsParams p) {
    __shared__ float parts[8], head[8][256];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, d = p.head_dim;
    allow_next_kernel();
    wait_for_previous_kernel();
    const u32 heads = blockIdx.y ? p.kv_heads : p.query_heads, count = heads * d;
    float* row = p.qkv + (u64)blockIdx.x * (p.query_heads + 2 * p.kv_heads) * d + (blockIdx.y ? p.query_heads * d : 0);
    const float* norm = blockIdx.y ? p.key_norm : p.query_norm;
    const u64 angle = (u64)p.positions[blockIdx.x] * p.half;
    float scale = 1.0f;
    if (norm && p.all_heads) {
        float squares = 0.0f;
        for (u32 i = threadIdx.x; i < count; i += 256) squares = __fmaf_rn(row[i], row[i], squares);
        squares = warp_sum(squares);
        if (lane == 0) parts[warp] = squares;
        __syncthreads();
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < 8; w++) total += parts[w];
        scale = 1.0f / sqrtf(total / (float)count + p.eps);
    }
    for (u32 h = warp; h < heads; h += 8) {
        float* x = row + h * d;
        float squares = 0.0f;
        for (u32 c = lane; c < d; c += 32) squares = __fmaf_rn(x[c], x[c], squares);
        if (norm && !p.all_heads) scale = 1.0f / sqrtf(warp_sum(squares) / (float)d + p.eps);
        for (u32 c = lane; c < d; c += 32) {
            const float v = norm ? x[c] * scale * norm[p.all_heads ? h * d + c : c] : x[c];
            head[warp][c] = v;
            if (c >= 2 * p.half) x[c] = v;
        }
        __syncwarp();
        for (u32 c = lane; c < p.half; c += 32) {
            const float a = head[warp][c], b = head[warp][c + p.half], co = p.cosines[angle + c], si = p.sines[angle + c];
            x[c] = a * co - b * si;
            x[c + p.half] = b * co + a * si;
        }
        __syncwarp();
    }
}
