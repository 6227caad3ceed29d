// Experts of a single row: bound by reading their weights once.
//
//   experts_single_logits  norm and router logits; a warp computes one expert's
//   experts_single_gate    silu(gate) * up of the chosen experts
//   experts_single_down    the sum of all chosen experts, added to the row
//
// The last two choose the experts themselves, block by block, because a choice costs less than
// another launch. Blocks are as many as run together. A block works through tiles of eight outputs;
// its warps divide the inputs. Every lane copies the weights that it multiplies through slots that
// only this lane reads, a few steps ahead, across the ends of tiles. Down begins to copy while the
// gates are still running.
//
// Weights are the A operand of mma.m16n8k16: two streams of eight outputs, rows g and g + 8. These are
// gates and ups, or, for down, the same outputs and two neighbouring chunks of inputs. The row is the
// B operand: a column for its values rounded to BF16 and one for the rounding errors, so that 16 bits
// of mantissa are kept. The second stream of down has columns 2 and 3 for its inputs.
#include "experts_choice.cuh"
#include "weights.cuh"

constexpr u32 WORDS = VALUES / 2;
constexpr u32 WARPS = 8, THREADS = 32 * WARPS, SLOTS = 6;
constexpr u32 SLOT_BYTES = 2 * 16 * THREADS;

constexpr u32 LOGIT_WARPS = 4;

// Grid: experts / LOGIT_WARPS. Weights are loaded before the previous kernel has finished.
extern "C" __global__ void __launch_bounds__(32 * LOGIT_WARPS) experts_single_logits(const __grid_constant__ ExpertsParams p) {
    constexpr u32 AHEAD = 16;
    const u32 lane = threadIdx.x & 31, expert = blockIdx.x * LOGIT_WARPS + (threadIdx.x >> 5), quads = p.hidden / 4;
    allow_next_kernel();
    if (expert >= p.experts) return;
    const float4* router = (const float4*)(p.router + (u64)expert * p.hidden);
    const float4 *norm = (const float4*)p.norm, *x = (const float4*)p.x;
    auto weight = [&](u32 i) {
        const float4 r = router[i], w = norm[i];
        return make_float4(r.x * w.x, r.y * w.y, r.z * w.z, r.w * w.w);
    };
    float4 ahead[AHEAD];
#pragma unroll
    for (u32 j = 0; j < AHEAD; j++) ahead[j] = j * 32 + lane < quads ? weight(j * 32 + lane) : make_float4(0, 0, 0, 0);
    float dot = 0.0f, squares = 0.0f;
    auto add = [&](float4 v, float4 w) {
        dot = __fmaf_rn(v.x, w.x, __fmaf_rn(v.y, w.y, __fmaf_rn(v.z, w.z, __fmaf_rn(v.w, w.w, dot))));
        squares = __fmaf_rn(v.x, v.x, __fmaf_rn(v.y, v.y, __fmaf_rn(v.z, v.z, __fmaf_rn(v.w, v.w, squares))));
    };
    wait_for_previous_kernel();
#pragma unroll
    for (u32 j = 0; j < AHEAD; j++)
        if (j * 32 + lane < quads) add(x[j * 32 + lane], ahead[j]);
    for (u32 i = AHEAD * 32 + lane; i < quads; i += 32) add(x[i], weight(i));
    dot = warp_sum(dot), squares = warp_sum(squares);
    if (lane == 0) p.logits[expert] = dot / sqrtf(squares / (float)p.hidden + p.eps);
}

// Tiles of a block: neighbouring ones, as many as in any other block or one more.
struct Tiles {
    u32 first, end;
    DEVICE Tiles(u32 all) : first((u32)((u64)all * blockIdx.x / gridDim.x)), end((u32)((u64)all * (blockIdx.x + 1) / gridDim.x)) {}
};

// The chosen experts, known to a block.
struct Chosen {
    u32 experts[MOST_CHOSEN];
    float weights[MOST_CHOSEN];

    // Called by one warp.
    DEVICE void fill(const ExpertsParams& p) {
        const u32 lane = threadIdx.x & 31;
        const Choice mine = choose(p, 0, lane);
        if (lane < p.per_row) experts[mine.place] = mine.expert, weights[mine.place] = mine.weight;
    }
};

// A warp's way through a tile. A step reads two streams: the gates and ups of a chunk of inputs, or, for
// down, two neighbouring chunks of all experts' inputs. Chunks and addresses are counted on, because
// computing them anew would cost more than the products.
template <bool GATE>
struct Walk {
    const ExpertsParams& p;
    const Chosen& chosen;
    const u32 chunks, steps, tiles;  // chunks of one expert
    u32 step, n[2], within[2];       // by stream: index among the chosen, and chunk of that expert
    u32 output;                      // of the lane
    const u8* at[2];                 // the lane's 16 bytes

    DEVICE Walk(const ExpertsParams& p, const Chosen& chosen)
        : p(p),
          chosen(chosen),
          chunks((GATE ? p.hidden : p.width) / CHUNK),
          steps(GATE ? chunks : (chunks * p.per_row + 1) / 2),
          tiles(GATE ? p.per_row * (p.width / 8) : p.hidden / 8) {}

    DEVICE void begin(u32 tile) {
        const u32 each = p.width / 8, g = threadIdx.x >> 2 & 7;
        step = threadIdx.x >> 5;
        output = (GATE ? tile % each : tile) * 8 + g;
#pragma unroll
        for (u32 stream = 0; stream < 2; stream++) {
            const u32 chunk = 2 * step + stream;
            n[stream] = GATE ? tile / each : chunk / chunks;
            within[stream] = GATE ? step : chunk % chunks;
            at[stream] = place(stream);
        }
    }
    // False at the end of the tile.
    DEVICE bool next() {
        constexpr u32 STRIDE = GATE ? WARPS : 2 * WARPS;
        step += WARPS;
#pragma unroll
        for (u32 stream = 0; stream < 2; stream++) {
            within[stream] += STRIDE, at[stream] += STRIDE * CHUNK * ELEMENT;
            if (GATE || within[stream] < chunks) continue;
            while (within[stream] >= chunks) within[stream] -= chunks, n[stream]++;
            at[stream] = place(stream);
        }
        return step < steps;
    }
    DEVICE bool there(u32 stream) const { return GATE || n[stream] < p.per_row; }
    DEVICE u32 expert(u32 stream) const { return chosen.experts[there(stream) ? n[stream] : 0]; }

    DEVICE const u8* place(u32 stream) const {
        const u32 t = threadIdx.x & 3, at = within[stream] * CHUNK + t * VALUES;
        if (GATE) return p.gate_up + (((u64)(expert(stream) * 2 + stream) * p.width + output) * p.hidden + at) * ELEMENT;
        return p.down + (((u64)expert(stream) * p.hidden + output) * p.width + at) * ELEMENT;
    }

#ifdef FP8
    // The factor of the sums of a step. Gates that have a scale for each output are scaled at the end.
    DEVICE float scale(u32 stream) const {
        const u32 outputs = GATE ? p.width : p.hidden, inputs = GATE ? p.hidden : p.width;
        const u32 rows = (outputs + FP8_BLOCK - 1) / FP8_BLOCK, columns = (inputs + FP8_BLOCK - 1) / FP8_BLOCK;
        const u32 matrix = GATE ? expert(stream) * 2 + stream : expert(stream), block = within[stream] * CHUNK / FP8_BLOCK;
        if (p.channels) return GATE ? 1.0f : p.down_scales[(u64)matrix * p.hidden + output];
        return (GATE ? p.gate_up_scales : p.down_scales)[((u64)matrix * rows + output / FP8_BLOCK) * columns + block];
    }
#endif
};

// The lane's copies, one step after the other.
template <bool GATE>
struct Copies {
    Walk<GATE> walk;
    const u32 ring;  // the lane's first slot
    u32 tile, end, slot;

    DEVICE Copies(const Walk<GATE>& walk, u32 memory, Tiles tiles)
        : walk(walk), ring(memory + threadIdx.x * 16), tile(tiles.first), end(tiles.end), slot(0) {
        if (tile < end) this->walk.begin(tile);
        if (threadIdx.x >> 5 >= walk.steps) tile = end;
    }

    DEVICE void begin_next() {
        if (tile < end) {
#pragma unroll
            for (u32 stream = 0; stream < 2; stream++)
                copy_or_clear_once(ring + slot * SLOT_BYTES + stream * (16 * THREADS), walk.at[stream], walk.there(stream));
            if (!walk.next() && ++tile < end) walk.begin(tile);
        }
        close_copies();
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
    }
};

// Puts two neighbouring inputs, the q-th pair, where products find them.
DEVICE void store_inputs(u32* inputs, u32 q, float a, float b) {
    u32 high, low;
    split(a * INPUT_FACTOR, b * INPUT_FACTOR, high, low);
    u32* to = inputs + q / (CHUNK / 2) * CHUNK + q % (CHUNK / 2);
    to[0] = high, to[CHUNK / 2] = low;
}

// Multiplies the block's tiles. `write(tile, output, first, second)` gets the sums of both streams.
template <bool GATE, typename Write>
DEVICE void stream_tiles(Walk<GATE> walk, Copies<GATE>& copies, Tiles tiles, const u32* inputs, Write write) {
    __shared__ float2 cells[2][WARPS][8];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    u32 slot = 0;
    for (u32 tile = tiles.first, buffer = 0; tile < tiles.end; tile++, buffer ^= 1) {
        float sum[4] = {};
        walk.begin(tile);
#pragma unroll 1
        for (bool more = walk.step < walk.steps; more; more = walk.next()) {
#ifdef FP8
            const float scale[2] = {walk.scale(0), walk.scale(1)};
#endif
            // Columns of the row: high and low parts of one chunk, or of two.
            const u32 chunk = GATE ? walk.step : 2 * walk.step + (g >> 1);
            const bool column = g < (GATE ? 2 : 4) && (g < 2 || walk.there(1));
            u32 x[WORDS];
#pragma unroll
            for (u32 q = 0; q < WORDS / 4; q++) {
                uint4 v = make_uint4(0, 0, 0, 0);
                if (column) v = *(const uint4*)(inputs + chunk * CHUNK + (g & 1) * (CHUNK / 2) + t * WORDS + 4 * q);
                x[4 * q] = v.x, x[4 * q + 1] = v.y, x[4 * q + 2] = v.z, x[4 * q + 3] = v.w;
            }
            wait_for_copies<SLOTS - 2>();
            const u32 at = copies.ring + slot * SLOT_BYTES;
            const uint4 first = read_shared(at), second = read_shared(at + 16 * THREADS);
            slot = slot + 1 == SLOTS ? 0 : slot + 1;
            copies.begin_next();
#ifdef FP8
            float of_step[4] = {};
#else
            float(&of_step)[4] = sum;
#endif
#pragma unroll
            for (int i = 0; i < (int)VALUES / 4; i++) {
                u32 a[4];
                operand(first, i, a[0], a[2]);
                operand(second, i, a[1], a[3]);
                mma_bf16(of_step, a[0], a[1], a[2], a[3], x[2 * i], x[2 * i + 1]);
            }
#ifdef FP8
#pragma unroll
            for (int i = 0; i < 4; i++) sum[i] = __fmaf_rn(scale[i / 2], of_step[i], sum[i]);
#endif
        }
        // Lane t = 0 holds columns 0 and 1, lane t = 1 columns 2 and 3.
        float other = sum[2] + sum[3];
        if (!GATE) other = __shfl_down_sync(0xffffffffu, other, 1);
        if (t == 0) cells[buffer][warp][g] = make_float2(sum[0] + sum[1], other);
        __syncthreads();
        if (threadIdx.x < 8) {
            float a = 0.0f, b = 0.0f;
#pragma unroll
            for (u32 w = 0; w < WARPS; w++) a += cells[buffer][w][threadIdx.x].x, b += cells[buffer][w][threadIdx.x].y;
            write(tile, threadIdx.x, a * SUM_FACTOR, b * SUM_FACTOR);
        }
    }
}

// Shared memory: slots, then the inputs in both parts.
extern "C" __global__ void __launch_bounds__(THREADS, 2) experts_single_gate(const __grid_constant__ ExpertsParams p) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ Chosen chosen;
    __shared__ float squares[WARPS];
    u32* inputs = (u32*)(memory + SLOTS * SLOT_BYTES);
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quads = p.hidden / 4;
    wait_for_previous_kernel();
    // Down reads the logits as soon as it begins, so it may begin only now.
    allow_next_kernel();
    float sum = 0.0f;
    if (warp == 0) {
        chosen.fill(p);
    } else {
        for (u32 i = threadIdx.x - 32; i < quads; i += THREADS - 32) {
            const float4 v = ((const float4*)p.x)[i];
            sum = __fmaf_rn(v.x, v.x, __fmaf_rn(v.y, v.y, __fmaf_rn(v.z, v.z, __fmaf_rn(v.w, v.w, sum))));
        }
        sum = warp_sum(sum);
    }
    if (lane == 0) squares[warp] = sum;
    __syncthreads();
    const Walk<true> walk(p, chosen);
    const Tiles tiles(walk.tiles);
    Copies<true> copies(walk, shared_address(memory), tiles);
#pragma unroll
    for (u32 i = 0; i + 1 < SLOTS; i++) copies.begin_next();
    float all = 0.0f;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) all += squares[w];
    const float scale = 1.0f / sqrtf(all / (float)p.hidden + p.eps);
    for (u32 i = threadIdx.x; i < quads; i += THREADS) {
        const float4 v = ((const float4*)p.x)[i], w = ((const float4*)p.norm)[i];
        store_inputs(inputs, 2 * i, v.x * scale * w.x, v.y * scale * w.y);
        store_inputs(inputs, 2 * i + 1, v.z * scale * w.z, v.w * scale * w.w);
    }
    __syncthreads();
    stream_tiles<true>(walk, copies, tiles, inputs, [&](u32 tile, u32 output, float gate, float up) {
        const u32 each = p.width / 8, n = tile / each, at = tile % each * 8 + output;
#ifdef FP8
        if (p.channels) {
            const float* scales = p.gate_up_scales + (u64)chosen.experts[n] * 2 * p.width;
            gate *= scales[at], up *= scales[p.width + at];
        }
#endif
        p.between[n * p.width + at] = gated_output(p, chosen.experts[n], at, gate, up);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) experts_single_down(const __grid_constant__ ExpertsParams p) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ Chosen chosen;
    u32* inputs = (u32*)(memory + SLOTS * SLOT_BYTES);
    allow_next_kernel();
    // The logits were complete before any block of the gates let this kernel begin.
    if (threadIdx.x < 32) chosen.fill(p);
    __syncthreads();
    const Walk<false> walk(p, chosen);
    const Tiles tiles(walk.tiles);
    Copies<false> copies(walk, shared_address(memory), tiles);
#pragma unroll
    for (u32 i = 0; i + 1 < SLOTS; i++) copies.begin_next();
    wait_for_previous_kernel();
    for (u32 i = threadIdx.x; i < p.per_row * p.width / 4; i += THREADS) {
        const float4 v = __ldcg((const float4*)p.between + i);
        const float w = chosen.weights[i / (p.width / 4)];
        store_inputs(inputs, 2 * i, v.x * w, v.y * w);
        store_inputs(inputs, 2 * i + 1, v.z * w, v.w * w);
    }
    __syncthreads();
    stream_tiles<false>(walk, copies, tiles, inputs, [&](u32 tile, u32 output, float first, float second) {
        float sum = first + second;
#ifdef GENERAL
        if (p.down_bias)
            for (u32 n = 0; n < p.per_row; n++)
                sum = __fmaf_rn(chosen.weights[n], p.down_bias[(u64)chosen.experts[n] * p.hidden + tile * 8 + output], sum);
#endif
        p.x[tile * 8 + output] += sum;
    });
}
