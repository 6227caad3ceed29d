// Few rows times a large matrix: out[row][n] = sum_k x[row][k] * w[n][k], which is reading w once.
//
// A block takes a multiprocessor for itself and works through units of up to 8 * TILES outputs, so that there are as many blocks
// as multiprocessors, each with as much to do as any other, and weights flow without a break: each lane copies its 16 bytes of a
// chunk into a slot of shared memory that it alone reads, a few chunks ahead, over the end of a unit into the next, and, before
// anything else, ahead of the wait for the kernel that makes x. (Slots instead of registers: a warp has too few scoreboards to
// wait for one of many loads.)
//
// Warps share the inner dimension; their sums are added in a fixed order. Weights are the right operand of mma.m16n8k16: a
// lane's 16 bytes are eight consecutive k of one output, which the products take in an order of their own, the same on both
// sides. The left operand holds a row twice, rounded to BF16 (row g) and what the rounding lost (row g + 8): 16 bits of
// mantissa for free.
//
// RMSNorm can be part of it: inputs are multiplied by its weights on their way, the row's scale is known when all have passed
// and multiplies the sums. SwiGLU can be part of it: half of a unit's tiles are then gates, the other half their ups.
//
// With FP8 defined weights are FP8 (`fp8.cuh`): a lane's 16 bytes are sixteen k, become BF16 between slot and product, and a
// chunk, which lies in one block, has sums of its own that its blocks' scales multiply. Everything else is the same.
#include "fp8.cuh"

struct SkinnyParams {
    const u8* weights;   // [outputs][inputs]: BF16, or arranged FP8
    const float* scales; // of FP8 weights, [outputs / 128][inputs / 128], both rounded up
    const float* x;      // [rows][inputs]
    float* out;          // [rows][outputs], or [rows][outputs / 2] if gated
    const float* bias;   // or null
    const float* norm;   // weights of the norm of x; the kernels without a norm ignore it
    u32 rows;
    u32 outputs;
    u32 inputs;          // a multiple of CHUNK
    u32 add;             // to what `out` holds
    u32 gated;           // outputs are [gate | up] and out = silu(gate) * up
    float eps;           // of the norm
    // Units of `unit` outputs (gates alone if gated), then smaller ones of `last_unit` so that all blocks have as much to do.
    // FP8: both are multiples of 8.
    u32 unit, last_unit, large_units, units;
};

// The outputs of a unit.
struct UnitOutputs {
    u32 first, count;

    DEVICE UnitOutputs(const SkinnyParams& p, u32 unit) {
        const bool large = unit < p.large_units;
        first = large ? unit * p.unit : p.large_units * p.unit + (unit - p.large_units) * p.last_unit;
        count = min(large ? p.unit : p.last_unit, (p.gated ? p.outputs / 2 : p.outputs) - first);
    }
};

#ifdef FP8
constexpr u32 VALUES = 16;  // that a lane takes at a time: 16 bytes
// Weights come 2^-120 times too small; half of it is made up for here, half at the end, so that nothing leaves f32's range.
constexpr float INPUT_FACTOR = 0x1p60f, SUM_FACTOR = FP8_TOO_SMALL_BY / INPUT_FACTOR;
#else
constexpr u32 VALUES = 8;
constexpr float INPUT_FACTOR = 1.0f, SUM_FACTOR = 1.0f;
#endif
constexpr u32 CHUNK = 4 * VALUES;  // of the inner dimension, which a warp takes at a time
constexpr u32 ELEMENT = 16 / VALUES;
constexpr int EIGHTS = VALUES / 8;
// Slots of a lane for units of so many tiles: one is read while the others fill. More than half of a multiprocessor's shared
// memory, so that no two blocks ever share one while another has none.
template <int TILES>
constexpr int SLOTS_OF = TILES == 3 ? 4 : 3;

// Weights are read once a step: they need not push anything else out of L2.
DEVICE void copy_16_bytes(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(read_once())
                 : "memory");
}

// Closes the group of copies begun since the last one, which may be empty.
DEVICE void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all groups but the last `PENDING` have landed.
template <int PENDING>
DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

DEVICE uint4 read_slot(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

// The two BF16 parts of a pair of values.
DEVICE void split(float a, float b, u32& high, u32& low) {
    high = pack_bf16(a, b);
    low = pack_bf16(a - low_bf16(high), b - high_bf16(high));
}

// Eight values of a row, as the left operand of two products.
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

// The right operand of the i-th product of a lane's 16 bytes.
DEVICE void operand(const uint4& bytes, int i, u32& first, u32& second) {
    const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#ifdef FP8
    first = fp8_first_pair(words[i]), second = fp8_second_pair(words[i]);
#else
    first = words[2 * i], second = words[2 * i + 1];
#endif
}

// Outputs of a unit before its n-th tile, gates and ups apart.
template <int TILES>
DEVICE u32 tile_place(const SkinnyParams& p, int n) {
    constexpr int HALF = TILES / 2;
    return 8 * (p.gated && n >= HALF ? n - HALF : n);
}
// The tile's first output, counted from the unit's.
template <int TILES>
DEVICE u32 tile_output(const SkinnyParams& p, int n) {
    return tile_place<TILES>(p, n) + (p.gated && n >= TILES / 2 ? p.outputs / 2 : 0);
}

// Where a lane's copies have got to.
template <int WARPS, int TILES>
struct Copies {
    static constexpr int SLOTS = SLOTS_OF<TILES>;
    static constexpr u32 SLOT = WARPS * TILES * 512;

    const SkinnyParams& p;
    const u32 chunks;  // of this warp, in each unit
    const u32 ring;    // shared address of the lane's first slot
    u32 unit, chunk, slot;
    const u8* from;
    u32 tile_offset[TILES];
    u32 there;  // a bit for each tile of which the lane has an output; sums of the others are not written

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

    // Begins the copies of the next chunk, if there is one.
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
    // Inputs are loaded a chunk ahead where registers allow it.
    constexpr bool AHEAD = ROW_TILES * EIGHTS * WARPS <= 32;
    using LaneCopies = Copies<WARPS, TILES>;
    extern __shared__ u8 memory[];  // slots, then two units' sums, f32 [unit & 1][warp][row tile][tile][8 rows][8 outputs]
    float* partial = (float*)(memory + SLOTS * LaneCopies::SLOT);
    __shared__ float squares[WARPS][ROW_TILES * 8];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const u32 all_chunks = p.inputs / CHUNK, chunks = all_chunks > warp ? (all_chunks - warp + WARPS - 1) / WARPS : 0;
    const u32 tiles = p.gated ? HALF : TILES, width = p.gated ? p.outputs / 2 : p.outputs;
    allow_next_kernel();
    // Weights of the norm come from far away, like the matrix: ahead of it, or the first sums would wait for all of both.
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
    // A kernel with a norm begins when the one before it ends: of what it asks for now, its inputs would be in line behind all.
    constexpr int EARLY = NORM ? 1 : SLOTS - 1;
#pragma unroll
    for (int i = 0; i < EARLY; i++) copies.begin_next();
    // Weights never change; everything below does.
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
    // The outputs of a unit that this thread adds up: row, place in the unit and place in a warp's sums.
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
            for (int n = 0; n < TILES; n++) b[n] = read_slot(copies.ring + slot * LaneCopies::SLOT + n * 512);
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
        // Two buffers: a warp may begin the next unit's sums while others still add up this one's.
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
                float s = square[m] + __shfl_xor_sync(0xffffffffu, square[m], 1);
                s += __shfl_xor_sync(0xffffffffu, s, 2);
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

// For up to `rows` rows, in blocks of `warps` warps, units of `tiles` tiles.
#ifdef FP8
#define PLAIN skinny_fp8_
#define NORMED skinny_fp8_norm_
#else
#define PLAIN skinny_
#define NORMED skinny_norm_
#endif
#define PASTE(prefix, rows, warps, tiles) prefix##rows##_##warps##_##tiles
#define NAME(prefix, rows, warps, tiles) PASTE(prefix, rows, warps, tiles)
// What makes queries, keys and values is of three tiles in many models: it takes no more registers than leave room for a block
// of `append` beside it, which waits for it.
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
// For GPUs with less than 100 KB of shared memory a block.
VARIANT(8, 8, 4)
VARIANT(16, 8, 4)
#ifdef FP8
// Half as many inputs for a byte of weights: with FP8 they cost as much to bring and to split as the weights.
VARIANT(8, 8, 8)
VARIANT(16, 8, 8)
#endif
