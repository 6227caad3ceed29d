// Prefill attention for Hopper: a flash kernel with warp specialization and wgmma (sm_90a).
//
// A block takes 64 rows for each of its consumer warp groups; rows are (token, query head of the
// group) pairs, so one page serves the whole GQA group. A producer copies pages into a ring of stages
// in shared memory; the consumers read each stage once and then give it back.
//
// The block first reads BF16 pages (sink and recent tokens, or all of a BF16 cache), then quantized
// pages, which dequantize.cu has expanded to FP16 for this layer. The windows decide position by
// position which of the two a row reads; only pages on a border are masked.
//
// Keys of one or two bits are expanded to E4M3 instead, and their scores multiplied at twice the rate.
// Each page of keys has a factor, and each row of queries, so that both use the format's range.
//
// Few rows behind a long context do not fill the GPU. Then several blocks share the pages of the same
// rows, each writes its sums, and a second kernel adds them up. SINKS=1: the layer has attention sinks.
#include "fragments.cuh"
#include "wgmma.cuh"

struct HopperPrefillParams {
    StepTables step;
    const HeadPages* pages;  // of the layer
    const u8* expanded;      // FP16 pages: [KV head - first_head][place in the page tables]
    u64 expanded_head;       // bytes of one head
    const float* queries;    // [row][query head][HEAD_DIM]
    float* out;              // likewise, or null
    u16* rounded;            // the same in BF16, or null
    u32 query_heads;
    u32 kv_heads;
    u32 first_head;          // KV head of the blocks with blockIdx.x = 0
    u32 first_sequence;      // of the blocks with blockIdx.z = 0
    u32 least_rows;          // sequences with fewer rows belong to the decode kernel
    u32 tiles;               // groups of ROWS rows
    u32 splits;              // blocks that share the pages of a tile
    u32 e4m3_bits;           // keys of at most this many bits are expanded to E4M3
    float scale;
    float* partial;          // with splits: [sequence][KV head][tile][split][row][HEAD_DIM sums, maximum, total]
    Sinks sinks;
};
CHECK_LAYOUT(HopperPrefillParams);

constexpr int D = HEAD_DIM;
constexpr int CONSUMERS = D == 256 ? 2 : 3;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int ROWS = 64 * CONSUMERS;
constexpr int STAGES = D == 256 ? 2 : 4;
// Together they must not exceed what the kernel starts with: 512 threads of 128, or 384 of 168.
constexpr int CONSUMER_REGISTERS = D == 256 ? 240 : 160, PRODUCER_REGISTERS = D == 256 ? 24 : 32;

constexpr int PANEL = 64 * 128;                  // 64 rows of 128 bytes, 128-byte swizzle
constexpr int QUERY_BYTES = 64 * D * 2;          // of one warp group
constexpr int STAGE_BYTES = 64 * D * 4;          // a page in 16 bits: keys, then values
// With keys in E4M3: keys, values, and the factor of the keys.
constexpr int E4M3_FACTOR_AT = 64 * D * 3, E4M3_BYTES = E4M3_FACTOR_AT + 16;
struct Barriers { u64 full[STAGES], empty[STAGES]; };

constexpr u32 PART = D + 2;  // of a row, in `partial`

// Weights are exponentials times 2^10, so that small ones keep their bits in fp16.
constexpr float WEIGHT_LOG = 10.0f;

// The pages of one kind that a tile reads: blocks [0, sink_end) and [begin, end). A block of the grid takes
// `count` of them, from the `first` on.
struct PageList {
    u32 sink_end, begin, end, first, count;
    DEVICE u32 all() const { return sink_end + (end - begin); }
    DEVICE u32 block(u32 i) const {
        i += first;
        return i < sink_end ? i : begin + (i - sink_end);
    }
    // Keeps those with numbers in [from, to) where the first has number `number`.
    DEVICE void take(u32 number, u32 from, u32 to) {
        first = min(max(from, number) - number, all());
        count = min(max(to, number) - number, all()) - first;
    }
};

struct Context {
    SequenceInfo sequence;
    u32 first, last_row;                           // flat rows of the block
    u32 first_query, last_query;                   // positions
    u32 first_boundary, last_boundary;
    PageList full, coded;
    History history;

    DEVICE Context(const HopperPrefillParams& p, const HeadPages& pages, u32 group, u32 tile) {
        sequence = p.step.sequences[p.first_sequence + blockIdx.z];
        first = tile * ROWS;
        last_row = min(first + ROWS, sequence.rows * group) - 1;
        first_query = sequence.first_position + first / group;
        last_query = sequence.first_position + last_row / group;
        first_boundary = boundary_of(p.step, first_query);
        last_boundary = boundary_of(p.step, last_query);
        const u32 blocks = last_query / 64 + 1, sink = p.step.sink;
        const u32 recent = min(first_boundary / 64, blocks);
        full.sink_end = min((sink + 63) / 64, recent);
        full.begin = recent;
        full.end = blocks;
        coded.sink_end = 0;
        history = history_of(p.step, sequence.view, sequence.view_end, p.first_head + blockIdx.x);
        coded.begin = coded.end = history.first;
        if (pages.keeps_history() && last_boundary > sink) coded.end = min((last_boundary + 63) / 64, blocks);
        const u32 split = blockIdx.y % p.splits, all = full.all() + coded.all();
        const u32 from = all * split / p.splits, to = all * (split + 1) / p.splits;
        coded.take(full.all(), from, to);
        full.take(0, from, to);
    }
};

// ---- The producer. ----

struct Producer {
    const Context& context;
    u8* stages;
    Barriers* barriers;
    u32 iteration = 0;

    // Copies the pages of a list; `page_at` says where the page at a place of the tables lies.
    template <class F>
    DEVICE void copy(const PageList& list, u32 bytes, F&& page_at) {
        for (u32 i = 0; i < list.count; i++, iteration++) {
            const u32 stage = iteration % STAGES, full = shared_address(&barriers->full[stage]);
            const u8* page = page_at(context.sequence.table + list.block(i));
            barrier_wait(shared_address(&barriers->empty[stage]), (iteration / STAGES & 1) ^ 1);
            barrier_arrive_expecting(full, bytes);
            copy_bulk(shared_address(stages + stage * STAGE_BYTES), page, bytes, full);
        }
    }
};

// ---- A consumer warp group: 64 rows. Its threads hold rows g and g + 8 of their warp's sixteen. ----

struct Consumer {
    const HopperPrefillParams& p;
    const Context& context;
    u8* stages;
    u8* queries;          // of this warp group
    Barriers* barriers;
    u32 warp, lane, group_id;
    u32 iteration = 0;
    u32 position[2], boundary[2];
    float row_scale[2];   // from a row's scores to base-2 logarithms
    float out[D / 2] = {};
    float largest[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, total[2] = {};

    DEVICE u32 stage() const { return iteration % STAGES; }
    DEVICE void wait_for_page() const {
        barrier_wait(shared_address(&barriers->full[stage()]), iteration / STAGES & 1);
    }
    DEVICE void release(u32 of_iteration) const {
        if (lane == 0) barrier_arrive(shared_address(&barriers->empty[of_iteration % STAGES]));
    }
    DEVICE void sync_group() const { sync_threads_of(1 + group_id, 128); }
    // Warp groups take turns to start their products: while one has the tensor cores, the others are
    // at their softmax. Without turns all of them would do the same thing at the same time.
    DEVICE void wait_for_turn() const { sync_threads_of(1 + CONSUMERS + group_id, 256); }
    DEVICE void pass_turn() const {
        asm volatile("bar.arrive %0, %1;" ::"r"(1 + CONSUMERS + (group_id + 1) % CONSUMERS), "r"(256) : "memory");
    }
    // Where a row of the warp group lies in queries and output.
    DEVICE u64 row_offset(u32 row, u32 kv_head, u32 group) const {
        const u32 flat = min(context.first + group_id * 64 + row, context.last_row);
        return ((u64)(context.sequence.first_row + flat / group) * p.query_heads + kv_head * group + flat % group) * D;
    }

    // The queries as operands for pages of one kind. Earlier products must not read them any more.
    template <Form FORM>
    DEVICE void load_queries(u32 kv_head, u32 group) {
        // All loads of a batch are in flight at once.
        constexpr int EACH = D / 4, LOADS = 16 * EACH / 32, BATCH = LOADS < 8 ? LOADS : 8;
        const float scale = p.scale * LOG2E;
        row_scale[0] = row_scale[1] = scale;
#pragma unroll 1
        for (u32 first = 0; first < LOADS; first += BATCH) {
            float4 x[BATCH];
            auto row = [&](int i) { return warp * 16 + ((first + i) * 32 + lane) / EACH; };
            auto channel = [&](int i) { return ((first + i) * 32 + lane) % EACH * 4; };
#pragma unroll
            for (int i = 0; i < BATCH; i++) x[i] = *(const float4*)(p.queries + row_offset(row(i), kv_head, group) + channel(i));
            if constexpr (FORM == E4M3) put_e4m3(x, first, scale);
            else {
#pragma unroll
                for (int i = 0; i < BATCH; i++) {
                    const u32 r = row(i), c = channel(i);
                    auto pack = [](float a, float b) {
                        auto kept = [](float y) { return fminf(fmaxf(y, -65504.0f), 65504.0f); };
                        return FORM == F16 ? pack_f16(kept(a), kept(b)) : pack_bf16(a, b);
                    };
                    *(uint2*)(queries + c / 64 * PANEL + r * 128 + ((c / 8 % 8) ^ (r & 7)) * 16 + c % 8 * 2) =
                        make_uint2(pack(x[i].x, x[i].y), pack(x[i].z, x[i].w));
                }
            }
        }
        fence_async_proxy();
        sync_group();
    }

    // Stores a batch of load_queries in E4M3. A row is multiplied by the power of two that brings its largest
    // magnitude to 128 .. 256; `row_scale` takes it back.
    template <int BATCH>
    DEVICE void put_e4m3(const float4 (&x)[BATCH], u32 first, float scale) {
        constexpr int ROW_LOADS = D / 128;
#pragma unroll
        for (int i = 0; i < BATCH; i += ROW_LOADS) {
            const u32 in_warp = (first + i) / ROW_LOADS, row = warp * 16 + in_warp;
            float most = 0.0f;
#pragma unroll
            for (int j = i; j < i + ROW_LOADS; j++)
                most = fmaxf(most, fmaxf(fmaxf(fabsf(x[j].x), fabsf(x[j].y)), fmaxf(fabsf(x[j].z), fabsf(x[j].w))));
            const u32 exponent = max(__reduce_max_sync(0xffffffffu, __float_as_uint(most)) >> 23, 64u);
            const float up = __uint_as_float((261 - exponent) << 23), down = __uint_as_float((exponent - 7) << 23);
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (in_warp == (lane >> 2) + 8 * half) row_scale[half] = scale * down;
#pragma unroll
            for (int j = i; j < i + ROW_LOADS; j++) {
                const u32 c = (j - i) * 128 + 4 * lane;
                *(u32*)(queries + c / 128 * PANEL + row * 128 + ((c / 16 % 8) ^ (row & 7)) * 16 + c % 16) =
                    pack_e4m3(x[j].x * up, x[j].y * up) | (u32)pack_e4m3(x[j].z * up, x[j].w * up) << 16;
            }
        }
    }

    // New maxima of both rows: returns whether any row of the warp grew, and by which factors sums shrink.
    DEVICE bool grow(const float (&top)[2], float (&factor)[2], float (&reference)[2]) {
        bool grew = false;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float before = largest[h], after = fmaxf(before, quad_max(top[h]));
            // Nothing seen yet: any finite reference will do.
            const float finite = after == NEGATIVE_INFINITY ? 0.0f : after;
            factor[h] = exp2_fast(before - finite);
            reference[h] = finite - WEIGHT_LOG;
            grew |= after > before;
            largest[h] = after;
            total[h] *= factor[h];
        }
        return __any_sync(0xffffffffu, grew);
    }

    DEVICE void rescale(const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < D / 2; i++) out[i] *= factor[i >> 1 & 1];
    }

    // Does a row read this position in the form of this page?
    template <Form FORM>
    DEVICE bool reads(u32 j, int h) const {
        const bool is_code = j >= p.step.sink && j < boundary[h];
        return is_code == (FORM != BF16) && j <= position[h] && !(FORM != BF16 && context.history.in_hole(j));
    }

    // Turns the scores of a page into weights. The answer says whether any row's maximum grew: then sums
    // so far shrink by `factor`. Scores are multiplied by `key_factor`.
    template <Form FORM>
    DEVICE bool softmax(float (&score)[32], u32 block, float key_factor, float (&factor)[2]) {
        const u32 begin = block * 64;
        const bool whole = FORM != BF16 ? begin >= p.step.sink && begin + 64 <= context.first_boundary &&
                                              !context.history.has_hole(begin, begin + 64)
                                 : begin + 63 <= context.first_query &&
                                       (begin + 64 <= p.step.sink || begin >= context.last_boundary);
        if (!whole) {
#pragma unroll
            for (int i = 0; i < 32; i++)
                if (!reads<FORM>(begin + i / 4 * 8 + 2 * (lane & 3) + (i & 1), i >> 1 & 1)) score[i] = NEGATIVE_INFINITY;
        }
        const float scale[2] = {row_scale[0] * key_factor, row_scale[1] * key_factor};
        float top[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, reference[2];
#pragma unroll
        for (int i = 0; i < 32; i++) top[i >> 1 & 1] = fmaxf(top[i >> 1 & 1], score[i]);
        top[0] *= scale[0], top[1] *= scale[1];
        const bool grew = grow(top, factor, reference);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int h = i >> 1 & 1;
            score[i] = exp2_fast(__fmaf_rn(score[i], scale[h], -reference[h]));
            total[h] += score[i];
        }
        return grew;
    }

    // The factor of the keys of the page at hand.
    template <Form FORM>
    DEVICE float key_factor() const {
        return FORM == E4M3 ? *(const float*)(stages + stage() * STAGE_BYTES + E4M3_FACTOR_AT) : 1.0f;
    }

    template <Form FORM>
    DEVICE void start_scores(float (&score)[32], u32 page) const {
        const u64 q = descriptor(shared_address(queries), 16, 1024), keys = descriptor(page, 16, 1024);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < (FORM == E4M3 ? D / 32 : D / 16); k++) {
            const u32 at = k / 4 * PANEL + k % 4 * 32;
            if (k == 0) wgmma_scores<FORM, false>(score, q, keys);
            else wgmma_scores<FORM, true>(score, advance(q, at), advance(keys, at));
        }
        wgmma_commit();
    }

    template <Form FORM>
    DEVICE void start_values(u32 (&weights)[16], u32 page) {
        const u64 values = descriptor(page + (FORM == E4M3 ? 64 * D : 128 * D), PANEL, 1024);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_values<FORM>(out, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2], weights[4 * k + 3],
                                advance(values, k * 2048));
        wgmma_commit();
    }

    // Attends to all pages of one kind. While the tensor cores weight the values of a page, the softmax
    // of the next one is computed.
    template <Form FORM>
    DEVICE void pages(const PageList& list) {
        const u32 count = list.count;
        if (count == 0) return;
        float score[32], factor[2];
        u32 weights[16];
        auto pack = [&] {
#pragma unroll
            for (int k = 0; k < 16; k++)
                weights[k] = FORM != BF16 ? pack_f16(score[2 * k], score[2 * k + 1]) : pack_bf16(score[2 * k], score[2 * k + 1]);
        };
        wait_for_page();
        u32 page = shared_address(stages + stage() * STAGE_BYTES);
        start_scores<FORM>(score, page);
        wgmma_wait<0>();
        hold(score);
        if (softmax<FORM>(score, list.block(0), key_factor<FORM>(), factor)) rescale(factor);
        pack();
        iteration++;
        for (u32 i = 1; i < count; i++, iteration++) {
            wait_for_page();
            const u32 before = page;
            page = shared_address(stages + stage() * STAGE_BYTES);
            wait_for_turn();
            start_scores<FORM>(score, page);
            start_values<FORM>(weights, before);
            pass_turn();
            wgmma_wait<1>();
            hold(score);
            const bool grew = softmax<FORM>(score, list.block(i), key_factor<FORM>(), factor);
            hold(score);  // all of the softmax comes before this wait
            wgmma_wait<0>();
            hold(out);
            release(iteration - 1);
            if (grew) rescale(factor);
            pack();
        }
        start_values<FORM>(weights, page);
        wgmma_wait<0>();
        hold(out);
        release(iteration - 1);
    }

    template <Form FORM>
    DEVICE void attend_codes(const PageList& list, u32 kv_head, u32 group) {
        load_queries<FORM>(kv_head, group);
        pages<FORM>(list);
    }

    // The sums of this block alone, and what they are relative to.
    DEVICE void store_part(u32 tile) const {
        const u64 block = (((u64)blockIdx.z * gridDim.x + blockIdx.x) * p.tiles + tile) * p.splits + blockIdx.y % p.splits;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float sum = quad_sum(total[h]);
            const u32 row = group_id * 64 + warp * 16 + h * 8 + (lane >> 2);
            if (context.first + row > context.last_row) continue;
            float* part = p.partial + (block * ROWS + row) * PART;
            if ((lane & 3) == 0) *(float2*)(part + D) = make_float2(largest[h], sum);
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                *(float2*)(part + n * 8 + 2 * (lane & 3)) = make_float2(out[4 * n + 2 * h], out[4 * n + 2 * h + 1]);
        }
    }

    DEVICE void store(u32 kv_head, u32 group) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = quad_sum(total[h]);
            const u32 row = warp * 16 + h * 8 + (lane >> 2);
            if (context.first + group_id * 64 + row > context.last_row) continue;
#ifdef SINKS
            const u32 flat = context.first + group_id * 64 + row;
            sum += sink_weight(p.sinks, context.sequence.first_row + flat / group, kv_head * group + flat % group, largest[h] - WEIGHT_LOG);
#endif
            const float norm = 1.0f / sum;
            const u64 at = row_offset(row, kv_head, group) + 2 * (lane & 3);
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                const float x = out[4 * n + 2 * h] * norm, y = out[4 * n + 2 * h + 1] * norm;
                if (p.out) *(float2*)(p.out + at + n * 8) = make_float2(x, y);
                if (p.rounded) *(u32*)(p.rounded + at + n * 8) = pack_bf16(x, y);
            }
        }
    }
};

// Grid: (KV heads, tiles x splits, sequences).
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_prefill_hopper(const HopperPrefillParams p) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ Barriers barriers;
    u8* queries = memory;
    u8* stages = queries + CONSUMERS * QUERY_BYTES;
    const u32 group = p.query_heads / p.kv_heads, kv_head = p.first_head + blockIdx.x;
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(shared_address(&barriers.full[s]), 1);
            barrier_init(shared_address(&barriers.empty[s]), 4 * CONSUMERS);
        }
        fence_async_proxy();
    }
    __syncthreads();
    allow_next_kernel();
    wait_for_previous_kernel();
    const SequenceInfo& s = p.step.sequences[p.first_sequence + blockIdx.z];
    // Late rows have the most to read: those of all heads go first.
    const u32 tile = p.tiles - 1 - blockIdx.y / p.splits;
    if (s.rows < p.least_rows || tile * ROWS >= s.rows * group) return;
    const HeadPages pages = p.pages[kv_head];
    const Context context(p, pages, group, tile);
    // The last page of a view may be partly filled, and a page's factor needs all of its rows.
    const bool e4m3 = pages.key_bits <= p.e4m3_bits && s.view == NO_VIEW;

    if (warp >= 4 * CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x % 128 != 0) return;
        Producer producer = {context, stages, &barriers};
        producer.copy(context.full, STAGE_BYTES, [&](u32 place) {
            return (const u8*)(pages.full + (u64)p.step.full[place] * STAGE_BYTES);
        });
        producer.copy(context.coded, e4m3 ? E4M3_BYTES : STAGE_BYTES, [&](u32 place) {
            return p.expanded + blockIdx.x * p.expanded_head + (u64)place * STAGE_BYTES;
        });
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        Consumer consumer = {p, context, stages, queries + warp / 4 * QUERY_BYTES, &barriers, warp % 4, lane, warp / 4};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 flat = min(context.first + warp * 16 + h * 8 + (lane >> 2), context.last_row);
            consumer.position[h] = s.first_position + flat / group;
            consumer.boundary[h] = boundary_of(p.step, consumer.position[h]);
        }
        if (consumer.group_id == CONSUMERS - 1) consumer.pass_turn();
        consumer.load_queries<BF16>(kv_head, group);
        consumer.pages<BF16>(context.full);
        consumer.sync_group();  // every warp has read its BF16 queries
        if (context.coded.count > 0) {
            if (e4m3) {
                if constexpr (D >= 128) consumer.attend_codes<E4M3>(context.coded, kv_head, group);
            } else {
                consumer.attend_codes<F16>(context.coded, kv_head, group);
            }
        }
        if (p.splits > 1) consumer.store_part(tile);
        else consumer.store(kv_head, group);
    }
}

// Adds up the parts of each row, in the order of the splits. A warp takes a row of a KV head. Grid: (KV heads,
// rows / 4, sequences).
extern "C" __global__ void __launch_bounds__(128) prefill_merge(const HopperPrefillParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const SequenceInfo& s = p.step.sequences[p.first_sequence + blockIdx.z];
    const u32 group = p.query_heads / p.kv_heads, flat = blockIdx.y * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (s.rows < p.least_rows || flat >= s.rows * group) return;
    const u64 tile = ((u64)blockIdx.z * gridDim.x + blockIdx.x) * p.tiles + flat / ROWS;
    const float* part = p.partial + (tile * p.splits * ROWS + flat % ROWS) * PART;
    const u64 stride = (u64)ROWS * PART;
    float largest = NEGATIVE_INFINITY, total = 0.0f;
    for (u32 i = 0; i < p.splits; i++) largest = fmaxf(largest, part[i * stride + D]);
    float2 sum[D / 64] = {};
    for (u32 i = 0; i < p.splits; i++) {
        const float* from = part + i * stride;
        // A part of masked pages alone has no maximum, and weight 0.
        const float weight = exp2_fast(from[D] - largest);
        total = __fmaf_rn(weight, from[D + 1], total);
#pragma unroll
        for (int n = 0; n < D / 64; n++) {
            const float2 x = *(const float2*)(from + n * 64 + 2 * lane);
            sum[n] = make_float2(__fmaf_rn(weight, x.x, sum[n].x), __fmaf_rn(weight, x.y, sum[n].y));
        }
    }
#ifdef SINKS
    total += sink_weight(p.sinks, s.first_row + flat / group, (p.first_head + blockIdx.x) * group + flat % group, largest - WEIGHT_LOG);
#endif
    const float norm = 1.0f / total;
    const u64 at = ((u64)(s.first_row + flat / group) * p.query_heads + (p.first_head + blockIdx.x) * group + flat % group) * D + 2 * lane;
#pragma unroll
    for (int n = 0; n < D / 64; n++) {
        const float x = sum[n].x * norm, y = sum[n].y * norm;
        if (p.out) *(float2*)(p.out + at + n * 64) = make_float2(x, y);
        if (p.rounded) *(u32*)(p.rounded + at + n * 64) = pack_bf16(x, y);
    }
}
