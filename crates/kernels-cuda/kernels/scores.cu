// Attention weights by row of history, for eviction. oscar_codec::scores is the definition.
//
//   score_parts    for each query and tile of 64 keys: the largest score and the sum of 2^(score - largest)
//   score_softmax  for each query: the largest score of all tiles, and 1 / sum over all tiles
//   score_rows     for each row of history: the maximum or the sum of its weights, in units of 2^-40
//
// A tile is a block of 64 positions in one form, BF16 or codes; a block has both where early and late
// queries read it differently. Scores are products of BF16 numbers: a code less the middle of its range
// is exact, and a query is the sum of two.
//
// What a query gives to a row depends on that query and the pages alone: tiles are merged by maxima and
// sums of integers, so neither their order nor the other queries of a step change it.
#include "fragments.cuh"

constexpr int D = HEAD_DIM;
constexpr u32 WARPS = 8, THREADS = 32 * WARPS;
constexpr u32 QUERIES = 16;                 // queries of a warp at a time
constexpr float ONE = 1099511627776.0f;     // 2^40, Scoring::ONE

struct KeyTile {
    u32 block;
    u32 coded;  // 1: read from the quantized page, 0: from the full page
    u64 over;   // bit i: the softmax runs over position 64 block + i
};
CHECK_LAYOUT(KeyTile);

// A row of the step that is a query. It reads positions sink .. boundary as codes.
struct ScoredRow {
    u32 position, boundary;
};
CHECK_LAYOUT(ScoredRow);

struct ScoreParams {
    StepTables step;         // of the layer
    const HeadPages* pages;  // of the layer, by KV head
    const float* queries;    // [row][query head][HEAD_DIM]
    const KeyTile* tiles;
    const ScoredRow* rows;  // of this launch
    float2* parts;          // [KV head][tile][query]: largest score, sum
    float2* softmax;        // [KV head][query]: largest score, 1 / sum
    u64* scores;            // [KV head][stride], by row of history
    u32 tile_count;
    u32 first_row;  // row of the step that rows[0] is
    u32 count;      // queries of a KV head: rows times query heads of its group
    u32 query_heads, kv_heads;
    u32 until;   // positions sink .. until are scored
    u32 start;   // without a view: the position of the first row in `scores`
    u32 stride;  // rows of history that a head has room for
    u32 sums;    // 1: sums of weights, 0: maxima
    float scale;
};
CHECK_LAYOUT(ScoreParams);

// The keys of a tile in the order of a full page, and what turns a product into a score:
// factor * product + centre * (sum of the query).
struct TileKeys {
    __align__(16) u16 keys[PAGE_TOKENS * D];
    float factor[PAGE_TOKENS], centre[PAGE_TOKENS];
};

// The tile and KV head of this thread block.
struct Task {
    const ScoreParams& p;
    KeyTile tile;
    HeadPages pages;
    u32 table, begin, group, kv_head;
    bool has_view;
    History history;

    DEVICE explicit Task(const ScoreParams& params) : p(params), tile(params.tiles[blockIdx.x]), pages(params.pages[blockIdx.y]) {
        // All entries of the step belong to one sequence.
        const SequenceInfo s = p.step.sequences[p.step.row_sequence[p.first_row]];
        table = s.table;
        begin = tile.block * PAGE_TOKENS;
        group = p.query_heads / p.kv_heads;
        kv_head = blockIdx.y;
        has_view = s.view != NO_VIEW;
        history = history_of(p.step, s.view, s.view_end, kv_head);
    }

    // Whether this head has the tile: nothing lies between the sink and a view, and a zero-width head
    // has no codes.
    DEVICE bool exists() const { return !tile.coded || (pages.keeps_history() && tile.block >= history.first); }

    DEVICE bool is_scored(u32 at) const { return at >= p.step.sink && at < p.until && !history.in_hole(at); }

    // Place of a scored row: those of a view first.
    DEVICE u32 place(u32 at) const {
        if (!has_view) return at - p.start;
        const u32 first = history.first * PAGE_TOKENS;
        return at < history.view_end ? at - first : history.hole - first + (at - history.view_end);
    }

    // Whether a query reads a row from this tile.
    DEVICE bool reads(u32 token, const ScoredRow& row) const {
        const u32 at = begin + token;
        if (at > row.position || !(tile.over >> token & 1)) return false;
        const bool is_code = at >= p.step.sink && at < row.boundary;
        return is_code == (tile.coded != 0) && !history.in_hole(at);
    }

    // Whether any of the queries first .. first + QUERIES may read a row of the tile; their positions ascend.
    DEVICE bool any(u32 first) const {
        const ScoredRow a = p.rows[first / group], b = p.rows[min(first + QUERIES - 1, p.count - 1) / group];
        if (begin > b.position) return false;
        return tile.coded ? begin < b.boundary : begin < p.step.sink || begin + PAGE_TOKENS > a.boundary;
    }

    DEVICE const float* query(u32 i) const {
        const u32 row = p.first_row + i / group, head = kv_head * group + i % group;
        return p.queries + ((u64)row * p.query_heads + head) * D;
    }

    DEVICE void load(TileKeys& to) const {
        if (tile.coded) load_codes(to);
        else load_full(to);
        __syncthreads();
    }

    DEVICE void load_full(TileKeys& to) const {
        const uint4* from = (const uint4*)(pages.full + (u64)p.step.full[table + tile.block] * full_page_bytes(D));
        for (u32 i = threadIdx.x; i < PAGE_TOKENS * D / 8; i += THREADS) ((uint4*)to.keys)[i] = from[i];
        for (u32 i = threadIdx.x; i < PAGE_TOKENS; i += THREADS) to.factor[i] = 1.0f, to.centre[i] = 0.0f;
    }

    DEVICE void load_codes(TileKeys& to) const {
        const CodedPage shape = {pages.key_bits, pages.value_bits, D};
        const u8* page = (const u8*)(pages.coded + (u64)history.page(p.step, table, tile.block) * shape.bytes());
        const float middle = 0.5f * (float)((1u << shape.key_bits) - 1);
        for (u32 i = threadIdx.x; i < PAGE_TOKENS * D / 2; i += THREADS) {
            const u32 token = i / (D / 2), channel = 2 * (i % (D / 2));
            const float low = (float)load_code(page, shape, KEY, token, channel) - middle;
            const float high = (float)load_code(page, shape, KEY, token, channel + 1) - middle;
            *(u32*)(to.keys + full_element(KEY, D, token, channel)) = pack_bf16(low, high);
        }
        for (u32 i = threadIdx.x; i < PAGE_TOKENS; i += THREADS) {
            const u32 pair = *(const u32*)(page + param_byte(shape, KEY, i));
            const float factor = f16_to_f32(pair & 0xffff);
            to.factor[i] = factor;
            to.centre[i] = __fmaf_rn(factor, middle, f16_to_f32(pair >> 16));
        }
    }
};

// Scores of a tile for 16 queries, times log2(e). With g = lane / 4 and t = lane % 4, s[m][n][2h + c]
// is of key 16m + 8h + g and query 8n + 2t + c. `query[n]` is query 8n + g.
DEVICE void score_tile(const TileKeys& tile, const float* const (&query)[2], float scale, float (&s)[4][2][4]) {
    const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u32 keys = shared_address(tile.keys);
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < 32; i++) s[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll 4
    for (int k = 0; k < STEPS; k++) {
        u32 high[2][2], low[2][2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const float2 a = *(const float2*)(query[n] + 16 * k + 2 * t);
            const float2 b = *(const float2*)(query[n] + 16 * k + 8 + 2 * t);
            split(a.x, a.y, high[n][0], low[n][0]);
            split(b.x, b.y, high[n][1], low[n][1]);
            sum[n] += (a.x + a.y) + (b.x + b.y);
        }
#pragma unroll
        for (int m = 0; m < 4; m++) {
            u32 a[4];
            load_matrix(a, keys + 2 * full_element(KEY, D, 16 * m + (lane >> 3 & 1) * 8 + (lane & 7), 16 * k + 8 * (lane >> 4)));
#pragma unroll
            for (int n = 0; n < 2; n++) {
                mma_bf16(s[m][n], a[0], a[1], a[2], a[3], low[n][0], low[n][1]);
                mma_bf16(s[m][n], a[0], a[1], a[2], a[3], high[n][0], high[n][1]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        // The sum of query i lies in lanes 4i .. 4i + 3.
        const float own = quad_sum(sum[n]);
        const float sums[2] = {__shfl_sync(0xffffffffu, own, 8 * t), __shfl_sync(0xffffffffu, own, 8 * t + 4)};
#pragma unroll
        for (int m = 0; m < 4; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 token = 16 * m + 8 * (i / 2) + g;
                s[m][n][i] = __fmaf_rn(tile.factor[token], s[m][n][i], tile.centre[token] * sums[i % 2]) * scale;
            }
        }
    }
}

// Queries 8n + g of a warp, beginning with `first`; behind the last one comes the last one again.
DEVICE void find_queries(const Task& task, u32 first, const float* (&query)[2]) {
    const u32 g = (threadIdx.x & 31) >> 2, last = task.p.count - 1;
    query[0] = task.query(min(first + g, last));
    query[1] = task.query(min(first + 8 + g, last));
}

extern "C" __global__ void __launch_bounds__(THREADS) score_parts(ScoreParams p) {
    __shared__ TileKeys keys;
    wait_for_previous_kernel();
    const Task task(p);
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    float2* out = p.parts + ((u64)blockIdx.y * p.tile_count + blockIdx.x) * p.count;
    const bool exists = task.exists();
    if (exists) task.load(keys);
    for (u32 first = warp * QUERIES; first < p.count; first += WARPS * QUERIES) {
        const bool any = exists && task.any(first);
        float s[4][2][4];
        if (any) {
            const float* query[2];
            find_queries(task, first, query);
            score_tile(keys, query, p.scale * LOG2E, s);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int n = i / 2, c = i % 2;
            const u32 q = first + 8 * n + 2 * t + c;
            float largest = NEGATIVE_INFINITY, sum = 0.0f;
            if (any) {
                const ScoredRow row = p.rows[min(q, p.count - 1) / task.group];
#pragma unroll
                for (int m = 0; m < 4; m++) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        float& score = s[m][n][2 * h + c];
                        if (!task.reads(16 * m + 8 * h + g, row)) score = NEGATIVE_INFINITY;
                        largest = fmaxf(largest, score);
                    }
                }
#pragma unroll
                for (int step = 4; step < 32; step *= 2)
                    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
                // Any finite reference gives sums of zero where nothing is read.
                const float reference = largest == NEGATIVE_INFINITY ? 0.0f : largest;
#pragma unroll
                for (int m = 0; m < 4; m++) sum += exp2f(s[m][n][c] - reference) + exp2f(s[m][n][2 + c] - reference);
#pragma unroll
                for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
            }
            if (g == 0 && q < p.count) out[q] = make_float2(largest, sum);
        }
    }
}

// One thread block for 32 queries of a KV head; each warp takes every eighth tile.
extern "C" __global__ void __launch_bounds__(THREADS) score_softmax(ScoreParams p) {
    __shared__ float maxima[WARPS][32];
    __shared__ u64 sums[WARPS][32];
    wait_for_previous_kernel();
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, q = blockIdx.x * 32 + lane;
    const float2* parts = p.parts + (u64)blockIdx.y * p.tile_count * p.count + q;
    const u32 tiles = q < p.count ? p.tile_count : 0;
    float largest = NEGATIVE_INFINITY;
    for (u32 i = warp; i < tiles; i += WARPS) largest = fmaxf(largest, parts[(u64)i * p.count].x);
    maxima[warp][lane] = largest;
    __syncthreads();
    for (u32 w = 0; w < WARPS; w++) largest = fmaxf(largest, maxima[w][lane]);
    const float reference = largest == NEGATIVE_INFINITY ? 0.0f : largest;
    u64 sum = 0;
    for (u32 i = warp; i < tiles; i += WARPS) {
        const float2 part = parts[(u64)i * p.count];
        sum += (u64)(part.y * exp2f(part.x - reference) * ONE);
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || q >= p.count) return;
    for (u32 w = 1; w < WARPS; w++) sum += sums[w][lane];
    // A query that reads nothing gives no weights.
    p.softmax[(u64)blockIdx.y * p.count + q] = make_float2(reference, sum == 0 ? 0.0f : ONE / (float)sum);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) score_rows(ScoreParams p) {
    __shared__ TileKeys keys;
    wait_for_previous_kernel();
    const Task task(p);
    if (!task.exists() || task.begin >= p.until || task.begin + PAGE_TOKENS <= p.step.sink) return;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    task.load(keys);
    const float2* softmax = p.softmax + (u64)blockIdx.y * p.count;
    // Of the rows 16m + 8h + g: [2m + h].
    u64 sum[8] = {};
    float best[8] = {};
    for (u32 first = warp * QUERIES; first < p.count; first += WARPS * QUERIES) {
        if (!task.any(first)) continue;
        const float* query[2];
        float s[4][2][4];
        find_queries(task, first, query);
        score_tile(keys, query, p.scale * LOG2E, s);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int n = i / 2, c = i % 2;
            const u32 q = first + 8 * n + 2 * t + c;
            if (q >= p.count) continue;
            const ScoredRow row = p.rows[q / task.group];
            const float2 norm = softmax[q];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (!task.reads(8 * j + g, row)) continue;
                const float weight = exp2f(s[j / 2][n][2 * (j % 2) + c] - norm.x) * norm.y;
                if (p.sums) sum[j] += (u64)(weight * ONE);
                else best[j] = fmaxf(best[j], weight);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        u64 total = p.sums ? sum[j] : (u64)(best[j] * ONE);
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
            const u64 other = __shfl_xor_sync(0xffffffffu, total, step);
            total = p.sums ? total + other : max(total, other);
        }
        const u32 at = task.begin + 8 * j + g;
        if (t != 0 || total == 0 || !task.is_scored(at)) continue;
        u64* score = p.scores + (u64)blockIdx.y * p.stride + task.place(at);
        if (p.sums) atomicAdd(score, total);
        else atomicMax(score, total);
    }
}
