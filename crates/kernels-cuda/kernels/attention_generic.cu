// Attention in the plainest form: one block for each row and query head, every element decoded through page.cuh. It is
// the second opinion of `oscar gpu-check` and the path where a device lacks what the fast kernels need.
#include "common.cuh"

struct AttentionParams {
    StepTables step;
    const HeadPages* pages;  // of the layer
    const float* queries;    // [row][query head][HEAD_DIM]
    float* out;              // likewise
    u32 query_heads;
    u32 kv_heads;
    float scale;
};

constexpr int D = HEAD_DIM;
constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) attention_generic(AttentionParams p) {
    __shared__ float query[D];
    __shared__ float weights[64];
    __shared__ float rescale;
    const u32 row = blockIdx.x, head = blockIdx.y, kv_head = head / (p.query_heads / p.kv_heads);
    allow_next_kernel();
    wait_for_previous_kernel();
    const SequenceInfo s = p.step.sequences[p.step.row_sequence[row]];
    const u32 position = p.step.row_position[row], boundary = boundary_of(p.step, position);
    const HeadPages pages = p.pages[kv_head];
    const CodedPage shape = {pages.key_bits, pages.value_bits, D};
    for (u32 i = threadIdx.x; i < D; i += THREADS)
        query[i] = p.queries[((u64)row * p.query_heads + head) * D + i] * p.scale;
    float largest = NEGATIVE_INFINITY, total = 0.0f, sum = 0.0f;  // `sum` of channel threadIdx.x
    __syncthreads();
    for (u32 block = 0; block * 64 <= position; block++) {
        const u32 end = min(64u, position + 1 - block * 64);
        const u32 full_id = p.step.full[s.table + block], coded_id = p.step.coded[s.table + block];
        const u16* full = (const u16*)(pages.full + (u64)full_id * full_page_bytes(D));
        const u8* coded = (const u8*)(pages.coded + (u64)coded_id * shape.bytes());
        // Four threads take a token's score.
        const u32 token = threadIdx.x / 4, part = threadIdx.x % 4;
        const u32 at = block * 64 + token;
        float score = 0.0f;
        if (token < end) {
            if (at >= p.step.sink && at < boundary && !pages.keeps_history()) {
                score = NEGATIVE_INFINITY;
            } else if (at >= p.step.sink && at < boundary) {
                u32 pair = *(const u32*)(coded + param_byte(shape, KEY, token));
                float scale = f16_to_f32(pair & 0xffff), minimum = f16_to_f32(pair >> 16);
                for (u32 c = part; c < D; c += 4)
                    score = __fmaf_rn(query[c], scale * (float)load_code(coded, shape, KEY, token, c) + minimum, score);
            } else {
                for (u32 c = part; c < D; c += 4)
                    score = __fmaf_rn(query[c], bf16_to_f32(full[full_element(KEY, D, token, c)]), score);
            }
        }
        score += __shfl_xor_sync(0xffffffffu, score, 1);
        score += __shfl_xor_sync(0xffffffffu, score, 2);
        if (part == 0) weights[token] = token < end ? score : NEGATIVE_INFINITY;
        __syncthreads();
        float before = largest;
        for (u32 t = 0; t < end; t++) largest = fmaxf(largest, weights[t]);
        __syncthreads();
        // Nothing to read yet: any finite reference will do.
        const float reference = largest == NEGATIVE_INFINITY ? 0.0f : largest;
        if (threadIdx.x < 64) weights[threadIdx.x] = exp2f((weights[threadIdx.x] - reference) * LOG2E);
        if (threadIdx.x == 0) rescale = exp2f((before - reference) * LOG2E);
        __syncthreads();
        total *= rescale;
        sum *= rescale;
        for (u32 t = 0; t < end; t++) total += weights[t];
        if (threadIdx.x < D) {
            const u32 c = threadIdx.x;
            for (u32 t = 0; t < end; t++) {
                float value;
                if (block * 64 + t >= p.step.sink && block * 64 + t < boundary) {
                    if (!pages.keeps_history()) continue;
                    u32 pair = *(const u32*)(coded + param_byte(shape, VALUE, t));
                    value = f16_to_f32(pair & 0xffff) * (float)load_code(coded, shape, VALUE, t, c) +
                            f16_to_f32(pair >> 16);
                } else {
                    value = bf16_to_f32(full[full_element(VALUE, D, t, c)]);
                }
                sum = __fmaf_rn(weights[t], value, sum);
            }
        }
        __syncthreads();
    }
    if (threadIdx.x < D) p.out[((u64)row * p.query_heads + head) * D + threadIdx.x] = sum / total;
}
