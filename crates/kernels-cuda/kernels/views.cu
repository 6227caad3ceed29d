// Rows of quantized history: copied bit for bit into the pages of a view, or dequantized.
//
// A source names a row as page id * 64 + token. One thread block serves one page of a view, or 64
// rows of a head.
#include "common.cuh"

constexpr u32 THREADS = 256;

// A page of a view: rows first .. first + rows of the sources, in order.
struct GatherJob {
    u32 head;  // layer * kv_heads + head
    u32 page;
    u32 first, rows;
};
CHECK_LAYOUT(GatherJob);

struct GatherParams {
    const HeadPages* heads;
    const GatherJob* jobs;
    const u32* sources;
    u32 head_dim;
};
CHECK_LAYOUT(GatherParams);

// Codes of the same word come from different rows, so the page is put together in shared memory. What
// lies behind the last row becomes zero: kernels may read it, though nothing counts it.
extern "C" __global__ void __launch_bounds__(THREADS) gather_rows(GatherParams p) {
    extern __shared__ __align__(16) u8 page[];
    wait_for_previous_kernel();
    const GatherJob job = p.jobs[blockIdx.x];
    const HeadPages head = p.heads[job.head];
    if (!head.keeps_history()) return;
    const CodedPage shape = {head.key_bits, head.value_bits, p.head_dim};
    for (u32 i = threadIdx.x; i < shape.bytes() / 4; i += THREADS) ((u32*)page)[i] = 0;
    __syncthreads();
    auto source = [&](u32 row, u32& token) {
        const u32 at = p.sources[job.first + row];
        token = at % PAGE_TOKENS;
        return (const u8*)(head.coded + (u64)(at / PAGE_TOKENS) * shape.bytes());
    };
    for (u32 i = threadIdx.x; i < 2 * job.rows; i += THREADS) {
        u32 token;
        const u32 side = i & 1, row = i >> 1;
        const u8* from = source(row, token);
        *(u32*)(page + param_byte(shape, side, row)) = *(const u32*)(from + param_byte(shape, side, token));
    }
    for (u32 i = threadIdx.x; i < 2 * job.rows * p.head_dim; i += THREADS) {
        u32 token;
        const u32 channel = i % p.head_dim, side = i / p.head_dim & 1, row = i / (2 * p.head_dim);
        const u8* from = source(row, token);
        const u32 code = load_code(from, shape, side, token, channel);
        CodeField f[2];
        const int n = code_fields(side, shape.side_bits(side), p.head_dim, row, channel, f);
        for (int k = 0; k < n; k++) {
            const u32 bits = code >> f[k].code_shift & ((1u << f[k].width) - 1);
            atomicOr((u32*)(page + shape.codes(side) + f[k].byte), bits << f[k].bit);
        }
    }
    __syncthreads();
    u32* to = (u32*)(head.coded + (u64)job.page * shape.bytes());
    for (u32 i = threadIdx.x; i < shape.bytes() / 4; i += THREADS) to[i] = ((u32*)page)[i];
}

struct HistoryParams {
    const HeadPages* heads;
    const u32* sources;
    float* keys;    // [row][head_dim]
    float* values;  // likewise
    u32 head;       // layer * kv_heads + head
    u32 rows;
    u32 head_dim;
    u32 sides;      // 1: keys alone, 2: values too
};
CHECK_LAYOUT(HistoryParams);

// code * scale + minimum, rounded twice as on the CPU.
extern "C" __global__ void __launch_bounds__(THREADS) read_history(HistoryParams p) {
    wait_for_previous_kernel();
    const HeadPages head = p.heads[p.head];
    const CodedPage shape = {head.key_bits, head.value_bits, p.head_dim};
    const u32 first = blockIdx.x * PAGE_TOKENS, rows = min((u32)PAGE_TOKENS, p.rows - first);
    for (u32 i = threadIdx.x; i < p.sides * rows * p.head_dim; i += THREADS) {
        const u32 channel = i % p.head_dim, side = i / p.head_dim % p.sides, row = first + i / (p.sides * p.head_dim);
        const u32 at = p.sources[row], token = at % PAGE_TOKENS;
        const u8* page = (const u8*)(head.coded + (u64)(at / PAGE_TOKENS) * shape.bytes());
        const u32 pair = *(const u32*)(page + param_byte(shape, side, token));
        const float code = (float)load_code(page, shape, side, token, channel);
        const float value = __fadd_rn(__fmul_rn(f16_to_f32(pair & 0xffff), code), f16_to_f32(pair >> 16));
        (side == KEY ? p.keys : p.values)[(u64)row * p.head_dim + channel] = value;
    }
}
