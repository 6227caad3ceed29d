// Operands of block-scaled FP8 products (cuBLASLt): activations quantized in groups of 128, and
// weights in the plain order of their codes.
#include "fp8.cuh"

constexpr float LARGEST_E4M3 = 448.0f;

struct QuantizeRowsParams {
    const u16* x;   // BF16 [rows][inputs]
    u32* codes;     // E4M3, four in a word, likewise
    float* scales;  // [group][stride]: the rows of a group of 128 inputs lie together
    u32 rows;
    u32 stride;
    u32 inputs;     // a multiple of 4
};
CHECK_LAYOUT(QuantizeRowsParams);

// One warp per row and group: a lane has four neighbouring inputs.
extern "C" __global__ void quantize_rows(QuantizeRowsParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const u32 lane = threadIdx.x & 31, warps = blockDim.x >> 5, row = blockIdx.x;
    const u32 groups = (p.inputs + FP8_BLOCK - 1) / FP8_BLOCK, quads = p.inputs / 4;
    for (u32 group = threadIdx.x >> 5; group < groups; group += warps) {
        const u32 quad = group * 32 + lane;
        const bool there = quad < quads;
        const uint2 v = there ? ((const uint2*)p.x)[(u64)row * quads + quad] : make_uint2(0, 0);
        const float a = low_bf16(v.x), b = high_bf16(v.x), c = low_bf16(v.y), d = high_bf16(v.y);
        float largest = fmaxf(fmaxf(fabsf(a), fabsf(b)), fmaxf(fabsf(c), fabsf(d)));
#pragma unroll
        for (int other = 16; other > 0; other /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, other));
        // A group of zeros has codes of zero under any scale.
        const float scale = largest > 0.0f ? __fdiv_rn(largest, LARGEST_E4M3) : 1.0f;
        const u32 first = pack_e4m3(__fdiv_rn(a, scale), __fdiv_rn(b, scale));
        const u32 second = pack_e4m3(__fdiv_rn(c, scale), __fdiv_rn(d, scale));
        if (there) p.codes[(u64)row * quads + quad] = first | second << 16;
        if (lane == 0) p.scales[(u64)group * p.stride + row] = scale;
    }
}

struct PlainCodesParams {
    const u32* codes;         // arranged words [outputs][inputs / 4]
    const float* scales;      // [outputs / 128, rounded up][columns]
    u32* out;                 // plain words [count][inputs / 4]
    float* out_scales;        // [count / 128, rounded up][columns, rounded up to 4]
    u32 first;                // first output of the panel, a multiple of 128
    u32 count;                // outputs of the panel
    u32 inputs;
    u32 columns;
};
CHECK_LAYOUT(PlainCodesParams);

// The four codes of an arranged word (fp8.cuh) in their order.
DEVICE u32 plain_word(u32 word) {
    const u32 swapped = __funnelshift_l(word, word, 16);
    const u32 first = (word >> 8 & 0x00800080u) | (word >> 4 & 0x007f007fu);
    const u32 second = (word << 4 & 0x00800080u) | (swapped >> 8 & 0x00780078u) | (word & 0x00070007u);
    return __byte_perm(first, second, 0x6420);
}

extern "C" __global__ void plain_codes(PlainCodesParams p) {
    allow_next_kernel();
    // The product of the previous panel may still read `out`.
    wait_for_previous_kernel();
    const u64 words = (u64)p.count * p.inputs / 4, first = (u64)p.first * p.inputs / 4;
    const u64 threads = (u64)gridDim.x * blockDim.x, thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const uint4* from = (const uint4*)(p.codes + first);
    for (u64 i = thread; i < words / 4; i += threads) {
        const uint4 v = from[i];
        ((uint4*)p.out)[i] = make_uint4(plain_word(v.x), plain_word(v.y), plain_word(v.z), plain_word(v.w));
    }
    const u32 stride = (p.columns + 3) / 4 * 4, blocks = (p.count + FP8_BLOCK - 1) / FP8_BLOCK;
    for (u64 i = thread; i < (u64)blocks * stride; i += threads) {
        const u32 block = (u32)(i / stride), column = (u32)(i % stride);
        p.out_scales[i] = column < p.columns ? p.scales[(p.first / FP8_BLOCK + block) * p.columns + column] : 0.0f;
    }
}
