// Attention in its simplest form: one thread block per row and query head, f32 arithmetic, one page
// of 64 tokens at a time. It serves
//   - formats without kernels of their own (DEQUANTIZED=1),
//   - devices with too little shared memory for attention_prefill.cu,
//   - OSCAR_CUDA_ATTENTION=simple, as a second opinion.
//
// DEQUANTIZED: how a row of history is stored.
//   0  affine codes of 1 to 4 bits (page.cuh)
//   1  BF16 rows in the layout of full pages, quantized and dequantized on the CPU
//
// Keys and values have their own windows. Compiled with HEAD_DIM and DEQUANTIZED.
#include "common.cuh"

struct SimpleParams {
    StepTables step;
    const HeadPages* pages;  // of the layer, by KV head
    const float* queries;    // [row][query head][HEAD_DIM]
    float* out;              // likewise
    u32 query_heads;
    u32 kv_heads;
    float scale;
    u32 key_recent, key_unit;
    u32 value_recent, value_unit;
    Sinks sinks;
};
CHECK_LAYOUT(SimpleParams);

constexpr int D = HEAD_DIM;
constexpr int THREADS = 256;
constexpr int LANES = THREADS / PAGE_TOKENS;  // threads that share the score of a token

// A lane's part of the dot product of `query` with a BF16 key, eight channels at a time.
DEVICE float dot_bf16(const float* query, const u16* page, u32 token, u32 lane) {
    float sum = 0.0f;
    for (u32 c = 8 * lane; c < D; c += 8 * LANES) {
        const uint4 k = *(const uint4*)(page + full_element(KEY, D, token, c));
        const u32 pairs[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum = __fmaf_rn(query[c + 2 * i], low_bf16(pairs[i]), sum);
            sum = __fmaf_rn(query[c + 2 * i + 1], high_bf16(pairs[i]), sum);
        }
    }
    return sum;
}

// Reads the rows of one block of 64 tokens, which may have a full page, a page of history or both.
// `history` says which of the two holds a row.
struct BlockReader {
    const u16* full;
    const u8* coded;
#if !DEQUANTIZED
    CodedPage shape;
#endif

    DEVICE BlockReader(const HeadPages& pages, u32 full_id, u32 coded_id)
        : full((const u16*)(pages.full + (u64)full_id * full_page_bytes(D)))
#if DEQUANTIZED
          ,
          coded((const u8*)(pages.coded + (u64)coded_id * full_page_bytes(D))) {
    }
#else
          ,
          shape{pages.key_bits, pages.value_bits, D} {
        coded = (const u8*)(pages.coded + (u64)coded_id * shape.bytes());
    }
#endif

    // A lane's part of the dot product of `query` with a key.
    DEVICE float dot(const float* query, u32 token, u32 lane, bool history) const {
        if (!history) return dot_bf16(query, full, token, lane);
#if DEQUANTIZED
        return dot_bf16(query, (const u16*)coded, token, lane);
#else
        const u32 pair = *(const u32*)(coded + param_byte(shape, KEY, token));
        const float scale = f16_to_f32(pair & 0xffff), minimum = f16_to_f32(pair >> 16);
        float sum = 0.0f;
        for (u32 c = lane; c < D; c += LANES)
            sum = __fmaf_rn(query[c], scale * (float)load_code(coded, shape, KEY, token, c) + minimum, sum);
        return sum;
#endif
    }

    // One channel of a value.
    DEVICE float value(u32 token, u32 channel, bool history) const {
        if (!history) return bf16_to_f32(full[full_element(VALUE, D, token, channel)]);
#if DEQUANTIZED
        return bf16_to_f32(((const u16*)coded)[full_element(VALUE, D, token, channel)]);
#else
        const u32 pair = *(const u32*)(coded + param_byte(shape, VALUE, token));
        return f16_to_f32(pair & 0xffff) * (float)load_code(coded, shape, VALUE, token, channel) +
               f16_to_f32(pair >> 16);
#endif
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) attention_simple(SimpleParams p) {
    __shared__ float query[D];
    __shared__ float weights[PAGE_TOKENS];
    __shared__ float rescale;
    const u32 row = blockIdx.x, head = blockIdx.y, kv_head = head / (p.query_heads / p.kv_heads);
    allow_next_kernel();
    wait_for_previous_kernel();
    const SequenceInfo s = p.step.sequences[p.step.row_sequence[row]];
    const u32 position = p.step.row_position[row], sink = p.step.sink;
    const u32 key_boundary = boundary(sink, p.key_recent, p.key_unit, position);
    const u32 value_boundary = boundary(sink, p.value_recent, p.value_unit, position);
    const HeadPages pages = p.pages[kv_head];
    // A zero-width head reads nothing between the sink and its recent tokens.
    const u32 skipped_until = pages.keeps_history() ? 0 : max(key_boundary, value_boundary);
    const History kept = history_of(p.step, s.view, s.view_end, kv_head);
    for (u32 i = threadIdx.x; i < D; i += THREADS)
        query[i] = p.queries[((u64)row * p.query_heads + head) * D + i] * p.scale;
    // Every thread has the same `largest` and `total`; `sum` is of channel threadIdx.x.
    float largest = NEGATIVE_INFINITY, total = 0.0f, sum = 0.0f;
    __syncthreads();
    for (u32 begin = 0; begin <= position; begin += PAGE_TOKENS) {
        const u32 end = min((u32)PAGE_TOKENS, position + 1 - begin), block = begin / PAGE_TOKENS;
        if (begin >= sink && begin < kept.view_end && block < kept.first) continue;
        // The blocks of a view begin at `first`; the sink lies before them.
        const u32 coded = block < kept.first ? NO_PAGE : kept.page(p.step, s.table, block);
        const BlockReader reader(pages, p.step.full[s.table + block], coded);
        const u32 token = threadIdx.x / LANES, lane = threadIdx.x % LANES, at = begin + token;
        float score = 0.0f;
        if (token < end) {
            const bool skipped = at >= sink && (at < skipped_until || kept.in_hole(at));
            score = skipped ? NEGATIVE_INFINITY : reader.dot(query, token, lane, at >= sink && at < key_boundary);
        }
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) score += __shfl_xor_sync(0xffffffffu, score, step);
        if (lane == 0) weights[token] = token < end ? score : NEGATIVE_INFINITY;
        __syncthreads();
        const float before = largest;
        for (u32 t = 0; t < end; t++) largest = fmaxf(largest, weights[t]);
        __syncthreads();
        // As long as every score is -infinity any finite reference gives weights of zero.
        const float reference = largest == NEGATIVE_INFINITY ? 0.0f : largest;
        if (threadIdx.x < PAGE_TOKENS) weights[threadIdx.x] = exp2f((weights[threadIdx.x] - reference) * LOG2E);
        if (threadIdx.x == 0) rescale = exp2f((before - reference) * LOG2E);
        __syncthreads();
        total *= rescale;
        sum *= rescale;
        for (u32 t = 0; t < end; t++) total += weights[t];
        if (threadIdx.x < D) {
            for (u32 t = 0; t < end; t++) {
                if (weights[t] == 0.0f) continue;  // a skipped row may hold anything, NaN included
                const bool history = begin + t >= sink && begin + t < value_boundary;
                sum = __fmaf_rn(weights[t], reader.value(t, threadIdx.x, history), sum);
            }
        }
        __syncthreads();
    }
    if (p.sinks.scores) total += sink_weight(p.sinks, row, head, largest * LOG2E);
    if (threadIdx.x < D) p.out[((u64)row * p.query_heads + head) * D + threadIdx.x] = sum / total;
}
