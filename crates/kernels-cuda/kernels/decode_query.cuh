// Decode attention: turns the queries of an item into fragments, in shared memory and registers.
#pragma once
#include "decode_block.cuh"

// Stores the powers of two by which the result is scaled around coded pages (fragments.cuh). They
// depend on the head's width, not on the query. Called by all readers.
DEVICE void put_channel_scales(Shared& shared, u32 value_bits) {
    const int tid = threadIdx.x;
    if (tid < 2 * STEPS) {
        int exponent = plane_exponent(value_bits, tid / 2, tid & 1);
        (&shared.to_codes[0].x)[tid] = __uint_as_float((u32)(127 - 24 + exponent) << 23);
        (&shared.from_codes[0].x)[tid] = __uint_as_float((u32)(127 + 24 - exponent) << 23);
    }
}

// The query heads of an item, spread over the block: warp w holds fragments w, w + WARPS, ... The
// addresses are computed before wait_for_previous_kernel, the loads come after it.
struct QueryRows {
    static constexpr int FRAGMENTS = QUERY_TILES * STEPS, ROUNDS = (FRAGMENTS + WARPS - 1) / WARPS;
    const float* from[ROUNDS];  // null: zeros
    float2 v[ROUNDS][2];

#if FROM_PROJECTIONS
    DEVICE QueryRows() {
#pragma unroll
        for (int k = 0; k < ROUNDS; k++) v[k][0] = v[k][1] = make_float2(0.f, 0.f);
    }
#endif
    DEVICE QueryRows(const DecodeArgs& a, u32 row, u32 head_index, int lane, int warp) {
        const float* rows = a.queries + ((u64)row * a.kv_heads + head_index) * a.group * HEAD_DIM;
#pragma unroll
        for (int k = 0; k < ROUNDS; k++) {
            int f = warp + k * WARPS, column = f / STEPS * 8 + (lane >> 2), channel = f % STEPS * 16 + (lane & 3) * 2;
            int head = head_of(column);
            from[k] = f < FRAGMENTS && head < a.group ? rows + head * HEAD_DIM + channel : nullptr;
            asm volatile("" : "+l"(from[k]));  // computed here, not behind the wait
        }
#if SPLIT_QUERY
        const int job = split_job(warp), head = 4 * (job / PLANES) + (lane >> 3);
        const bool makes = job < SPLIT_QUERY * PLANES && head < a.group;
        split_from = makes ? rows + head * HEAD_DIM + 16 * (job % PLANES) + 2 * (lane & 3) : nullptr;
        asm volatile("" : "+l"(split_from));
#endif
    }

    DEVICE void load() {
#pragma unroll
        for (int k = 0; k < ROUNDS; k++)
#pragma unroll
            for (int b = 0; b < 2; b++) {
                v[k][b] = make_float2(0.f, 0.f);
                if (from[k]) v[k][b] = *(const float2*)(from[k] + 8 * b);
            }
#if SPLIT_QUERY
#pragma unroll
        for (int k = 0; k < 4; k++) {
            split[k] = make_float2(0.f, 0.f);
            if (split_from) split[k] = *(const float2*)(split_from + 64 * (k & 1) + 8 * (k >> 1));
        }
#endif
    }
#if SPLIT_QUERY
    const float* split_from;
    float2 split[4];  // by step (k & 1) and half (k >> 1)

    static_assert(WARPS >= SPLIT_QUERY * PLANES, "a warp for each plane of four heads");
    // The job of a warp: one plane of four heads. Counted from the last warp down, because the last
    // warps have no other fragments.
    DEVICE static int split_job(int warp) { return WARPS - 1 - warp; }

    // FROM_PROJECTIONS: loads the same channels from shared memory.
    DEVICE void load_split(const float (&queries)[COLUMNS][SUMS_STRIDE], u32 group, int lane, int warp) {
        const int job = split_job(warp), head = 4 * (job / PLANES) + (lane >> 3);
        const bool makes = job < SPLIT_QUERY * PLANES && head < group;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int channel = 16 * (job % PLANES) + 2 * (lane & 3) + 64 * (k & 1) + 8 * (k >> 1);
            split[k] = makes ? *(const float2*)&queries[column_of(head)][channel] : make_float2(0.f, 0.f);
        }
    }

    // Rounds the channels of a plane to multiples of `step` and splits them into a high and a low
    // byte. Each lane stores the byte of its column.
    DEVICE void put_split(Shared& shared, float scale, float step, int lane, int warp) const {
        const int job = split_job(warp), plane = job % PLANES;
        if (job >= SPLIT_QUERY * PLANES) return;
        // The exact value of plane_step does not matter, as long as both uses have the same one.
        const float plane_step = plane & 1 ? 4.f * step : step, inverse = __fdividef(scale, plane_step);
        u32 b[2] = {0, 0};
        float sum = 0.f;
#pragma unroll
        for (int k = 0; k < 4; k++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int whole = __float2int_rn((h ? split[k].y : split[k].x) * inverse);
                int high = (whole + 64) >> 7, low = whole - 128 * high;
                sum += (float)whole * plane_step;
                b[k >> 1] |= ((lane & 4 ? low : high) & 0xff) << (8 * (2 * h + (k & 1)));
            }
        }
        shared.coded_query[job * 32 + lane] = make_uint2(b[0], b[1]);
        sum = quad_sum(sum);
        if ((lane & 3) == 0) shared.query_sums[job][lane >> 2] = sum;
    }
#endif
};

// Stores the query as fragments: as pairs of BF16 numbers for BF16 tiles; for codes in fp16,
// divided by the exponents of the planes, or as bytes (SPLIT_QUERY). Returns the factor that undoes
// the scaling of the fp16 form. Called by all readers.
DEVICE float prepare_query(Shared& shared, const DecodeArgs& a, QueryRows& rows, const uint4& readers, u32 key_bits, u32 value_bits) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    constexpr int FRAGMENTS = QueryRows::FRAGMENTS, ROUNDS = QueryRows::ROUNDS;
    auto& v = rows.v;
    float largest = 0.f;
#pragma unroll
    for (int k = 0; k < ROUNDS; k++)
#pragma unroll
        for (int b = 0; b < 2; b++) {
            v[k][b].x *= a.scale, v[k][b].y *= a.scale;
            largest = fmaxf(largest, fmaxf(fabsf(v[k][b].x), fabsf(v[k][b].y)));
        }
    // Nonnegative floats compare like their bits.
    auto largest_of_lanes = [](float x) { return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x))); };
    largest = largest_of_lanes(largest);
    if (lane == 0) shared.largest[warp] = largest;
    sync_readers();
    largest = largest_of_lanes(lane < WARPS ? shared.largest[lane] : 0.f);
#if SPLIT_QUERY
    const float step = largest > 0.f ? largest * (1.f / SPLIT_RANGE) : 1.f;
    const bool split = key_bits == 2 && value_bits == 2;
#if FROM_PROJECTIONS
    if (split) rows.load_split(shared.new_queries, a.group, lane, warp);
#endif
    if (split) rows.put_split(shared, a.scale, step, lane, warp);
    if (tid == 0) shared.split_step = step;
#else
    constexpr bool split = false;
#endif
    if (tid == 0) shared.readers = {readers.x, readers.y, readers.z, readers.w};
    // One power of two for all heads brings the largest channel to 2^14 .. 2^15.
    int power = 14 + 127 - (int)(__float_as_uint(largest) >> 23);
    power = largest == 0.f ? 0 : power < -100 ? -100 : power > 100 ? 100 : power;
    const float up = __uint_as_float((u32)(127 + power) << 23);
#pragma unroll
    for (int k = 0; k < ROUNDS; k++) {
        int f = warp + k * WARPS, j = f % STEPS;
        if (f >= FRAGMENTS) continue;
        u32 high[2], low[2];
#pragma unroll
        for (int b = 0; b < 2; b++) {
            float x = v[k][b].x, y = v[k][b].y;
            high[b] = pack_bf16(x, y);
            low[b] = pack_bf16(x - low_bf16(high[b]), y - high_bf16(high[b]));
        }
        shared.near_query[f * 32 + lane] = make_uint4(high[0], high[1], low[0], low[1]);
        if (split) continue;
        u32 coded[2];
        float sum = 0.f;
#pragma unroll
        for (int b = 0; b < 2; b++) {
            int exponent = plane_exponent(key_bits, j, b);
            float down = __uint_as_float((u32)(127 - exponent) << 23), back = __uint_as_float((u32)(127 + exponent) << 23);
            coded[b] = pack_f16(v[k][b].x * up * down, v[k][b].y * up * down);
            sum += (low_f16(coded[b]) + high_f16(coded[b])) * back;
        }
        sum = quad_sum(sum);
        shared.coded_query[f * 32 + lane] = make_uint2(coded[0], coded[1]);
        if ((lane & 3) == 0) shared.query_sums[f][lane >> 2] = sum;
    }
    sync_readers();
    return 1.f / up;
}

#if SPLIT_QUERY
DEVICE void load_query(SplitQuery& q, const Shared& shared, int lane) {
    q.factor = shared.split_step;
#pragma unroll
    for (int k = 0; k < SPLIT_QUERY; k++) {
        q.sum[k] = 0.f;
#pragma unroll
        for (int p = 0; p < PLANES; p++) {
            uint2 b = shared.coded_query[(k * PLANES + p) * 32 + lane];
            q.b[k][p][0] = b.x, q.b[k][p][1] = b.y;
            q.sum[k] += shared.query_sums[k * PLANES + p][2 * (lane & 3)];
        }
    }
}
#endif

DEVICE void load_query(CodedQuery& q, const Shared& shared, float down, int lane) {
    q.shared = shared.coded_query;
    q.factor = down * 16777216.f;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
            for (int j = 0; j < STEPS; j++) {
                uint2 b = shared.coded_query[(n * STEPS + j) * 32 + lane];
                q.b[n][j][0] = b.x, q.b[n][j][1] = b.y;
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = 0.f;
#pragma unroll
            for (int j = 0; j < STEPS; j++) sum += shared.query_sums[n * STEPS + j][2 * (lane & 3) + i];
            q.sum[n][i] = sum * down;
        }
    }
}
