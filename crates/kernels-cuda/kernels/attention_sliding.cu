// Attention of layers with a sliding window, over BF16 pages of their own group.
//
// The query at position t reads positions j with t - window < j <= t, so the work of a row is bounded by
// the window. Rows of a block are (token, query head of the group) pairs, 16 of them a tile of the tensor
// cores, so K and V are loaded once for all rows of a block. The block goes through the stages of its
// context, TOKENS tokens at a time, from the first that its first row sees to its last row; only stages at
// the borders of windows are masked.
//
//   attention_sliding      sequences with more than 16 rows times query heads of a KV head: a warp has 16
//                          rows and reads all tokens of a stage
//   attention_sliding_few  the others, among them single tokens: all warps have the same 16 rows, each
//                          reads 16 tokens of a stage, and their results are merged. Queries are the sum
//                          of two BF16 numbers
//
// Queries and weights are rounded to BF16, sums are f32. Compiled with HEAD_DIM.
#include "flash.cuh"

struct SlidingParams {
    StepTables step;         // `full` names pages of the sliding group
    const HeadPages* pages;  // of the layer
    Sinks sinks;
    const float* queries;    // [row][query head][HEAD_DIM]
    float* out;              // likewise, or null
    u16* rounded;            // the same in BF16, or null
    u32 query_heads;
    u32 kv_heads;
    u32 window;
    float scale;
};
CHECK_LAYOUT(SlidingParams);

constexpr int D = HEAD_DIM;
constexpr int FEW_ROWS = 16;                     // rows of a tile
constexpr int TOKENS = D == 256 ? 32 : 64;       // of a stage
constexpr int SIDE_BYTES = TOKENS * D * 2;       // keys or values of a stage
constexpr int STAGE_BYTES = 2 * SIDE_BYTES;
constexpr int PANEL_CHUNKS = TOKENS * 8;         // 16-byte chunks of 64 channels of a stage's tokens

// Shared memory: queries (twice if split), then two stages.
template <int ROW_WARPS, int TOKEN_WARPS>
struct Block {
    static constexpr int WARPS = ROW_WARPS * TOKEN_WARPS, THREADS = 32 * WARPS, ROWS = 16 * ROW_WARPS;
    static constexpr int EACH = TOKENS / TOKEN_WARPS;  // tokens of a stage that a warp reads
    static constexpr bool SPLIT = TOKEN_WARPS > 1;     // queries in two parts
    static constexpr int QUERY_BYTES = ROWS * D * 2;
    static constexpr int QUERIES = (SPLIT ? 2 : 1) * QUERY_BYTES;
};

// Brings the queries of the block to shared memory; rows beyond the last repeat it.
template <class B>
DEVICE void load_queries(u8* queries, const SlidingParams& p, const SequenceInfo& s, u32 first, u32 last_row,
                         u32 group, u32 kv_head) {
    for (u32 i = threadIdx.x; i < B::ROWS * (D / 8); i += B::THREADS) {
        const u32 row = i / (D / 8), chunk = i % (D / 8), packed = min(first + row, last_row);
        const float4* q = (const float4*)(p.queries + row_offset(p, s, packed, group, kv_head) + chunk * 8);
        const float4 a = q[0], b = q[1];
        uint4 high, low;
        split(a.x, a.y, high.x, low.x), split(a.z, a.w, high.y, low.y);
        split(b.x, b.y, high.z, low.z), split(b.z, b.w, high.w, low.w);
        const u32 at = panel_byte(B::ROWS, row, chunk);
        *(uint4*)(queries + at) = high;
        if (B::SPLIT) *(uint4*)(queries + B::QUERY_BYTES + at) = low;
    }
}

// Clears values beyond the last query. Nobody may have written them: they may hold NaN, which a weight
// of zero does not remove.
template <class B>
DEVICE void clear_unwritten(u8* tile, u32 begin, u32 last_query) {
    for (u32 i = threadIdx.x; i < SIDE_BYTES / 16; i += B::THREADS) {
        uint4* const to = (uint4*)(tile + SIDE_BYTES + i * 16);
        if (begin + i % PANEL_CHUNKS / 8 > last_query) *to = make_uint4(0, 0, 0, 0);
    }
}

// Removes the scores of tokens outside the windows of this thread's rows.
template <class B>
DEVICE void mask(float (&score)[B::EACH / 8][4], const SlidingParams& p, u32 begin, u32 own, u32 t,
                 const u32 (&position)[2]) {
#pragma unroll
    for (int n = 0; n < B::EACH / 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const u32 j = begin + own + n * 8 + 2 * t + (c & 1), h = c >> 1;
            if (j > position[h] || j + p.window <= position[h]) score[n][c] = NEGATIVE_INFINITY;
        }
}

// out += weights times values.
template <class B>
DEVICE void add_values(float (&out)[2 * STEPS][4], const float (&score)[B::EACH / 8][4], u32 values, u32 own,
                       u32 lane) {
#pragma unroll
    for (int k = 0; k < B::EACH / 16; k++) {
        u32 a[4];
        pack_weights(a, score, k);
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n += 2) {
            u32 b[4];
            load_matrix_transposed(
                b, values + panel_byte(TOKENS, own + 16 * k + (lane >> 3 & 1) * 8 + (lane & 7), n + (lane >> 4)));
            mma_bf16(out[n], a[0], a[1], a[2], a[3], b[0], b[1]);
            mma_bf16(out[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }
}

// Stores the rows of a warp that has read all tokens.
template <class F, class G>
DEVICE void store_own(const SlidingParams& p, float (&out)[2 * STEPS][4], const float (&largest)[2],
                      const float (&total)[2], u32 row_warp, u32 g, u32 t, u32 first, u32 last_row, F&& offset,
                      G&& with_sink) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float sum = quad_sum(total[h]);
        const u32 packed = first + row_warp * 16 + h * 8 + g;
        if (packed > last_row) continue;
        const float norm = 1.0f / with_sink(sum, packed, largest[h]);
        const u64 at = offset(packed) + 2 * t;
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n++)
            store_pair(p, at + n * 8, out[n][2 * h] * norm, out[n][2 * h + 1] * norm);
    }
}

// Merges and stores the rows of warps that have read some tokens each. In shared memory, where the stages
// were: the warps' states, relative to the largest reference of a row.
template <int TOKEN_WARPS, class F, class G>
DEVICE void store_merged(const SlidingParams& p, float (&out)[2 * STEPS][4], const float (&largest)[2],
                         const float (&total)[2], u8* stages, u32 token_warp, u32 g, u32 t, u32 first,
                         u32 last_row, F&& offset, G&& with_sink) {
    constexpr int STRIDE = D + 8;
    static_assert(TOKEN_WARPS * 16 * STRIDE * 4 <= 2 * STAGE_BYTES, "no room");
    __shared__ float references[TOKEN_WARPS][16], sums[TOKEN_WARPS][16];
    float(*parts)[16][STRIDE] = (float(*)[16][STRIDE])stages;
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (t == 0) references[token_warp][g + 8 * h] = largest[h];
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = g + 8 * h;
        float top = NEGATIVE_INFINITY;
#pragma unroll
        for (int w = 0; w < TOKEN_WARPS; w++) top = fmaxf(top, references[w][row]);
        // A warp that has seen nothing has no weight.
        const float factor = largest[h] == NEGATIVE_INFINITY ? 0.0f : exp2_fast(largest[h] - top);
        const float sum = quad_sum(total[h]) * factor;
        if (t == 0) sums[token_warp][row] = sum;
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n++)
            *(float2*)&parts[token_warp][row][n * 8 + 2 * t] =
                make_float2(out[n][2 * h] * factor, out[n][2 * h + 1] * factor);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < (last_row - first + 1) * (D / 2); i += TOKEN_WARPS * 32) {
        const u32 row = i / (D / 2), channel = i % (D / 2) * 2;
        float top = NEGATIVE_INFINITY, sum = 0.0f;
        float2 v = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < TOKEN_WARPS; w++) {
            const float2 part = *(const float2*)&parts[w][row][channel];
            top = fmaxf(top, references[w][row]), sum += sums[w][row];
            v.x += part.x, v.y += part.y;
        }
        const float norm = 1.0f / with_sink(sum, first + row, top);
        store_pair(p, offset(first + row) + channel, v.x * norm, v.y * norm);
    }
}

// Adds queries (a, and a_low if they are split) times 16 tokens of keys.
template <class B>
DEVICE void multiply_keys(float (&score)[B::EACH / 8][4], int n, const u32 (&a)[4], const u32 (&a_low)[4],
                          const u32 (&b)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        mma_bf16(score[n + i], a[0], a[1], a[2], a[3], b[2 * i], b[2 * i + 1]);
        if (!B::SPLIT) continue;
        mma_bf16(score[n + i], a_low[0], a_low[1], a_low[2], a_low[3], b[2 * i], b[2 * i + 1]);
    }
}

// The whole kernel.
template <int ROW_WARPS, int TOKEN_WARPS>
DEVICE void attend(const SlidingParams& p) {
    using B = Block<ROW_WARPS, TOKEN_WARPS>;
    extern __shared__ __align__(1024) u8 memory[];
    u8 *const queries = memory, *const stages = memory + B::QUERIES;
    const u32 group = p.query_heads / p.kv_heads, kv_head = blockIdx.y;
    allow_next_kernel();
    wait_for_previous_kernel();
    const SequenceInfo s = p.step.sequences[blockIdx.z];
    // Later rows may read more, so they start first.
    const u32 first = (gridDim.x - 1 - blockIdx.x) * B::ROWS, all_rows = s.rows * group;
    if ((all_rows <= FEW_ROWS) != B::SPLIT || first >= all_rows) return;
    const u32 last_row = min(first + B::ROWS, all_rows) - 1;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const u32 row_warp = warp / TOKEN_WARPS, token_warp = warp % TOKEN_WARPS;
    const u32 first_query = s.first_position + first / group;
    const u32 last_query = s.first_position + last_row / group;
    const u32 first_key = first_query + 1 > p.window ? first_query + 1 - p.window : 0;
    const u8* const pages = (const u8*)p.pages[kv_head].full;

    auto start_copy = [&](u32 unit, u32 stage) {
        const u32 id = p.step.full[s.table + unit * TOKENS / PAGE_TOKENS];
        const u32 part = unit % (PAGE_TOKENS / TOKENS) * PANEL_CHUNKS;
        const u8* page = pages + (u64)id * full_page_bytes(D);
        const u32 to = shared_address(stages + stage * STAGE_BYTES);
        for (u32 i = threadIdx.x; i < STAGE_BYTES / 16; i += B::THREADS) {
            const u32 panel = i / PANEL_CHUNKS, chunk = i % PANEL_CHUNKS;
            copy_to_shared(to + i * 16, page + (panel * (PAGE_TOKENS * 8) + part + chunk) * 16);
        }
        close_copies();
    };

    u32 unit = first_key / TOKENS, last_unit = last_query / TOKENS;
    start_copy(unit, 0);
    load_queries<B>(queries, p, s, first, last_row, group, kv_head);
    // This thread's two rows: g and g + 8 of the warp's 16.
    u32 position[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        position[h] = s.first_position + min(first + row_warp * 16 + h * 8 + g, last_row) / group;
    const u32 query_address = shared_address(queries);
    const float scale = p.scale * LOG2E;
    float out[2 * STEPS][4] = {};
    float largest[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, total[2] = {};

    for (u32 stage = 0; unit <= last_unit; unit++, stage ^= 1) {
        if (unit < last_unit) {
            start_copy(unit + 1, stage ^ 1);
            wait_for_copies<1>();
        } else wait_for_copies<0>();
        __syncthreads();
        u8* const tile = stages + stage * STAGE_BYTES;
        const u32 begin = unit * TOKENS;
        if (begin + TOKENS - 1 > last_query) {
            clear_unwritten<B>(tile, begin, last_query);
            __syncthreads();
        }
        const u32 keys = shared_address(tile), values = keys + SIDE_BYTES, own = token_warp * B::EACH;

        float score[B::EACH / 8][4] = {};
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            u32 a[4], a_low[4];
            const u32 at = query_address +
                panel_byte(B::ROWS, row_warp * 16 + (lane >> 3 & 1) * 8 + (lane & 7), 2 * k + (lane >> 4));
            load_matrix(a, at);
            if (B::SPLIT) load_matrix(a_low, at + B::QUERY_BYTES);
#pragma unroll
            for (int n = 0; n < B::EACH / 8; n += 2) {
                u32 b[4];
                load_matrix(b, keys + panel_byte(TOKENS, own + 8 * (n + (lane >> 4)) + (lane & 7),
                                                 2 * k + (lane >> 3 & 1)));
                multiply_keys<B>(score, n, a, a_low, b);
            }
        }
        // Every row of the block sees all tokens of the stage.
        const bool whole = begin + TOKENS - 1 <= first_query && begin + p.window > last_query;
        if (!whole) mask<B>(score, p, begin, own, t, position);
#pragma unroll
        for (int h = 0; h < 2; h++) shrink(out, h, weigh(score, h, scale, largest[h], total[h]));
        add_values<B>(out, score, values, own, lane);
        __syncthreads();  // the next copy overwrites this stage
    }

    // Where a row's output lies, and the weight of its sink.
    auto offset = [&](u32 packed) { return row_offset(p, s, packed, group, kv_head); };
    auto with_sink = [&](float sum, u32 packed, float reference) {
        if (!p.sinks.scores) return sum;
        const u32 row = s.first_row + packed / group, head = kv_head * group + packed % group;
        return sum + sink_weight(p.sinks, row, head, reference);
    };
    if constexpr (TOKEN_WARPS == 1) {
        store_own(p, out, largest, total, row_warp, g, t, first, last_row, offset, with_sink);
    } else {
        store_merged<TOKEN_WARPS>(p, out, largest, total, stages, token_warp, g, t, first, last_row, offset,
                                  with_sink);
    }
}

constexpr int ROW_WARPS = D == 256 ? 4 : 8, TOKEN_WARPS = TOKENS / 16;

// Grid: (rows times query heads of a KV head / ROWS, KV heads, sequences).
extern "C" __global__ void __launch_bounds__(32 * ROW_WARPS, D == 64 ? 2 : 1) attention_sliding(const __grid_constant__ SlidingParams p) {
    attend<ROW_WARPS, 1>(p);
}
// Grid: (1, KV heads, sequences).
extern "C" __global__ void __launch_bounds__(32 * TOKEN_WARPS) attention_sliding_few(const __grid_constant__ SlidingParams p) {
    attend<1, TOKEN_WARPS>(p);
}
