// Experts of many rows: products of tensor cores over rows sorted by expert.
//
// A unit is a tile of rows of one expert (`tiles`) times 128 rows of its weights: 64 gates and the
// matching ups, or 128 outputs of down. Blocks, as many as run together, take every gridDim-th unit;
// the host knows neither counts nor experts. Chunks of 64 inputs go through a ring in shared
// memory (cp.async), which runs ahead across the ends of units. Activations are BF16; a tile's rows
// are gathered by the copies, so nothing is permuted in memory.
//
// Eight warps: two halves of the tile's rows times four quarters of the weights. A warp multiplies
// STEPS x 16 rows by 32 rows of weights. Which weights a warp's products take is chosen so that a
// lane ends with neighbouring outputs.
//
// FP8: codes are scaled and rounded to BF16 between shared memory and product, as `expand_fp8` does.
// A lane's 16 bytes are 16 consecutive inputs of one output, so inputs are stored in the order in
// which products meet them: within 64 inputs, input 16a + 4b + 2c + d lies at 16b + 8c + 2a + d.
#include "experts.cuh"
#include "fp8.cuh"

constexpr u32 DEPTH = 64;       // inputs of a chunk
constexpr u32 WEIGHT_ROWS = 128;
constexpr u32 ROW_BYTES = 128;  // of a chunk of activations
constexpr u32 THREADS = 256, MOST_TILE_ROWS = 256;
#ifdef FP8
constexpr u32 ELEMENT = 1;
// Weights are 2^-60 times their value; the rest of FP8_TOO_SMALL_BY joins the sums.
constexpr float WEIGHT_FACTOR = 0x1p60f, SUM_FACTOR = FP8_TOO_SMALL_BY / WEIGHT_FACTOR;
#else
constexpr u32 ELEMENT = 2;
constexpr float SUM_FACTOR = 1.0f;
#endif
constexpr u32 WEIGHT_BYTES = DEPTH * ELEMENT;  // of one output in a chunk
constexpr u32 PIECES = WEIGHT_BYTES / 16;      // copies of one output
constexpr u32 WEIGHT_COPIES = WEIGHT_ROWS * PIECES / THREADS, ROW_COPIES = MOST_TILE_ROWS * 8 / THREADS;

// Waits until at most `stages - 2` groups of copies are pending.
DEVICE void wait_for_stage(u32 stages) {
    switch (stages) {
        case 2: return wait_for_copies<0>();
        case 3: return wait_for_copies<1>();
        case 4: return wait_for_copies<2>();
        case 5: return wait_for_copies<3>();
        case 6: return wait_for_copies<4>();
        case 7: return wait_for_copies<5>();
        default: return wait_for_copies<6>();
    }
}

// One unit of work.
template <bool GATE>
struct Unit {
    u32 expert, first_slot, rows, column;

    DEVICE Unit(const ExpertsParams& p, u32 unit, u32 tiles) {
        // Tiles of one expert and column run together, so weights are read once.
        const uint4 tile = __ldcg(p.tiles + unit % tiles);
        expert = tile.x, first_slot = tile.y, rows = tile.z, column = unit / tiles;
    }
};

// Product of the gate or of down: sizes and places.
template <bool GATE>
struct Sizes {
    const u32 inputs, outputs, columns, chunks;
    DEVICE Sizes(const ExpertsParams& p)
        : inputs(GATE ? p.hidden : p.width),
          outputs(GATE ? p.width : p.hidden),
          columns(GATE ? (p.width + 63) / 64 : (p.hidden + 127) / 128),
          chunks((inputs + DEPTH - 1) / DEPTH) {}
};

// A chunk in shared memory: weights, then rows. Pieces of 16 bytes are permuted within the 128 bytes
// of a row, so that the eight rows that a product loads together lie in different banks.
DEVICE u32 stage_bytes(const ExpertsParams& p) { return WEIGHT_ROWS * WEIGHT_BYTES + p.tile_rows * ROW_BYTES; }
template <bool GATE>
DEVICE u32 weight_place(u32 row, u32 piece) {
#ifdef FP8
    return row * WEIGHT_BYTES + piece * 16;
#else
    const u32 column = (GATE ? row >> 1 & 6 : row >> 2 & 6) | (row & 1);
    return row * WEIGHT_BYTES + ((piece ^ column) << 4);
#endif
}
DEVICE u32 row_place(u32 row, u32 piece) { return row * ROW_BYTES + ((piece ^ (row & 7)) << 4); }

// The thread's copies, one chunk after the other.
template <bool GATE>
struct Copies {
    const ExpertsParams& p;
    const Sizes<GATE> sizes;
    const u32 memory, tiles, units;
    u32 unit, chunk, stage, rows;
    const u8* weights[WEIGHT_COPIES];
    const u16* inputs[ROW_COPIES];

    DEVICE Copies(const ExpertsParams& p, u32 memory, u32 tiles)
        : p(p), sizes(p), memory(memory), tiles(tiles), units(tiles * sizes.columns), unit(blockIdx.x), chunk(0), stage(0) {
        begin_unit();
    }

    DEVICE void begin_unit() {
        if (unit >= units) return;
        const Unit<GATE> u(p, unit, tiles);
        rows = u.rows;
#pragma unroll
        for (u32 i = 0; i < WEIGHT_COPIES; i++) {
            const u32 row = threadIdx.x / PIECES + i * (THREADS / PIECES), piece = threadIdx.x % PIECES;
            const u32 half = GATE ? row / 64 : 0, output = min(GATE ? u.column * 64 + row % 64 : u.column * 128 + row, sizes.outputs - 1);
            const u64 at = (((u64)u.expert * (GATE ? 2 : 1) + half) * sizes.outputs + output) * sizes.inputs;
            weights[i] = (GATE ? p.gate_up : p.down) + at * ELEMENT + piece * 16;
        }
#pragma unroll
        for (u32 i = 0; i < ROW_COPIES; i++) {
            const u32 row = min(threadIdx.x / 8 + i * 32, rows - 1), slot = u.first_slot + row;
            const u64 at = (u64)(GATE ? __ldcg(p.slots + slot) / p.per_row : slot) * sizes.inputs;
            inputs[i] = (const u16*)(GATE ? p.normed : p.between) + at + threadIdx.x % 8 * 8;
        }
    }

    // Starts the copies of the next chunk, if there is one.
    DEVICE void begin_next() {
        if (unit < units) {
            const u32 to = memory + stage * stage_bytes(p), at = chunk * DEPTH;
#pragma unroll
            for (u32 i = 0; i < WEIGHT_COPIES; i++) {
                const u32 row = threadIdx.x / PIECES + i * (THREADS / PIECES), piece = threadIdx.x % PIECES;
                const bool there = ELEMENT == 1 || at + piece * 8 < sizes.inputs;
                copy_or_clear(to + weight_place<GATE>(row, piece), there ? weights[i] + at * ELEMENT : weights[i], there);
            }
#pragma unroll
            for (u32 i = 0; i < ROW_COPIES; i++) {
                const u32 row = threadIdx.x / 8 + i * 32, piece = threadIdx.x % 8;
                if (i * 32 >= rows) break;
                const bool there = ELEMENT == 1 || at + piece * 8 < sizes.inputs;
                copy_or_clear(to + WEIGHT_ROWS * WEIGHT_BYTES + row_place(row, piece), there ? inputs[i] + at : inputs[i], there);
            }
            if (++chunk == sizes.chunks) {
                chunk = 0, unit += gridDim.x;
                begin_unit();
            }
        }
        close_copies();
        stage = stage + 1 == p.stages ? 0 : stage + 1;
    }
};

// Row of the chunk's weights that is column `j` of a warp's n-th product. Lane t of a row of sums
// then holds neighbouring outputs.
template <bool GATE>
DEVICE u32 weight_row(u32 quarter, u32 n, u32 j) {
    const u32 t = j >> 1, d = j & 1;
    if (!GATE) return quarter * 32 + t * 8 + n * 2 + d;
    const u32 half = n / 2 * 64;
#ifdef FP8
    return half + (2 * (t & 1) + n % 2) * 16 + quarter * 4 + (t >> 1) * 2 + d;
#else
    return half + quarter * 16 + t * 4 + n % 2 * 2 + d;
#endif
}

#ifdef FP8
DEVICE u32 scaled_pair(u32 pair, float scale) { return pack_bf16(low_bf16(pair) * scale, high_bf16(pair) * scale); }

// The scale of an expert's gates, ups or outputs of down in a chunk.
template <bool GATE>
DEVICE float scale_of(const ExpertsParams& p, const Sizes<GATE>& sizes, const Unit<GATE>& u, u32 half, u32 chunk) {
    if (p.channels) return WEIGHT_FACTOR;
    const u32 grid_rows = (sizes.outputs + FP8_BLOCK - 1) / FP8_BLOCK, grid_columns = (sizes.inputs + FP8_BLOCK - 1) / FP8_BLOCK;
    const u32 matrix = GATE ? u.expert * 2 + half : u.expert, row = u.column * (GATE ? 64 : 128) / FP8_BLOCK;
    const float* scales = GATE ? p.gate_up_scales : p.down_scales;
    return WEIGHT_FACTOR * scales[((u64)matrix * grid_rows + row) * grid_columns + min(chunk * DEPTH, sizes.inputs - 1) / FP8_BLOCK];
}
#endif

// Writes silu(gate) * up, or the outputs of down.
template <bool GATE, int STEPS>
DEVICE void write(const ExpertsParams& p, const Unit<GATE>& u, const float (&sum)[STEPS][4][4]) {
    const u32 lane = threadIdx.x & 31, half = threadIdx.x >> 7, quarter = threadIdx.x >> 5 & 3, g = lane >> 2, t = lane & 3;
    const u32 place = GATE ? u.column * 64 + quarter * 16 + t * 4 : u.column * 128 + quarter * 32 + t * 8;
    if (place >= (GATE ? p.width : p.hidden)) return;
    float scale[4][2];
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int d = 0; d < 2; d++) {
            scale[n][d] = SUM_FACTOR;
#ifdef FP8
            if (!p.channels) continue;
            const u32 row = weight_row<GATE>(quarter, n, 2 * t + d);
            scale[n][d] *= GATE ? p.gate_up_scales[((u64)u.expert * 2 + row / 64) * p.width + u.column * 64 + row % 64]
                                : p.down_scales[(u64)u.expert * p.hidden + u.column * 128 + row];
#endif
        }
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 row = (half * STEPS + i) * 16 + 8 * h + g;
            if (row >= u.rows) continue;
            u32 pairs[4];
#pragma unroll
            for (int n = 0; n < (GATE ? 2 : 4); n++) {
                float v[2];
#pragma unroll
                for (int d = 0; d < 2; d++) {
                    v[d] = sum[i][n][2 * h + d] * scale[n][d];
                    const u32 output = u.column * (GATE ? 64 : 128) + weight_row<GATE>(quarter, n, 2 * t + d);
                    if (GATE) v[d] = gated_output(p, u.expert, output, v[d], sum[i][(n + 2) % 4][2 * h + d] * scale[(n + 2) % 4][d]);
                    else v[d] = with_down_bias(p, u.expert, output, v[d]);
                }
                pairs[n] = pack_bf16(v[0], v[1]);
            }
            u16* to = (u16*)(GATE ? p.between : p.partial) + (u64)(u.first_slot + row) * (GATE ? p.width : p.hidden) + place;
            if (GATE) *(uint2*)to = make_uint2(pairs[0], pairs[1]);
            else *(uint4*)to = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
}

// One unit. `stage` is the ring's place of its first chunk.
template <bool GATE, int STEPS>
DEVICE void multiply(const ExpertsParams& p, Copies<GATE>& copies, const Unit<GATE>& u, u32& stage) {
    const u32 lane = threadIdx.x & 31, half = threadIdx.x >> 7, quarter = threadIdx.x >> 5 & 3;
    const u32 input_row = half * STEPS * 16 + (lane & 15);
    float sum[STEPS][4][4] = {};
#ifdef FP8
    float next[2] = {scale_of(p, copies.sizes, u, 0, 0), GATE ? scale_of(p, copies.sizes, u, 1, 0) : 0.0f};
#endif
#pragma unroll 1
    for (u32 chunk = 0; chunk < copies.sizes.chunks; chunk++) {
        wait_for_stage(p.stages);
        __syncthreads();
        copies.begin_next();
        const u32 weights = copies.memory + stage * stage_bytes(p), rows = weights + WEIGHT_ROWS * WEIGHT_BYTES;
#ifdef FP8
        const float scale[2] = {next[0], GATE ? next[1] : next[0]};
#pragma unroll
        for (int i = 0; i < (GATE ? 2 : 1); i++) next[i] = scale_of(p, copies.sizes, u, i, chunk + 1);
        uint4 codes[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const u32 at = weights + weight_place<GATE>(weight_row<GATE>(quarter, n, lane >> 2), lane & 3);
            codes[n] = read_shared(at);
        }
#endif
#pragma unroll
        for (int k = 0; k < (int)DEPTH / 16; k++) {
            u32 b[4][2];
#ifdef FP8
#pragma unroll
            for (int n = 0; n < 4; n++) {
                u32 first, second;
                operand(codes[n], k, first, second);
                b[n][0] = scaled_pair(first, scale[n / 2]), b[n][1] = scaled_pair(second, scale[n / 2]);
            }
#else
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                u32 of_pair[4];
                const u32 row = weight_row<GATE>(quarter, 2 * pair + (lane >> 4), lane & 7);
                load_matrix(of_pair, weights + weight_place<GATE>(row, 2 * k + (lane >> 3 & 1)));
#pragma unroll
                for (int i = 0; i < 4; i++) b[2 * pair + i / 2][i % 2] = of_pair[i];
            }
#endif
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                u32 a[4];
                load_matrix(a, rows + row_place(input_row + 16 * i, 2 * k + (lane >> 4)));
#pragma unroll
                for (int n = 0; n < 4; n++) mma_bf16(sum[i][n], a[0], a[1], a[2], a[3], b[n][0], b[n][1]);
            }
        }
        stage = stage + 1 == p.stages ? 0 : stage + 1;
    }
    write<GATE, STEPS>(p, u, sum);
}

template <bool GATE, int STEPS, int MOST>
DEVICE void multiply_unit(const ExpertsParams& p, Copies<GATE>& copies, const Unit<GATE>& u, u32& stage) {
    if (STEPS == MOST || u.rows <= STEPS * 32) multiply<GATE, STEPS>(p, copies, u, stage);
    else multiply_unit<GATE, STEPS == MOST ? STEPS : STEPS + 1, MOST>(p, copies, u, stage);
}

// Tiles have up to 32 * MOST rows.
template <bool GATE, int MOST>
DEVICE void grouped(const ExpertsParams& p) {
    extern __shared__ __align__(128) u8 shared[];
    allow_next_kernel();
    wait_for_previous_kernel();
    const u32 tiles = __ldcg(p.tile_count);
    Copies<GATE> copies(p, shared_address(shared), tiles);
    for (u32 i = 0; i + 1 < p.stages; i++) copies.begin_next();
    u32 stage = 0;
    for (u32 unit = blockIdx.x; unit < copies.units; unit += gridDim.x) {
        const Unit<GATE> u(p, unit, tiles);
        multiply_unit<GATE, 1, MOST>(p, copies, u, stage);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_grouped_gate(const __grid_constant__ ExpertsParams p) { grouped<true, 8>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_grouped_down(const __grid_constant__ ExpertsParams p) { grouped<false, 8>(p); }
// Small tiles leave registers for a second block, which works while the other one ends a unit.
extern "C" __global__ void __launch_bounds__(THREADS, 2) experts_grouped_gate_few(const __grid_constant__ ExpertsParams p) { grouped<true, 2>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) experts_grouped_down_few(const __grid_constant__ ExpertsParams p) { grouped<false, 2>(p); }

// x += the weighted parts of a row, in ascending id. Grid: (rows, hidden / 8 / blockDim.x).
extern "C" __global__ void experts_grouped_sum(const __grid_constant__ ExpertsParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const u32 row = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= p.hidden / 8) return;
    float4* x = (float4*)(p.x + (u64)row * p.hidden) + 2 * i;
    float4 first = x[0], second = x[1];
    for (u32 n = 0; n < p.per_row; n++) {
        const float w = p.weights[row * p.per_row + n];
        const uint4 v = ((const uint4*)((const u16*)p.partial + (u64)p.slot_of[row * p.per_row + n] * p.hidden))[i];
        first = make_float4(__fmaf_rn(w, low_bf16(v.x), first.x), __fmaf_rn(w, high_bf16(v.x), first.y),
                            __fmaf_rn(w, low_bf16(v.y), first.z), __fmaf_rn(w, high_bf16(v.y), first.w));
        second = make_float4(__fmaf_rn(w, low_bf16(v.z), second.x), __fmaf_rn(w, high_bf16(v.z), second.y),
                             __fmaf_rn(w, low_bf16(v.w), second.z), __fmaf_rn(w, high_bf16(v.w), second.w));
    }
    x[0] = first, x[1] = second;
}
