// Attention over a cache whose history is kept decoded: the pages named by `coded` are BF16 pages like full ones, filled on
// the CPU with what a format's codes stand for. For formats that have no kernels of their own, so in the plainest form:
// one block for each row and query head, everything in f32. Keys and values may have windows of their own.
#include "common.cuh"

struct DecodedParams {
    StepTables step;
    const HeadPages* pages;  // of the layer
    const float* queries;    // [row][query head][HEAD_DIM]
    float* out;              // likewise
    u32 query_heads;
    u32 kv_heads;
    float scale;
    // The windows: the query at t reads a side of j decoded if sink <= j < side_boundary(t).
    u32 key_recent, key_unit;
    u32 value_recent, value_unit;
    u32 unused;
};

constexpr int D = HEAD_DIM;
constexpr int THREADS = 256;

// First position at or beyond the sink whose side the query at `t` reads as it was written.
DEVICE u32 side_boundary(u32 sink, u32 recent, u32 unit, u32 t) {
    u64 before = (u64)sink + recent;
    u64 past = (u64)t + 1 > before ? (u64)t + 1 - before : 0;
    return sink + (u32)(past / unit) * unit;
}

// The page that holds a side of position `at`: an element index applies to both kinds.
DEVICE const u16* page_of(const HeadPages& pages, u32 full_id, u32 decoded_id, bool decoded) {
    return (const u16*)((decoded ? pages.coded : pages.full) + (u64)(decoded ? decoded_id : full_id) * full_page_bytes(D));
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_decoded(DecodedParams p) {
    __shared__ float query[D];
    __shared__ float weights[PAGE_TOKENS];
    __shared__ float rescale;
    const u32 row = blockIdx.x, head = blockIdx.y, kv_head = head / (p.query_heads / p.kv_heads);
    allow_next_kernel();
    wait_for_previous_kernel();
    const SequenceInfo s = p.step.sequences[p.step.row_sequence[row]];
    const u32 position = p.step.row_position[row], sink = p.step.sink;
    const u32 key_boundary = side_boundary(sink, p.key_recent, p.key_unit, position);
    const u32 value_boundary = side_boundary(sink, p.value_recent, p.value_unit, position);
    const HeadPages pages = p.pages[kv_head];
    const bool history = pages.keeps_history();
    for (u32 i = threadIdx.x; i < D; i += THREADS)
        query[i] = p.queries[((u64)row * p.query_heads + head) * D + i] * p.scale;
    float largest = NEGATIVE_INFINITY, total = 0.0f, sum = 0.0f;  // `sum` of channel threadIdx.x
    __syncthreads();
    for (u32 block = 0; block * PAGE_TOKENS <= position; block++) {
        const u32 begin = block * PAGE_TOKENS, end = min((u32)PAGE_TOKENS, position + 1 - begin);
        const u32 full_id = p.step.full[s.table + block], decoded_id = p.step.coded[s.table + block];
        // Four threads take a token's score, eight channels at a time.
        const u32 token = threadIdx.x / 4, part = threadIdx.x % 4, at = begin + token;
        float score = 0.0f;
        if (token < end && !history && at >= sink && at < max(key_boundary, value_boundary)) {
            score = NEGATIVE_INFINITY;
        } else if (token < end) {
            const u16* page = page_of(pages, full_id, decoded_id, at >= sink && at < key_boundary);
            for (u32 c = 8 * part; c < D; c += 32) {
                const uint4 k = *(const uint4*)(page + full_element(KEY, D, token, c));
                score = __fmaf_rn(query[c], low_bf16(k.x), score);
                score = __fmaf_rn(query[c + 1], high_bf16(k.x), score);
                score = __fmaf_rn(query[c + 2], low_bf16(k.y), score);
                score = __fmaf_rn(query[c + 3], high_bf16(k.y), score);
                score = __fmaf_rn(query[c + 4], low_bf16(k.z), score);
                score = __fmaf_rn(query[c + 5], high_bf16(k.z), score);
                score = __fmaf_rn(query[c + 6], low_bf16(k.w), score);
                score = __fmaf_rn(query[c + 7], high_bf16(k.w), score);
            }
        }
        score += __shfl_xor_sync(0xffffffffu, score, 1);
        score += __shfl_xor_sync(0xffffffffu, score, 2);
        if (part == 0) weights[token] = token < end ? score : NEGATIVE_INFINITY;
        __syncthreads();
        const float before = largest;
        for (u32 t = 0; t < end; t++) largest = fmaxf(largest, weights[t]);
        __syncthreads();
        // Nothing to read yet: any finite reference will do.
        const float reference = largest == NEGATIVE_INFINITY ? 0.0f : largest;
        if (threadIdx.x < PAGE_TOKENS) weights[threadIdx.x] = exp2f((weights[threadIdx.x] - reference) * LOG2E);
        if (threadIdx.x == 0) rescale = exp2f((before - reference) * LOG2E);
        __syncthreads();
        total *= rescale;
        sum *= rescale;
        for (u32 t = 0; t < end; t++) total += weights[t];
        if (threadIdx.x < D) {
            for (u32 t = 0; t < end; t++) {
                if (weights[t] == 0.0f) continue;  // what is not read may hold anything
                const u16* page =
                    page_of(pages, full_id, decoded_id, begin + t >= sink && begin + t < value_boundary);
                sum = __fmaf_rn(weights[t], bf16_to_f32(page[full_element(VALUE, D, t, threadIdx.x)]), sum);
            }
        }
        __syncthreads();
    }
    if (threadIdx.x < D) p.out[((u64)row * p.query_heads + head) * D + threadIdx.x] = sum / total;
}
