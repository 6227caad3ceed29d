// Prefill attention: FlashAttention over the pages of a sequence that brings several rows.
//
// Rows of a block are (token, query head of the group) pairs, 16 per warp, so one read of a page
// serves the whole GQA group. The block iterates over the context page by page. A page may be read
// as BF16, as codes, or as both; the windows decide for each position, and only pages at a border
// are masked. Codes are unpacked into shared memory as small integers in BF16, which is exact.
// Scale s and minimum z are applied to scores and weights: q.k = s (q.c) + z sum(q), sum(p v) =
// sum((p s) c) + sum(p z).
//
// Compiled with HEAD_DIM, and SINKS=1 for layers with attention sinks.
#include "flash.cuh"

struct PrefillParams {
    StepTables step;
    const HeadPages* pages;  // of the layer
    const float* queries;    // [row][query head][HEAD_DIM]
    float* out;              // likewise, or null
    u16* rounded;            // the same in BF16, or null
    u32 query_heads;
    u32 kv_heads;
    u32 least_rows;          // sequences with fewer rows are left to the decode kernel
    float scale;
    Sinks sinks;
};
CHECK_LAYOUT(PrefillParams);

constexpr int D = HEAD_DIM;
constexpr int WARPS = D == 256 ? 4 : 8;
constexpr int THREADS = WARPS * 32;
constexpr int ROWS = WARPS * 16;
constexpr int SIDE_BYTES = 64 * D * 2;   // keys or values of a tile in shared memory
constexpr int TILE_BYTES = 2 * SIDE_BYTES;
constexpr int RAW_BYTES = 8 * D * 8 + 512;
constexpr int QUERY_BYTES = ROWS * D * 2;

// Two codes, in the low bits of each half, as two BF16 integers. 128 + c is exact in BF16.
DEVICE u32 integers(u32 pair) {
    u32 y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(pair | 0x43004300u), "r"(0x3f803f80u), "r"(0xc300c300u));
    return y;
}

// Unpacks a lane's words of one 16-token tile and side: keys to [token][channel], values to
// [channel][token].
template <int BITS>
DEVICE void unpack(const u8* codes, u32 side, u32 tile, u32 lane, u8* to) {
    constexpr int LOW = BITS == 3 ? 2 : BITS;
    constexpr int PLANES = 16 / LOW;
    constexpr int WORDS = D * LOW / 64;
    const u8* base = codes + tile * 2 * D * BITS;
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
        u32 w = *(const u32*)(base + word_byte(WORDS, lane, word));
        u32 top = BITS == 3 ? *(const u32*)(base + D * 4 + word_byte(WORDS / 2, lane, word / 2)) >> (word & 1) : 0;
#pragma unroll
        for (int plane = 0; plane < PLANES; plane++) {
            u32 pair = w >> (LOW * plane) & ((1u << LOW) - 1) * 0x00010001u;
            if (BITS == 3) pair |= (top >> (2 * plane) & 0x00010001u) << 2;
            u32 j, channel_half, token_half;
            if (PLANES <= STEPS) {
                j = word / 4 * PLANES + plane;
                channel_half = side == KEY ? word >> 1 & 1 : word & 1;
                token_half = side == KEY ? word & 1 : word >> 1 & 1;
            } else if (PLANES == 2 * STEPS) {
                j = plane % STEPS;
                channel_half = plane / STEPS;
                token_half = word;
            } else {
                j = plane % STEPS;
                channel_half = plane / STEPS & 1;
                token_half = plane / (2 * STEPS);
            }
            u32 row = lane >> 2, quad = lane & 3;
            if (side == KEY) {
                u32 token = tile * 16 + token_half * 8 + row, chunk = 2 * j + channel_half;
                *(u32*)(to + panel_byte(64, token, chunk) + quad * 4) = integers(pair);
            } else {
                u32 channel = 16 * j + 8 * channel_half + row, chunk = 2 * tile + token_half;
                *(u32*)(to + panel_byte(D, channel, chunk) + quad * 4) = integers(pair);
            }
        }
    }
}

DEVICE void unpack_any(u32 bits, const u8* codes, u32 side, u32 tile, u32 lane, u8* to) {
    switch (bits) {
        case 1: unpack<1>(codes, side, tile, lane, to); break;
        case 2: unpack<2>(codes, side, tile, lane, to); break;
        case 3: unpack<3>(codes, side, tile, lane, to); break;
        default: unpack<4>(codes, side, tile, lane, to); break;
    }
}

// The next page of a block, as BF16 or as codes.
struct Cursor {
    u32 block;
    bool coded;
};

struct Context {
    // Boundaries of the block's first and last query, and the position of the last query.
    u32 sink, first_boundary, last_boundary, last;
    bool keeps_history;
    History history;

    DEVICE bool wants(const Cursor& c) const {
        u32 begin = c.block * 64, end = min(begin + 64, last + 1);
        if (c.coded) return keeps_history && c.block >= history.first && end > sink && begin < last_boundary && last_boundary > sink;
        return begin < sink || end > first_boundary;
    }

    // Advances `c` to the next page that is read, starting with `c` itself; false at the end.
    DEVICE bool find(Cursor& c) const {
        while (c.block * 64 <= last) {
            if (wants(c)) return true;
            // Nothing lies between the sink and a view.
            if (c.coded && history.view_end > 0 && c.block >= sink / 64 && c.block < history.first) c = {history.first, false};
            else step(c);
        }
        return false;
    }

    DEVICE static void step(Cursor& c) {
        c.block += c.coded;
        c.coded = !c.coded;
    }
};

// Queries times keys; both are addresses in shared memory.
DEVICE void multiply_keys(float (&score)[8][4], u32 query_address, u32 keys, u32 warp, u32 lane) {
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        u32 a[4];
        load_matrix(a, query_address +
            panel_byte(ROWS, warp * 16 + (lane >> 3 & 1) * 8 + (lane & 7), 2 * k + (lane >> 4)));
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            u32 b[4];
            load_matrix(b, keys + panel_byte(64, 8 * (n + (lane >> 4)) + (lane & 7), 2 * k + (lane >> 3 & 1)));
            mma_pair(score + n, a, b);
        }
    }
}

// Removes the scores of positions that a row does not read in the form of this page.
DEVICE void mask(float (&score)[8][4], const Context& context, const Cursor& now, u32 begin, u32 t,
                 const u32 (&position)[2], const u32 (&boundary)[2]) {
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            u32 j = begin + n * 8 + 2 * t + (c & 1), h = c >> 1;
            bool is_code = j >= context.sink && j < boundary[h];
            if (is_code != now.coded || j > position[h] || (now.coded && context.history.in_hole(j)))
                score[n][c] = NEGATIVE_INFINITY;
        }
}

// Products of both rows with the codes of a key become scores. `pair` is its scale and minimum.
DEVICE void apply_key(float (&score)[4], int c, u32 pair, const float (&query_sum)[2]) {
    float s_k = f16_to_f32(pair & 0xffff), z_k = f16_to_f32(pair >> 16);
    score[c] = __fmaf_rn(score[c], s_k, z_k * query_sum[0]);
    score[2 + c] = __fmaf_rn(score[2 + c], s_k, z_k * query_sum[1]);
}

// Weights of both rows become factors of the codes of a value; minima are summed up in `shift`.
DEVICE void apply_value(float (&score)[4], int c, u32 pair, float (&shift)[2]) {
    float s_v = f16_to_f32(pair & 0xffff), z_v = f16_to_f32(pair >> 16);
    shift[0] = __fmaf_rn(score[c], z_v, shift[0]);
    shift[1] = __fmaf_rn(score[2 + c], z_v, shift[1]);
    score[c] *= s_v;
    score[2 + c] *= s_v;
}

// Adds weights times values. Codes lie as [channel][token], BF16 as [token][channel].
DEVICE void add_values(float (&out)[2 * STEPS][4], const float (&score)[8][4], u32 values, bool coded, u32 lane) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 a[4];
        pack_weights(a, score, k);
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n += 2) {
            u32 b[4];
            if (coded)
                load_matrix(b, values + panel_byte(D, 8 * (n + (lane >> 4)) + (lane & 7), 2 * k + (lane >> 3 & 1)));
            else
                load_matrix_transposed(
                    b, values + panel_byte(64, 16 * k + (lane >> 3 & 1) * 8 + (lane & 7), n + (lane >> 4)));
            mma_bf16(out[n], a[0], a[1], a[2], a[3], b[0], b[1]);
            mma_bf16(out[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }
}

// Starts to copy a page to its stage.
DEVICE void copy_page(u64 page, u8* stage, u32 bytes) {
    u32 to = shared_address(stage);
    for (u32 i = threadIdx.x; i < bytes / 16; i += THREADS) copy_to_shared(to + i * 16, (const u8*)page + i * 16);
}

// Stores this thread's rows.
DEVICE void store(const float (&out)[2 * STEPS][4], const float (&total)[2], const float (&shift)[2],
                  const float (&largest)[2], const PrefillParams& p, const SequenceInfo& s, u32 first,
                  u32 last_row, u32 group, u32 kv_head, u32 warp, u32 g, u32 t) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = quad_sum(total[h]);
        const float z = quad_sum(shift[h]);
        u32 packed = first + warp * 16 + h * 8 + g;
        if (packed > last_row) continue;
#ifdef SINKS
        sum += sink_weight(p.sinks, s.first_row + packed / group, kv_head * group + packed % group, largest[h]);
#endif
        float norm = 1.0f / sum;
        u64 at = row_offset(p, s, packed, group, kv_head) + 2 * t;
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n++) {
            float x = (out[n][2 * h] + z) * norm, y = (out[n][2 * h + 1] + z) * norm;
            if (p.out) *(float2*)(p.out + at + n * 8) = make_float2(x, y);
            if (p.rounded) *(u32*)(p.rounded + at + n * 8) = pack_bf16(x, y);
        }
    }
}

// Later rows read more, so their blocks start first.
extern "C" __global__ void __launch_bounds__(THREADS) attention_prefill(PrefillParams p) {
    extern __shared__ __align__(1024) u8 memory[];
    u8 *queries = memory, *tiles = queries + QUERY_BYTES, *raws = tiles + 2 * TILE_BYTES;
    const u32 group = p.query_heads / p.kv_heads, kv_head = blockIdx.y;
    allow_next_kernel();
    wait_for_previous_kernel();
    const SequenceInfo s = p.step.sequences[blockIdx.z];
    const u32 first = (gridDim.x - 1 - blockIdx.x) * ROWS, all_rows = s.rows * group;
    if (s.rows < p.least_rows || first >= all_rows) return;
    const u32 last_row = min(first + ROWS, all_rows) - 1;
    const HeadPages pages = p.pages[kv_head];
    const CodedPage shape = {pages.key_bits, pages.value_bits, D};
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const u32 first_query = s.first_position + first / group;
    const u32 last_query = s.first_position + last_row / group;
    const Context context = {p.step.sink, boundary_of(p.step, first_query), boundary_of(p.step, last_query), last_query,
                             pages.keeps_history(), history_of(p.step, s.view, s.view_end, kv_head)};
    auto start_copy = [&](const Cursor& c, u32 stage) {
        u32 id = c.coded ? context.history.page(p.step, s.table, c.block) : p.step.full[s.table + c.block];
        if (c.coded) copy_page(pages.coded + (u64)id * shape.bytes(), raws + stage * RAW_BYTES, shape.bytes());
        else copy_page(pages.full + (u64)id * full_page_bytes(D), tiles + stage * TILE_BYTES, TILE_BYTES);
    };
    Cursor now = {0, false};
    context.find(now);
    start_copy(now, 0);
    close_copies();
    for (u32 i = threadIdx.x; i < ROWS * (D / 8); i += THREADS) {
        u32 row = i / (D / 8), chunk = i % (D / 8), packed = min(first + row, last_row);
        const float4* q = (const float4*)(p.queries + row_offset(p, s, packed, group, kv_head) + chunk * 8);
        float4 a = q[0], b = q[1];
        *(uint4*)(queries + panel_byte(ROWS, row, chunk)) =
            make_uint4(pack_bf16(a.x, a.y), pack_bf16(a.z, a.w), pack_bf16(b.x, b.y), pack_bf16(b.z, b.w));
    }
    __syncthreads();
    u32 position[2], boundary[2];  // of this thread's two rows: g and g + 8 of the warp's 16
    float query_sum[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 row = warp * 16 + h * 8 + g;
        position[h] = s.first_position + min(first + row, last_row) / group;
        boundary[h] = boundary_of(p.step, position[h]);
        float sum = 0.0f;
        for (u32 chunk = t; chunk < D / 8; chunk += 4) {
            uint4 q = *(const uint4*)(queries + panel_byte(ROWS, row, chunk));
            sum += low_bf16(q.x) + high_bf16(q.x) + low_bf16(q.y) + high_bf16(q.y);
            sum += low_bf16(q.z) + high_bf16(q.z) + low_bf16(q.w) + high_bf16(q.w);
        }
        query_sum[h] = quad_sum(sum);
    }
    const u32 query_address = shared_address(queries);
    const float scale = p.scale * LOG2E;
    float out[2 * STEPS][4] = {};
    float largest[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, total[2] = {}, shift[2] = {};
    bool more = true;
    for (u32 stage = 0; more; stage ^= 1) {
        Cursor next = now;
        Context::step(next);
        more = context.find(next);
        if (more) start_copy(next, stage ^ 1);
        close_copies();
        wait_for_copies<1>();
        __syncthreads();
        u8 *tile = tiles + stage * TILE_BYTES, *raw = raws + stage * RAW_BYTES;
        if (now.coded) {
            for (u32 i = warp; i < 8; i += WARPS)
                if (i < 4) unpack_any(shape.key_bits, raw + shape.codes(KEY), KEY, i, lane, tile);
                else unpack_any(shape.value_bits, raw + shape.codes(VALUE), VALUE, i - 4, lane, tile + SIDE_BYTES);
            __syncthreads();
        }
        const u32 keys = shared_address(tile), values = keys + SIDE_BYTES;
        float score[8][4] = {};
        multiply_keys(score, query_address, keys, warp, lane);
        const u32 begin = now.block * 64;
        if (now.coded) {
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int c = 0; c < 2; c++)
                    apply_key(score[n], c, *(const u32*)(raw + param_byte(shape, KEY, n * 8 + 2 * t + c)), query_sum);
        }
        bool whole = now.coded ? begin >= context.sink && begin + 64 <= context.first_boundary &&
                                     !context.history.has_hole(begin, begin + 64)
                               : begin + 63 <= first_query &&
                                     (begin + 64 <= context.sink || begin >= context.last_boundary);
        if (!whole) mask(score, context, now, begin, t, position, boundary);
#pragma unroll
        for (int h = 0; h < 2; h++) shift[h] *= update(score, h, scale, largest[h], total[h], out);
        if (now.coded) {
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int c = 0; c < 2; c++)
                    apply_value(score[n], c, *(const u32*)(raw + param_byte(shape, VALUE, n * 8 + 2 * t + c)), shift);
        }
        add_values(out, score, values, now.coded, lane);
        now = next;
        __syncthreads();
    }
    store(out, total, shift, largest, p, s, first, last_row, group, kv_head, warp, g, t);
}
