// Matrix product of few rows: out[row][n] = sum_k x[row][k] * w[n][k]. Bound by reading w once.
//
// Persistent blocks, one per multiprocessor. A block works through units of up to 8 * TILES
// outputs; units are cut so that all blocks have the same amount of work. The stream of weights
// never stops: each lane copies its 16 bytes of a chunk into a shared-memory slot that only this
// lane reads, a few chunks ahead, across the ends of units. The first copies come before
// wait_for_previous_kernel. (Slots instead of registers, because a warp has too few scoreboards to
// wait for one of many loads.)
//
// Warps divide the inner dimension; their sums are added in a fixed order. Weights are the B
// operand of mma.m16n8k16. The 16 bytes of a lane are eight consecutive k of one output; x is
// loaded in the same permuted order of k, so no shuffle is needed. The A operand holds each row
// twice: rounded to BF16 (row g) and its rounding error (row g + 8). That gives 16 bits of mantissa
// at no extra cost.
//
// RMSNorm can be fused: x is multiplied by the norm's weights as it is loaded; the sums are
// multiplied by the row's scale at the end, when all of x was seen. SwiGLU can be fused: half of
// the tiles of a unit are gates, the other half are the matching ups.
//
// FP8: weights are FP8 (fp8.cuh). The 16 bytes of a lane are sixteen k and become BF16 between slot
// and product. A chunk lies within one 128 x 128 block of weights; its sums are multiplied by the
// scale of that block.
#include "weights.cuh"

struct SkinnyParams {
    const u8* weights;   // [outputs][inputs]: BF16, or arranged FP8
    const float* scales; // FP8: [outputs / 128][inputs / 128], both rounded up
    const float* x;      // [rows][inputs]
    float* out;          // [rows][outputs], or [rows][outputs / 2] if gated
    const float* bias;   // or null
    const float* norm;   // weights of RMSNorm; kernels without a norm ignore it
    u32 rows;
    u32 outputs;
    u32 inputs;          // a multiple of CHUNK
    u32 add;             // 1: add to `out`
    u32 gated;           // 1: outputs are [gate | up] and out = silu(gate) * up
    float eps;           // of the norm
    // First `large_units` units of `unit` outputs, then units of `last_unit` outputs, so that all
    // blocks have the same work. If gated, only gates are counted. FP8: both are multiples of 8.
    u32 unit, last_unit, large_units, units;
};
CHECK_LAYOUT(SkinnyParams);

// The outputs of a unit.
struct UnitOutputs {
    u32 first, count;

    DEVICE UnitOutputs(const SkinnyParams& p, u32 unit) {
        const bool large = unit < p.large_units;
        first = large ? unit * p.unit : p.large_units * p.unit + (unit - p.large_units) * p.last_unit;
        count = min(large ? p.unit : p.last_unit, (p.gated ? p.outputs / 2 : p.outputs) - first);
    }
};

constexpr int EIGHTS = VALUES / 8;
// Slots per lane: one is read while the others are filled. Together they take more than half of a
// multiprocessor's shared memory, so two blocks never share a multiprocessor while another one is
// idle.
template <int TILES>
constexpr int SLOTS_OF = TILES == 3 ? 4 : 3;

// Weights are read once per step, so they are marked evict-first in L2.
DEVICE void copy_16_bytes(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(read_once())
                 : "memory");
}

// Eight values of a row, for the A operand of two products.
struct Eight {
    float4 lower, upper;

    DEVICE void load(const float* from) {
        lower = ((const float4*)from)[0];
        upper = ((const float4*)from)[1];
    }
    DEVICE void clear() { lower = upper = make_float4(0, 0, 0, 0); }
    DEVICE float squares(float sum) const {
        sum = __fmaf_rn(lower.x, lower.x, __fmaf_rn(lower.y, lower.y, sum));
        sum = __fmaf_rn(lower.z, lower.z, __fmaf_rn(lower.w, lower.w, sum));
        sum = __fmaf_rn(upper.x, upper.x, __fmaf_rn(upper.y, upper.y, sum));
        return __fmaf_rn(upper.z, upper.z, __fmaf_rn(upper.w, upper.w, sum));
    }
    DEVICE Eight times(const Eight& w) const {
        return {make_float4(lower.x * w.lower.x, lower.y * w.lower.y, lower.z * w.lower.z, lower.w * w.lower.w),
                make_float4(upper.x * w.upper.x, upper.y * w.upper.y, upper.z * w.upper.z, upper.w * w.upper.w)};
    }
    DEVICE Eight times(float f) const {
        return {make_float4(lower.x * f, lower.y * f, lower.z * f, lower.w * f),
                make_float4(upper.x * f, upper.y * f, upper.z * f, upper.w * f)};
    }
    DEVICE void parts(u32* high, u32* low) const {
        split(lower.x, lower.y, high[0], low[0]);
        split(lower.z, lower.w, high[1], low[1]);
        split(upper.x, upper.y, high[2], low[2]);
        split(upper.z, upper.w, high[3], low[3]);
    }
};

// Offset of the n-th tile in its unit; gates and ups are counted separately.
template <int TILES>
DEVICE u32 tile_place(const SkinnyParams& p, int n) {
    constexpr int HALF = TILES / 2;
    return 8 * (p.gated && n >= HALF ? n - HALF : n);
}
// First output (row of w) of the n-th tile, relative to the first output of the unit.
template <int TILES>
DEVICE u32 tile_output(const SkinnyParams& p, int n) {
    return tile_place<TILES>(p, n) + (p.gated && n >= TILES / 2 ? p.outputs / 2 : 0);
}

// The stream of a lane's copies.
template <int WARPS, int TILES>
struct Copies {
    static constexpr int SLOTS = SLOTS_OF<TILES>;
    static constexpr u32 SLOT = WARPS * TILES * 512;

    const SkinnyParams& p;
    const u32 chunks;  // chunks of this warp in each unit
    const u32 ring;    // shared address of the lane's first slot
    u32 unit, chunk, slot;
    const u8* from;
    u32 tile_offset[TILES];
    u32 there;  // bit n: the lane has an output in tile n. Sums of other tiles are never written.

    DEVICE Copies(const SkinnyParams& p, u32 chunks, u32 ring)
        : p(p), chunks(chunks), ring(ring), unit(blockIdx.x), chunk(0), slot(0) {
        if (chunks == 0) unit = p.units;
#pragma unroll
        for (int n = 0; n < TILES; n++) tile_offset[n] = tile_output<TILES>(p, n) * p.inputs * ELEMENT;
        begin_unit();
    }

    DEVICE void begin_unit() {
        if (unit >= p.units) return;
        const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const UnitOutputs outputs(p, unit);
        from = p.weights + ((u64)(outputs.first + (lane >> 2)) * p.inputs + warp * CHUNK + (lane & 3) * VALUES) * ELEMENT;
        there = 0;
#pragma unroll
        for (int n = 0; n < TILES; n++) there |= (u32)(tile_place<TILES>(p, n) + (lane >> 2) < outputs.count) << n;
    }

    // Starts the copies of the next chunk, if there is one.
    DEVICE void begin_next() {
        if (unit < p.units) {
#pragma unroll
            for (int n = 0; n < TILES; n++)
                if (there >> n & 1) copy_16_bytes(ring + slot * SLOT + n * 512, from + tile_offset[n]);
            from += WARPS * CHUNK * ELEMENT;
            if (++chunk == chunks) {
                chunk = 0, unit += gridDim.x;
                begin_unit();
            }
        }
        close_copies();
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
    }
};

template <int ROW_TILES, int WARPS, int TILES, bool NORM>
DEVICE void skinny(const SkinnyParams& p) {
    constexpr u32 CELLS = ROW_TILES * TILES * 64, HALF = TILES / 2;
    constexpr int SLOTS = SLOTS_OF<TILES>;
    // Inputs are loaded one chunk ahead if registers allow it.
    constexpr bool AHEAD = ROW_TILES * EIGHTS * WARPS <= 32;
    using LaneCopies = Copies<WARPS, TILES>;
    // Slots, then the sums of two units, f32 [unit & 1][warp][row tile][tile][8 rows][8 outputs].
    extern __shared__ u8 memory[];
    float* partial = (float*)(memory + SLOTS * LaneCopies::SLOT);
    __shared__ float squares[WARPS][ROW_TILES * 8];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const u32 all_chunks = p.inputs / CHUNK, chunks = all_chunks > warp ? (all_chunks - warp + WARPS - 1) / WARPS : 0;
    const u32 tiles = p.gated ? HALF : TILES, width = p.gated ? p.outputs / 2 : p.outputs;
    allow_next_kernel();
    // The weights of the norm come from memory, like the matrix. They are loaded before it;
    // otherwise the first products would wait for all copies in flight.
    Eight weight[EIGHTS];
    auto load_norm = [&](u32 chunk) {
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) weight[e].load(p.norm + (chunk * WARPS + warp) * CHUNK + t * VALUES + e * 8);
    };
    if (NORM) {
        if (AHEAD && chunks > 0) load_norm(0);
        for (u32 i = threadIdx.x * 32; i < p.inputs; i += 32 * WARPS * 32) prefetch_to_l2(p.norm + i);
    }
    LaneCopies copies(p, chunks, shared_address(memory) + warp * (TILES * 512) + lane * 16);
    // A kernel with a norm starts when the previous one ends. Its inputs would queue behind all
    // copies issued now, so it issues only one chunk early.
    constexpr int EARLY = NORM ? 1 : SLOTS - 1;
#pragma unroll
    for (int i = 0; i < EARLY; i++) copies.begin_next();
    // The weights are constant, so they were loaded before the wait.
    wait_for_previous_kernel();
    Eight x[ROW_TILES][EIGHTS];
    float square[ROW_TILES] = {};
    auto load_inputs = [&](u32 chunk) {
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            const u32 k = (chunk * WARPS + warp) * CHUNK + t * VALUES + e * 8;
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                if (m * 8 + g < p.rows) x[m][e].load(p.x + (u64)(m * 8 + g) * p.inputs + k);
                else x[m][e].clear();
            }
        }
    };
    if (AHEAD && chunks > 0) load_inputs(0);
#pragma unroll
    for (int i = EARLY; i < SLOTS - 1; i++) copies.begin_next();
    // The outputs that this thread sums over the warps: row, offset in the unit, offset in a warp's
    // sums.
    constexpr int MINE = (CELLS + 32 * WARPS - 1) / (32 * WARPS);
    u32 row[MINE], place[MINE], cell[MINE];
#pragma unroll
    for (int j = 0; j < MINE; j++) {
        const u32 i = threadIdx.x + j * 32 * WARPS, tile = (i >> 6) % tiles, m = (i >> 6) / tiles, within = i >> 3 & 7;
        row[j] = i < ROW_TILES * tiles * 64 ? m * 8 + within : p.rows;
        place[j] = tile * 8 + (i & 7);
        cell[j] = ((m * TILES + tile) * 8 + within) * 8 + (i & 7);
    }
    u32 slot = 0, buffer = 0;
    for (u32 unit = blockIdx.x; unit < p.units; unit += gridDim.x, buffer ^= 1) {
        const UnitOutputs outputs(p, unit);
        float sum[ROW_TILES][TILES][4] = {};
        float held[MINE];
        float* out[MINE];
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            out[j] = row[j] < p.rows && place[j] < outputs.count ? p.out + (u64)row[j] * width + outputs.first + place[j] : nullptr;
            held[j] = p.add && out[j] ? *out[j] : 0.0f;
        }
#ifdef FP8
        const u32 scale_columns = (p.inputs + FP8_BLOCK - 1) / FP8_BLOCK;
        u32 scale_row[TILES];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const u32 output = outputs.first + tile_output<TILES>(p, n);
            scale_row[n] = (output < p.outputs ? output : 0) / FP8_BLOCK * scale_columns;
        }
#endif
#pragma unroll 1
        for (u32 chunk = 0; chunk < chunks; chunk++) {
#ifdef FP8
            float scale[TILES];
#pragma unroll
            for (int n = 0; n < TILES; n++)
                scale[n] = p.scales[scale_row[n] + (chunk * WARPS + warp) * CHUNK / FP8_BLOCK];
#endif
            if (!AHEAD) {
                load_inputs(chunk);
                if (NORM) load_norm(chunk);
            }
            u32 high[ROW_TILES][VALUES / 2], low[ROW_TILES][VALUES / 2];
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) {
                if (NORM) weight[e] = weight[e].times(INPUT_FACTOR);
#pragma unroll
                for (int m = 0; m < ROW_TILES; m++) {
                    if (NORM && unit == blockIdx.x) square[m] = x[m][e].squares(square[m]);
                    (NORM ? x[m][e].times(weight[e]) : x[m][e].times(INPUT_FACTOR)).parts(high[m] + 4 * e, low[m] + 4 * e);
                }
            }
            if (AHEAD) {
                const u32 next = chunk + 1 < chunks ? chunk + 1 : 0;
                load_inputs(next);
                if (NORM) load_norm(next);
            }
            wait_for_copies<SLOTS - 2>();
            uint4 b[TILES];
#pragma unroll
            for (int n = 0; n < TILES; n++) b[n] = read_shared(copies.ring + slot * LaneCopies::SLOT + n * 512);
            slot = slot + 1 == SLOTS ? 0 : slot + 1;
            copies.begin_next();
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int m = 0; m < ROW_TILES; m++) {
#ifdef FP8
                    float of_chunk[4] = {};
#else
                    float(&of_chunk)[4] = sum[m][n];
#endif
#pragma unroll
                    for (int i = 0; i < VALUES / 4; i++) {
                        u32 first, second;
                        operand(b[n], i, first, second);
                        const int j = 2 * i;
                        mma_bf16(of_chunk, high[m][j], low[m][j], high[m][j + 1], low[m][j + 1], first, second);
                    }
#ifdef FP8
#pragma unroll
                    for (int i = 0; i < 4; i++) sum[m][n][i] = __fmaf_rn(scale[n], of_chunk[i], sum[m][n][i]);
#endif
                }
        }
        // Two buffers: a warp may store the sums of the next unit while others still read this
        // one's.
        float* sums = partial + buffer * WARPS * CELLS;
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int n = 0; n < TILES; n++)
                *(float2*)(sums + warp * CELLS + ((m * TILES + n) * 8 + g) * 8 + 2 * t) =
                    make_float2(sum[m][n][0] + sum[m][n][2], sum[m][n][1] + sum[m][n][3]);
        if (NORM && unit == blockIdx.x) {
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                const float s = quad_sum(square[m]);
                if (t == 0) squares[warp][m * 8 + g] = s;
            }
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            if (!out[j]) continue;
            float scale = SUM_FACTOR;
            if (NORM) {
                float s = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; w++) s += squares[w][row[j]];
                scale *= 1.0f / sqrtf(s / (float)p.inputs + p.eps);
            }
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) total += sums[w * CELLS + cell[j]];
            total *= scale;
            const u32 output = outputs.first + place[j];
            if (p.bias) total += p.bias[output];
            if (p.gated) {
                float up = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; w++) up += sums[w * CELLS + HALF * 64 + cell[j]];
                up *= scale;
                if (p.bias) up += p.bias[width + output];
                total = __fdividef(total, 1.0f + exp2_fast(-total * LOG2E)) * up;
            }
            *out[j] = p.add ? held[j] + total : total;
        }
    }
}

// Kernels for up to `rows` rows: blocks of `warps` warps, units of `tiles` tiles.
#ifdef FP8
#define PLAIN skinny_fp8_
#define NORMED skinny_fp8_norm_
#else
#define PLAIN skinny_
#define NORMED skinny_norm_
#endif
#define PASTE(prefix, rows, warps, tiles) prefix##rows##_##warps##_##tiles
#define NAME(prefix, rows, warps, tiles) PASTE(prefix, rows, warps, tiles)
// In many models the QKV projection has three tiles. Its registers are limited so that a block of
// `append`, which waits for it, fits on the multiprocessor beside it.
constexpr int BOUND(int rows, int warps, int tiles) { return rows == 8 && tiles == 3 && VALUES == 8 ? 640 : 32 * warps; }
#define VARIANT(rows, warps, tiles)                                                                   \
    extern "C" __global__ void __launch_bounds__(BOUND(rows, warps, tiles), 1)                        \
        NAME(PLAIN, rows, warps, tiles)(const __grid_constant__ SkinnyParams p) {                     \
        skinny<rows / 8, warps, tiles, false>(p);                                                     \
    }                                                                                                 \
    extern "C" __global__ void __launch_bounds__(BOUND(rows, warps, tiles), 1)                        \
        NAME(NORMED, rows, warps, tiles)(const __grid_constant__ SkinnyParams p) {                    \
        skinny<rows / 8, warps, tiles, true>(p);                                                      \
    }
VARIANT(8, 16, 4)
VARIANT(8, 16, 3)
VARIANT(16, 16, 4)
VARIANT(16, 16, 3)
// For GPUs with less than 100 KB of shared memory per block.
VARIANT(8, 8, 4)
VARIANT(16, 8, 4)
#ifdef FP8
// With FP8, loading and splitting the inputs costs as much as the weights; more tiles per unit
// halve it.
VARIANT(8, 8, 8)
VARIANT(16, 8, 8)
#endif
