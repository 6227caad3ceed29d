// Few rows times a large matrix: out[row][n] = sum_k x[row][k] * w[n][k], which is reading w once.
//
// A block makes 8*TILES outputs for up to 8*ROW_TILES rows; its warps share the inner dimension and their sums are added
// in a fixed order. Weights are the right operand of mma.m16n8k16, straight from memory: a lane's 16 bytes are eight
// consecutive k of one output, which the products take in an order of their own, the same on both sides. The left
// operand holds a row twice, rounded to BF16 (row g) and what the rounding lost (row g + 8): 16 bits of mantissa for free.
//
// SwiGLU can be part of it: half of a block's tiles are then gates, the other half their ups.
#include "common.cuh"

struct SkinnyParams {
    const u16* weights;  // BF16 [outputs][inputs]
    const float* x;      // [rows][inputs]
    float* out;          // [rows][outputs], or [rows][outputs / 2] if gated
    const float* bias;   // or null
    u32 rows;
    u32 outputs;         // a multiple of 8; of 8 * TILES if gated
    u32 inputs;          // a multiple of 32
    u32 add;             // to what `out` holds
    u32 gated;           // outputs are [gate | up] and out = silu(gate) * up
};

DEVICE uint4 load_weights(const u16* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// The two BF16 parts of a pair of values.
DEVICE void split(float a, float b, u32& high, u32& low) {
    high = pack_bf16(a, b);
    low = pack_bf16(a - low_bf16(high), b - high_bf16(high));
}

// DEPTH chunks of 32 k are in flight for each warp.
template <int ROW_TILES, int TILES, int DEPTH>
DEVICE void skinny(const SkinnyParams& p) {
    extern __shared__ float partial[];  // [warp][row tile][tile][8 rows][8 outputs]
    constexpr u32 CELLS = ROW_TILES * TILES * 64, HALF = TILES / 2;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const u32 g = lane >> 2, t = lane & 3;
    // First output of the block; of a gated block, first gate.
    const u32 first = blockIdx.x * 8 * (p.gated ? HALF : TILES);
    const u32 chunks = p.inputs / 32;
    const u16* w = p.weights + (u64)(first + g) * p.inputs + t * 8;
    u32 offset[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        u32 output = p.gated && n >= HALF ? p.outputs / 2 + (n - HALF) * 8 : n * 8;
        // Tiles beyond the matrix read the first one again; nobody writes their sums.
        offset[n] = first + output < p.outputs ? output * p.inputs : 0;
    }
    float sum[ROW_TILES][TILES][4] = {};
    uint4 b[DEPTH][TILES];
    allow_next_kernel();
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        u32 c = warp + d * warps;
#pragma unroll
        for (int n = 0; n < TILES; n++)
            if (c < chunks) b[d][n] = load_weights(w + offset[n] + c * 32);
    }
    // Weights never change; everything below does.
    wait_for_previous_kernel();
    for (u32 c0 = warp; c0 < chunks; c0 += DEPTH * warps) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            u32 c = c0 + d * warps;
            if (c >= chunks) break;
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                u32 row = m * 8 + g;
                float4 lower = make_float4(0, 0, 0, 0), upper = lower;
                if (row < p.rows) {
                    const float4* x = (const float4*)(p.x + (u64)row * p.inputs + c * 32 + t * 8);
                    lower = x[0];
                    upper = x[1];
                }
                u32 high[4], low[4];
                split(lower.x, lower.y, high[0], low[0]);
                split(lower.z, lower.w, high[1], low[1]);
                split(upper.x, upper.y, high[2], low[2]);
                split(upper.z, upper.w, high[3], low[3]);
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    mma_bf16(sum[m][n], high[0], low[0], high[1], low[1], b[d][n].x, b[d][n].y);
                    mma_bf16(sum[m][n], high[2], low[2], high[3], low[3], b[d][n].z, b[d][n].w);
                }
            }
            u32 next = c + DEPTH * warps;
#pragma unroll
            for (int n = 0; n < TILES; n++)
                if (next < chunks) b[d][n] = load_weights(w + offset[n] + next * 32);
        }
    }
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            float* at = partial + (((warp * ROW_TILES + m) * TILES + n) * 8 + g) * 8 + 2 * t;
            at[0] = sum[m][n][0] + sum[m][n][2];
            at[1] = sum[m][n][1] + sum[m][n][3];
        }
    }
    __syncthreads();
    const u32 cells = p.gated ? CELLS / 2 : CELLS, tiles = p.gated ? HALF : TILES;
    const u32 width = p.gated ? p.outputs / 2 : p.outputs;
    for (u32 i = threadIdx.x; i < cells; i += blockDim.x) {
        const u32 column = i & 7, within = i >> 3 & 7, tile = (i >> 6) % tiles, m = (i >> 6) / tiles;
        const u32 row = m * 8 + within, output = first + tile * 8 + column;
        if (row >= p.rows || output >= width) continue;
        const float* cell = partial + ((m * TILES + tile) * 8 + within) * 8 + column;
        float total = 0.0f;
        for (u32 k = 0; k < warps; k++) total += cell[k * CELLS];
        if (p.bias) total += p.bias[output];
        if (p.gated) {
            float up = 0.0f;
            for (u32 k = 0; k < warps; k++) up += cell[k * CELLS + HALF * 64];
            if (p.bias) up += p.bias[width + output];
            total = __fdividef(total, 1.0f + exp2_fast(-total * LOG2E)) * up;
        }
        float* out = p.out + (u64)row * width + output;
        *out = p.add ? *out + total : total;
    }
}

// A block has at most `warps` warps, and `blocks` of them share a multiprocessor: with several, the next kernel's first
// weights are on their way while this one ends.
#define VARIANT(rows, tiles, depth, warps, blocks)                                                                 \
    extern "C" __global__ void __launch_bounds__(32 * warps, blocks) skinny_##rows##_##tiles##_##depth##_##warps(  \
        SkinnyParams p) {                                                                                          \
        skinny<rows / 8, tiles, depth>(p);                                                                         \
    }
VARIANT(8, 2, 4, 16, 1)
VARIANT(8, 4, 2, 8, 3)
VARIANT(8, 4, 2, 16, 1)
VARIANT(8, 4, 4, 8, 2)
VARIANT(16, 4, 2, 8, 2)
VARIANT(16, 4, 2, 16, 1)
