// Mixture of experts for few rows: router, lists of rows by expert, products. A single row has kernels
// of its own (experts_single.cu), and so have the products of many rows (experts_grouped.cu).
//
// Launches of a layer; none needs the host:
//   experts_route       norm and router logits; the last block of a row chooses its experts.
//                       experts_route_many is for more rows
//   experts_sort        rows by expert, cut into tiles
//   experts_gate_many   silu(gate) * up of every slot; a slot is a chosen pair of row and expert
//   experts_down_tiles  the part of every slot
//   experts_sum         the weighted parts of a row, in ascending id of the experts
//
// Products: a block computes 8 * TILES outputs for up to 8 rows. Warps divide the inner dimension;
// a lane's 16 bytes are consecutive weights of one output. All copies of a batch are in flight
// before the first is used. The A operand holds each row twice, as in skinny_gemm.cu: rounded to
// BF16 and the rounding error. The order of every sum is fixed.
#include "experts_route.cuh"
#include "weights.cuh"

// ---- Products. ----

constexpr int WARPS = 8, THREADS = 32 * WARPS;

DEVICE uint4 load_once(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

// Adds the products of one chunk: `x` are the lane's VALUES inputs of its row.
template <int TILES>
DEVICE void multiply(float (&sum)[TILES][4], const uint4 (&b)[TILES], const float* x, float factor, const float (&scale)[TILES]) {
    u32 high[VALUES / 2], low[VALUES / 2];
#pragma unroll
    for (int q = 0; q < VALUES / 4; q++) {
        float4 v = make_float4(0, 0, 0, 0);
        if (x) v = ((const float4*)x)[q];
        split(v.x * factor, v.y * factor, high[2 * q], low[2 * q]);
        split(v.z * factor, v.w * factor, high[2 * q + 1], low[2 * q + 1]);
    }
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#ifdef FP8
        float of_chunk[4] = {};
#else
        float(&of_chunk)[4] = sum[n];
#endif
#pragma unroll
        for (int i = 0; i < VALUES / 4; i++) {
            u32 first, second;
            operand(b[n], i, first, second);
            mma_bf16(of_chunk, high[2 * i], low[2 * i], high[2 * i + 1], low[2 * i + 1], first, second);
        }
#ifdef FP8
#pragma unroll
        for (int i = 0; i < 4; i++) sum[n][i] = __fmaf_rn(scale[n], of_chunk[i], sum[n][i]);
#endif
    }
}

// Sums over the warps, in their order: cell (tile, row, output).
template <int TILES>
struct BlockSums {
    float cells[WARPS][TILES][8][8];

    DEVICE void put(const float (&sum)[TILES][4]) {
        const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
        for (int n = 0; n < TILES; n++)
            *(float2*)&cells[warp][n][lane >> 2][2 * (lane & 3)] = make_float2(sum[n][0] + sum[n][2], sum[n][1] + sum[n][3]);
        __syncthreads();
    }
    DEVICE float total(u32 tile, u32 row, u32 output) const {
        float t = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) t += cells[w][tile][row][output];
        return t * SUM_FACTOR;
    }
};

DEVICE u32 blocks_of(u32 n) { return (n + FP8_BLOCK - 1) / FP8_BLOCK; }

// Batches of chunks whose copies are in flight together.
template <int TILES>
constexpr int BATCH = 16 / TILES;

// silu(gate) * up of a tile's slots; PAIRS tiles of 8 gates and the matching ups. Grid: (tiles,
// width / (8 * PAIRS)).
template <int PAIRS>
DEVICE void gate(const ExpertsParams& p) {
    constexpr int TILES = 2 * PAIRS;
    __shared__ BlockSums<TILES> sums;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    allow_next_kernel();
    wait_for_previous_kernel();
    if (blockIdx.x >= __ldcg(p.tile_count)) return;
    const uint4 tile = __ldcg(p.tiles + blockIdx.x);
    const u32 expert = tile.x, first_output = blockIdx.y * 8 * PAIRS;
    const u64 matrix = (u64)p.width * p.hidden;
    const u8* from[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        const u32 output = first_output + 8 * (n % PAIRS) + g;
        from[n] = p.gate_up + (((u64)expert * 2 + n / PAIRS) * matrix + (u64)min(output, p.width - 1) * p.hidden + t * VALUES) * ELEMENT;
    }
    const float* x = nullptr;
    if (g < tile.z) x = p.normed + (u64)(__ldcg(p.slots + tile.y + g) / p.per_row) * p.hidden + t * VALUES;
    const u32 columns = blocks_of(p.hidden), grid_rows = blocks_of(p.width);
    const u32 chunks = p.hidden / CHUNK;
    float sum[TILES][4] = {};
    for (u32 base = warp; base < chunks; base += WARPS * BATCH<TILES>) {
        uint4 b[BATCH<TILES>][TILES];
#pragma unroll
        for (int i = 0; i < BATCH<TILES>; i++) {
            const u32 chunk = base + i * WARPS;
            if (chunk < chunks)
#pragma unroll
                for (int n = 0; n < TILES; n++) b[i][n] = load_once(from[n] + (u64)chunk * CHUNK * ELEMENT);
        }
#pragma unroll
        for (int i = 0; i < BATCH<TILES>; i++) {
            const u32 chunk = base + i * WARPS;
            if (chunk >= chunks) break;
            float scale[TILES];
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                scale[n] = 1.0f;
#ifdef FP8
                if (!p.channels)
                    scale[n] = p.gate_up_scales[((u64)(expert * 2 + n / PAIRS) * grid_rows + min(first_output + 8 * (n % PAIRS), p.width - 1) / FP8_BLOCK) * columns +
                                                chunk * CHUNK / FP8_BLOCK];
#endif
            }
            multiply<TILES>(sum, b[i], x ? x + chunk * CHUNK : nullptr, INPUT_FACTOR, scale);
        }
    }
    sums.put(sum);
    for (u32 i = threadIdx.x; i < PAIRS * 64; i += THREADS) {
        const u32 n = i >> 6, row = i >> 3 & 7, output = first_output + 8 * n + (i & 7);
        if (row >= tile.z || output >= p.width) continue;
        float gate = sums.total(n, row, i & 7), up = sums.total(n + PAIRS, row, i & 7);
#ifdef FP8
        if (p.channels) {
            const float* scales = p.gate_up_scales + (u64)expert * 2 * p.width;
            gate *= scales[output], up *= scales[p.width + output];
        }
#endif
        p.between[(u64)(tile.y + row) * p.width + output] = gated_output(p, expert, output, gate, up);
    }
}

// The weights and the scale of a chunk.
DEVICE const u8* down_weights(const ExpertsParams& p, u32 expert, u32 output, u32 chunk, u32 t) {
    return p.down + (((u64)expert * p.hidden + min(output, p.hidden - 1)) * p.width + chunk * CHUNK + t * VALUES) * ELEMENT;
}
DEVICE float down_scale(const ExpertsParams& p, u32 expert, u32 output, u32 chunk) {
#ifdef FP8
    if (!p.channels)
        return p.down_scales[((u64)expert * blocks_of(p.hidden) + min(output, p.hidden - 1) / FP8_BLOCK) * blocks_of(p.width) + chunk * CHUNK / FP8_BLOCK];
#endif
    return 1.0f;
}

// One expert's part for a tile of slots. Grid: (tiles, hidden / (8 * TILES)).
template <int TILES>
DEVICE void down_tiles(const ExpertsParams& p) {
    __shared__ BlockSums<TILES> sums;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    allow_next_kernel();
    wait_for_previous_kernel();
    if (blockIdx.x >= __ldcg(p.tile_count)) return;
    const uint4 tile = __ldcg(p.tiles + blockIdx.x);
    const u32 expert = tile.x, first_output = blockIdx.y * 8 * TILES;
    const float* x = g < tile.z ? p.between + (u64)(tile.y + g) * p.width + t * VALUES : nullptr;
    const u32 chunks = p.width / CHUNK;
    float sum[TILES][4] = {};
    for (u32 base = warp; base < chunks; base += WARPS * BATCH<TILES>) {
        uint4 b[BATCH<TILES>][TILES];
#pragma unroll
        for (int i = 0; i < BATCH<TILES>; i++) {
            const u32 chunk = base + i * WARPS;
            if (chunk < chunks)
#pragma unroll
                for (int n = 0; n < TILES; n++) b[i][n] = load_once(down_weights(p, expert, first_output + 8 * n + g, chunk, t));
        }
#pragma unroll
        for (int i = 0; i < BATCH<TILES>; i++) {
            const u32 chunk = base + i * WARPS;
            if (chunk >= chunks) break;
            float scale[TILES];
#pragma unroll
            for (int n = 0; n < TILES; n++) scale[n] = down_scale(p, expert, first_output + 8 * n, chunk);
            multiply<TILES>(sum, b[i], x ? x + chunk * CHUNK : nullptr, INPUT_FACTOR, scale);
        }
    }
    sums.put(sum);
    for (u32 i = threadIdx.x; i < TILES * 64; i += THREADS) {
        const u32 n = i >> 6, row = i >> 3 & 7, output = first_output + 8 * n + (i & 7);
        if (row >= tile.z || output >= p.hidden) continue;
        float total = sums.total(n, row, i & 7);
#ifdef FP8
        if (p.channels) total *= p.down_scales[(u64)expert * p.hidden + output];
#endif
        p.partial[(u64)(tile.y + row) * p.hidden + output] = with_down_bias(p, expert, output, total);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) experts_gate_many(const __grid_constant__ ExpertsParams p) { gate<2>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) experts_down_tiles(const __grid_constant__ ExpertsParams p) { down_tiles<4>(p); }

// x += the weighted parts of a row, in ascending id. Grid: (rows, hidden / 4 / blockDim.x).
extern "C" __global__ void experts_sum(const __grid_constant__ ExpertsParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const u32 row = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= p.hidden / 4) return;
    float4* x = (float4*)(p.x + (u64)row * p.hidden) + i;
    float4 sum = *x;
    for (u32 n = 0; n < p.per_row; n++) {
        const float w = p.weights[row * p.per_row + n];
        const float4 v = ((const float4*)(p.partial + (u64)p.slot_of[row * p.per_row + n] * p.hidden))[i];
        sum = make_float4(__fmaf_rn(w, v.x, sum.x), __fmaf_rn(w, v.y, sum.y), __fmaf_rn(w, v.z, sum.z), __fmaf_rn(w, v.w, sum.w));
    }
    *x = sum;
}
