// Appends new tokens to the cache: QK-norm, RoPE, subtraction of the key mean, rotation. Keys and
// values are stored in full pages, rotated queries in `queries`. One thread block handles the query
// heads of one KV head, its key and its value, for a few rows. Steps of single tokens mostly skip
// this kernel: decode attention with FROM_PROJECTIONS appends the token itself (decode_heads.cuh).
//
// For one row the kernel is bound by latency. Everything except the projections of this step is
// loaded before wait_for_previous_kernel: the rotation into shared memory; norm weights, RoPE and
// page ids into registers. A block is small enough to be resident while the matrix product before
// it still runs. The order of every sum is fixed, so a row's result does not depend on the other
// rows.
//
// Two kernels: `append` for few rows and for taps, `append_rows` for prompts.
#include "heads.cuh"

struct AppendParams {
    StepTables step;
    const HeadPages* pages;  // of the layer
    // Rows of [queries | keys | values]. QK-norm and RoPE are applied to queries and keys in place.
    float* qkv;
    float* queries;          // [row][query head][HEAD_DIM], rotated
    HeadConstants heads;
    u32 query_heads;
    u32 kv_heads;
    u32 rows_per_block;
};
CHECK_LAYOUT(AppendParams);

constexpr int D = HEAD_DIM;
constexpr int WARPS = D / 16, THREADS = 32 * WARPS;  // one warp per 16 output channels
constexpr int VECTORS = 16;  // vectors (rows times heads) that a block processes at a time
// Larger rotations do not fit shared memory and are read from global memory.
constexpr bool ROTATION_NEAR = D <= 128;

struct Shared {
    SplitVectors<VECTORS> vectors;
    uint4 rotation[ROTATION_NEAR ? ROTATION_QUADS : 1];
};

// The place of a row's key and value in the cache.
struct RowPlace {
    u16* page;
    u32 token;

    DEVICE RowPlace(const AppendParams& p, const HeadPages& pages, u32 row) {
        const u32 position = __ldcg(p.step.row_position + row), sequence = __ldcg(p.step.row_sequence + row);
        const u32 table = __ldcg(&p.step.sequences[sequence].table);
        page = (u16*)(pages.full + (u64)__ldcg(p.step.full + table + position / 64) * full_page_bytes(D));
        token = position % 64;
    }
    DEVICE void put(Side side, u32 channel, float x) const { page[full_element(side, D, token, channel)] = f32_to_bf16(x); }
};

// Rotates the vectors in shared memory; each warp computes its own 16 output channels.
DEVICE void rotate_vectors(float (&out)[2][4], const Shared& shared, const uint4* rotation, u32 lane, u32 warp) {
    const u32 g = lane >> 2, t = lane & 3;
    auto vectors = [&](int step, u32 (&high)[4], u32 (&low)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 vector = g + 8 * (i & 1), channel = 16 * step + 2 * t + 8 * (i >> 1);
            high[i] = shared.vectors.high_pair(vector, channel), low[i] = shared.vectors.low_pair(vector, channel);
        }
    };
    rotate<2>(out, vectors, [&](int step, int n) { return rotation[(step * TILES_OF_HEAD + 2 * warp + n) * 32 + lane]; });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) append(AppendParams p) {
    extern __shared__ float4 memory[];
    Shared& shared = *(Shared*)memory;
    const u32 tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const u32 kv_head = blockIdx.y, group = p.query_heads / p.kv_heads, width = (p.query_heads + 2 * p.kv_heads) * D;
    const u32 first_row = blockIdx.x * p.rows_per_block, rows = min(p.rows_per_block, p.step.rows - first_row);
    // Vector v is vector v % each of row v / each. The order: query heads, key, value.
    const u32 each = group + 2, total = rows * each;
    allow_next_kernel();

    const uint4* rotation = p.heads.rotation ? p.heads.rotation + kv_head * ROTATION_QUADS : nullptr;
    if (ROTATION_NEAR && rotation) {
        for (u32 i = tid; i < ROTATION_QUADS; i += THREADS) copy_to_shared(shared_address(shared.rotation + i), rotation + i);
        rotation = shared.rotation;
    }
    // The tables of the step may be read before wait_for_previous_kernel: they are uploaded by a
    // copy, and a kernel starts only after all copies before it. Only kernels overlap with one
    // another.
    VectorConstants constants;
    auto load_constants = [&](u32 row, bool is_key) {
        constants.load(p.heads, __ldcg(p.step.row_position + row), is_key, kv_head, lane);
    };
    if (warp < total) load_constants(first_row + warp / each, warp % each == group);
    const HeadPages pages = p.pages[kv_head];
    const RowPlace first_place(p, pages, first_row);
    auto place_of = [&](u32 row) { return row == first_row ? first_place : RowPlace(p, pages, row); };
    // Stores neighbouring channels of a finished query head or key.
    auto put_out = [&](u32 row, u32 index, u32 channel, auto... x) {
        u32 at = channel;
        if (index < group) {
            float* to = p.queries + ((u64)row * p.query_heads + kv_head * group + index) * D;
            ((to[at++] = x), ...);
        } else {
            const RowPlace place = place_of(row);
            (place.put(KEY, at++, x), ...);
        }
    };
    wait_for_previous_kernel();
    for (u32 base = 0; base < total; base += VECTORS) {
        const u32 count = min((u32)VECTORS, total - base);
        for (u32 v = warp; v < count; v += WARPS) {
            const u32 row = first_row + (base + v) / each, index = (base + v) % each;
            const bool is_query = index < group, is_key = index == group;
            const u32 head = is_query ? kv_head * group + index : p.query_heads + (is_key ? 0 : p.kv_heads) + kv_head;
            float* x = p.qkv + (u64)row * width + head * D + lane;
            float values[CHANNELS];
#pragma unroll
            for (int k = 0; k < CHANNELS; k++) values[k] = x[32 * k];
            if (!is_query && !is_key) {
                // Values are stored as they are: their rotation is folded into the model's weights.
                const RowPlace place = place_of(row);
#pragma unroll
                for (int k = 0; k < CHANNELS; k++) place.put(VALUE, lane + 32 * k, values[k]);
                continue;
            }
            if (base > 0 || v != warp) load_constants(row, is_key);
            constants.norm_and_rope(values, is_key ? p.heads.key_norm : p.heads.query_norm, p.heads.eps);
#pragma unroll
            for (int k = 0; k < CHANNELS; k++) {
                x[32 * k] = values[k];
                values[k] -= constants.mean[k];
                if (rotation) shared.vectors.put(v, lane + 32 * k, values[k]);
                else put_out(row, index, lane + 32 * k, values[k]);
            }
        }
        if (!rotation) continue;
        wait_for_copied_bytes();
        __syncthreads();
        float out[2][4];
        rotate_vectors(out, shared, rotation, lane, warp);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 v = (lane >> 2) + 8 * half, row = first_row + (base + v) / each, index = (base + v) % each;
            if (v >= count || index > group) continue;
#pragma unroll
            for (int n = 0; n < 2; n++)
                put_out(row, index, 16 * warp + 8 * n + 2 * (lane & 3), out[n][2 * half], out[n][2 * half + 1]);
        }
        if (base + VECTORS < total) __syncthreads();
    }
}

#if HEAD_DIM <= 128

// ---- Many rows. ----
//
// A warp takes 16 vectors from the projections to the cache and waits for no other warp. It loads
// them as A fragments, so a vector lies in four lanes: a norm is two shuffles, both channels of a RoPE
// pair are in one lane, and the products need no detour through shared memory, which holds only the
// rotation. The projections are left as they are.
//
// Vectors and rotation are rounded to FP16 (11 bits) for their product: attention rounds the queries of
// prompts to as many bits or fewer, and the cache stores keys in 8. Inputs and outputs of a product are
// ordered so that a lane loads and stores four neighbouring channels: 4q and 4q + 1 of sixteen are columns
// 2q and 2q + 1 of a fragment, 4q + 2 and 4q + 3 are columns 2q + 8 and 2q + 9 of A, 2q and 2q + 1 of
// the next tile of sums.

constexpr int ROW_WARPS = 8;
constexpr int VALUE_ROWS = 4;  // rows of values that a warp copies at a time

DEVICE float4 load4(const float* from) { return *(const float4*)from; }
DEVICE float finite_f16(float x) { return fminf(fmaxf(x, -65504.0f), 65504.0f); }

// Vector `lane / 4` or `lane / 4 + 8` of a warp's sixteen: quad i is channels 16 i + 4 (lane % 4) and the
// next three.
struct LaneVector {
    float4 x[STEPS];
    float* query;  // where the finished vector goes, or null
    u16* page;     // of a key, or null
    u32 token;

    DEVICE void load(const AppendParams& p, const HeadPages& pages, u32 row, u32 index, u32 kv_head, u32 t) {
        const u32 group = p.query_heads / p.kv_heads, width = (p.query_heads + 2 * p.kv_heads) * D;
        const bool is_key = index == group;
        const u32 head = is_key ? p.query_heads + kv_head : kv_head * group + index;
        const float* from = p.qkv + (u64)row * width + head * D + 4 * t;
#pragma unroll
        for (int i = 0; i < STEPS; i++) x[i] = load4(from + 16 * i);
        query = is_key ? nullptr : p.queries + ((u64)row * p.query_heads + head) * D;
        page = nullptr;
        if (is_key) {
            const RowPlace place(p, pages, row);
            page = place.page, token = place.token;
        }
        const float* norm = is_key ? p.heads.key_norm : p.heads.query_norm;
        if (norm) {
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                squares = __fmaf_rn(x[i].y, x[i].y, __fmaf_rn(x[i].x, x[i].x, squares));
                squares = __fmaf_rn(x[i].w, x[i].w, __fmaf_rn(x[i].z, x[i].z, squares));
            }
            const float scale = 1.0f / sqrtf(quad_sum(squares) / (float)D + p.heads.eps);
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                const float4 w = load4(norm + 16 * i + 4 * t);
                x[i].x = x[i].x * scale * w.x, x[i].y = x[i].y * scale * w.y;
                x[i].z = x[i].z * scale * w.z, x[i].w = x[i].w * scale * w.w;
            }
        }
        const u64 angle = (u64)__ldcg(p.step.row_position + row) * (D / 2) + 4 * t;
        auto turn = [](float& a, float& b, float c, float s) {
            const float before = a;
            a = a * c - b * s, b = b * c + before * s;
        };
#pragma unroll
        for (int i = 0; i < STEPS / 2; i++) {
            const float4 c = load4(p.heads.cosines + angle + 16 * i), s = load4(p.heads.sines + angle + 16 * i);
            float4 &a = x[i], &b = x[i + STEPS / 2];
            turn(a.x, b.x, c.x, s.x), turn(a.y, b.y, c.y, s.y), turn(a.z, b.z, c.z, s.z), turn(a.w, b.w, c.w, s.w);
        }
        if (!is_key || !p.heads.mean) return;
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const float4 mean = load4(p.heads.mean + kv_head * D + 16 * i + 4 * t);
            x[i].x -= mean.x, x[i].y -= mean.y, x[i].z -= mean.z, x[i].w -= mean.w;
        }
    }
    // Stores four neighbouring channels of the finished vector.
    DEVICE void put(u32 channel, const float4& y) const {
        if (query) *(float4*)(query + channel) = y;
        if (page) *(uint2*)(page + full_element(KEY, D, token, channel)) = make_uint2(pack_bf16(y.x, y.y), pack_bf16(y.z, y.w));
    }
};

// The rotation of a head as B fragments in FP16, [input step][output tile][lane], in the order of channels
// said above. `from` has the order of SplitVectors.
DEVICE void load_rotation(uint2* rotation, const uint4* from) {
    for (u32 i = threadIdx.x; i < ROTATION_QUADS; i += 32 * ROW_WARPS) {
        const u32 step = i / 32 / TILES_OF_HEAD, tile = i / 32 % TILES_OF_HEAD, column = i % 32 / 4, t = i % 4;
        const u32 output = tile / 2 * 16 + column / 2 * 4 + tile % 2 * 2 + column % 2;
        auto inputs = [&](u32 first) {
            const uint4 r = from[(step * TILES_OF_HEAD + output / 8) * 32 + output % 8 * 4 + first % 8 / 2];
            const u32 high = first < 8 ? r.x : r.y, low = first < 8 ? r.z : r.w;
            return pack_f16(low_bf16(high) + low_bf16(low), high_bf16(high) + high_bf16(low));
        };
        rotation[i] = make_uint2(inputs(4 * t), inputs(4 * t + 2));
    }
}

// Rotates and stores a warp's sixteen vectors.
DEVICE void rotate_rows(const LaneVector (&vectors)[2], const uint2* rotation, u32 lane) {
    u32 a[STEPS][4];
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float4 x = vectors[half].x[i];
            a[i][half] = pack_f16(finite_f16(x.x), finite_f16(x.y));
            a[i][half + 2] = pack_f16(finite_f16(x.z), finite_f16(x.w));
        }
#pragma unroll 2
    for (u32 tiles = 0; tiles < TILES_OF_HEAD; tiles += 2) {
        float out[2][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const uint2 r = rotation[(step * TILES_OF_HEAD + tiles + n) * 32 + lane];
                mma_f16(out[n], a[step][0], a[step][1], a[step][2], a[step][3], r.x, r.y);
            }
#pragma unroll
        for (int half = 0; half < 2; half++)
            vectors[half].put(8 * tiles + 4 * (lane & 3),
                              make_float4(out[0][2 * half], out[0][2 * half + 1], out[1][2 * half], out[1][2 * half + 1]));
    }
}

// Values are stored as they are: their rotation is folded into the model's weights.
DEVICE void store_values(const AppendParams& p, const HeadPages& pages, u32 first_row, u32 rows, u32 kv_head, u32 warp, u32 lane) {
    const u32 width = (p.query_heads + 2 * p.kv_heads) * D, channel = 4 * lane;
    if (channel >= D) return;
    for (u32 base = warp * VALUE_ROWS; base < rows; base += ROW_WARPS * VALUE_ROWS) {
        u16* to[VALUE_ROWS];
        float4 x[VALUE_ROWS];
        // Absent rows repeat the last one.
#pragma unroll
        for (int i = 0; i < VALUE_ROWS; i++) {
            const u32 row = first_row + min(base + i, rows - 1);
            x[i] = load4(p.qkv + (u64)row * width + (p.query_heads + p.kv_heads + kv_head) * D + channel);
            const RowPlace place(p, pages, row);
            to[i] = place.page + full_element(VALUE, D, place.token, channel);
        }
#pragma unroll
        for (int i = 0; i < VALUE_ROWS; i++) *(uint2*)to[i] = make_uint2(pack_bf16(x[i].x, x[i].y), pack_bf16(x[i].z, x[i].w));
    }
}

extern "C" __global__ void __launch_bounds__(32 * ROW_WARPS, 2) append_rows(AppendParams p) {
    extern __shared__ float4 memory[];
    uint2* const rotation = (uint2*)memory;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3;
    const u32 kv_head = blockIdx.y, group = p.query_heads / p.kv_heads;
    const u32 first_row = blockIdx.x * p.rows_per_block, rows = min(p.rows_per_block, p.step.rows - first_row);
    const u32 each = group + 1, total = rows * each;
    const HeadPages pages = p.pages[kv_head];
    allow_next_kernel();
    if (p.heads.rotation) {
        load_rotation(rotation, p.heads.rotation + kv_head * ROTATION_QUADS);
        __syncthreads();
    }
    wait_for_previous_kernel();
    store_values(p, pages, first_row, rows, kv_head, warp, lane);
    for (u32 base = VECTORS * warp; base < total; base += VECTORS * ROW_WARPS) {
        // Absent vectors repeat the last one; they are not stored.
        LaneVector vectors[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 v = base + (lane >> 2) + 8 * half, held = min(v, total - 1);
            vectors[half].load(p, pages, first_row + held / each, held % each, kv_head, t);
            if (v >= total) vectors[half].query = nullptr, vectors[half].page = nullptr;
        }
        if (p.heads.rotation) {
            rotate_rows(vectors, rotation, lane);
            continue;
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < STEPS; i++) vectors[half].put(16 * i + 4 * t, vectors[half].x[i]);
    }
}

#endif
