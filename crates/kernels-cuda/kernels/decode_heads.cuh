// Decode attention with FROM_PROJECTIONS: makes queries, and the new token's key and value, from
// the projections (heads.cuh). Every block that reads an item makes its queries. The block that
// reads the new token also makes its key, and stores key and value in the cache. It does not read
// them back: it inserts them into the tile in shared memory, which was copied before they were
// stored.
#pragma once
#include "decode_query.cuh"

#if FROM_PROJECTIONS
struct NewToken {
    const float* from;  // this warp's vector, at the lane's first channel; null: no vector
    VectorConstants constants;
    const uint4* rotation;  // the lane's fragments for the warp's 16 output channels; null: none
    u32 vector;
    u64 pages;  // full pages of the head
    u32 page, position;
    bool is_key, is_value;
    bool stores;  // this block reads the new token, so it stores its key and value
    float x[CHANNELS];
    uint4 fragments[STEPS][2];

    // Loads everything that does not depend on the projections. Each vector (query heads, key,
    // value) has its own warp, counted from the last warp down, because the first STEPS warps
    // rotate.
    DEVICE NewToken(const DecodeArgs& a, const WorkerRange& plan, int lane, int warp) {
        const ContextShape context = context_of(a.step, plan.first, plan.begin.head);
        const u32 width = (a.group + 2) * a.kv_heads * HEAD_DIM, head_index = plan.begin.head;
        const bool whole = plan.begin.sequence != plan.end.sequence || head_index != plan.end.head;
        position = plan.first.first_position;
        stores = plan.begin.unit < context.near_units && (whole || plan.end.unit >= context.near_units);
        vector = WARPS - 1 - warp;
        is_key = vector == a.group, is_value = vector == a.group + 1;
        const u32 head = is_key || is_value ? (a.group + is_value) * a.kv_heads + head_index : head_index * a.group + vector;
        const bool any = vector < a.group || (stores && (is_key || is_value));
        from = any ? a.qkv + (u64)plan.first.first_row * width + head * HEAD_DIM + lane : nullptr;
        if (any && !is_value) constants.load(a.new_heads, position, is_key, head_index, lane);
        const bool rotates = warp < STEPS && a.new_heads.rotation;
        rotation = rotates ? a.new_heads.rotation + (u64)head_index * ROTATION_QUADS + 2 * warp * 32 + lane : nullptr;
        pages = 0, page = 0;
        if (stores) pages = a.heads[head_index].full, page = __ldcg(a.step.full + plan.first.table + position / PAGE_TOKENS);
    }

    // Issues the loads of the projections, then of the rotation (64 KB), which is needed later.
    DEVICE void load() {
        if (from) {
#pragma unroll
            for (int k = 0; k < CHANNELS; k++) x[k] = from[32 * k];
        }
        if (rotation) {
#pragma unroll
            for (int step = 0; step < STEPS; step++)
#pragma unroll
                for (int n = 0; n < 2; n++) fragments[step][n] = rotation[(step * TILES_OF_HEAD + n) * 32];
        }
    }

    DEVICE void store(Shared& shared, Side side, u32 channel, float x) const {
        const u16 rounded = f32_to_bf16(x);
        u16* to = (u16*)(pages + (u64)page * full_page_bytes(HEAD_DIM));
        to[full_element(side, HEAD_DIM, position % PAGE_TOKENS, channel)] = rounded;
        shared.new_rows[side][channel] = rounded;
    }

    // Leaves the queries in `rows` and in shared memory. Called by all readers.
    DEVICE void make(Shared& shared, const DecodeArgs& a, QueryRows& rows, int lane, int warp) {
        const bool rotates = a.new_heads.rotation;
        if (from) {
            if (is_value) {
                // The rotation of values is folded into the model's weights.
#pragma unroll
                for (int k = 0; k < CHANNELS; k++) store(shared, VALUE, lane + 32 * k, x[k]);
            } else {
                constants.norm_and_rope(x, is_key ? a.new_heads.key_norm : a.new_heads.query_norm, a.new_heads.eps);
                const u32 column = is_key ? KEY_ROW : column_of(vector);
#pragma unroll
                for (int k = 0; k < CHANNELS; k++) {
                    x[k] -= constants.mean[k];
                    if (rotates) shared.new_vectors.put(column, lane + 32 * k, x[k]);
                    else if (is_key) store(shared, KEY, lane + 32 * k, x[k]);
                    else shared.new_queries[column][lane + 32 * k] = x[k];
                }
            }
        }
        sync_readers();
        const int column = lane >> 2, channel = 16 * warp + 2 * (lane & 3);
        if (warp >= STEPS) return;
        const bool is_head = head_of(column) < a.group;
        if (rotates) {
            // Rows of absent vectors may hold anything.
            const u32 row = (lane & 15) < COLUMNS ? lane & 15 : KEY_ROW, half = lane >> 4;
            auto vectors = [&](int step, u32 (&high)[4], u32 (&low)[4]) {
                load_matrix(high, shared_address(&shared.new_vectors.high[row][16 * step + 8 * half]));
                load_matrix(low, shared_address(&shared.new_vectors.low[row][16 * step + 8 * half]));
            };
            float out[2][4];
            rotate<STEPS>(out, vectors, [&](int step, int n) { return fragments[step][n]; });
#pragma unroll
            for (int n = 0; n < 2; n++) {
                if (is_head) rows.v[0][n] = make_float2(out[n][0], out[n][1]);
                *(float2*)&shared.new_queries[column][channel + 8 * n] = rows.v[0][n];
                if (stores && column == 0) {
#pragma unroll
                    for (int i = 0; i < 2; i++) store(shared, KEY, channel + 8 * n + i, out[n][2 + i]);
                }
            }
        } else if (is_head) {
#pragma unroll
            for (int n = 0; n < 2; n++) rows.v[0][n] = *(const float2*)&shared.new_queries[column][channel + 8 * n];
        }
    }
};

// Prefetches this block's share of the layer's rotations into L2.
DEVICE void fetch_rotations(const DecodeArgs& a, u32 worker, int lane, int warp) {
    if (warp != WARPS - 1 || !a.new_heads.rotation) return;
    const u32 lines = a.kv_heads * (ROTATION_QUADS / 8);
    for (u32 i = worker * 32 + lane; i < lines; i += gridDim.x * 32) prefetch_to_l2(a.new_heads.rotation + 8 * i);
}

// Inserts the new row into one side of a BF16 tile in shared memory. Called by a whole warp.
DEVICE void put_new_row(u8* tile, const u16* row, u32 token, int lane) {
    if (lane < HEAD_DIM / 8)
        *(uint4*)(tile + (lane >> 3) * (TILE_TOKENS * 128) + token * 128 + (((lane & 7) ^ (token & 7)) << 4)) = ((const uint4*)row)[lane];
    writes_before_bulk_copies();
    __syncwarp();
}
#endif
