// Expands FP8 weights to BF16, for matrix products of many rows.
#include "fp8.cuh"

struct ExpandParams {
    const u32* codes;     // arranged words [outputs][inputs / 4]
    const float* scales;  // [outputs / 128, rounded up][columns]
    u16* out;             // BF16 [count][inputs]
    u32 first;            // first output of the panel
    u32 count;            // outputs of the panel
    u32 inputs;           // a multiple of 8
    u32 columns;
};
CHECK_LAYOUT(ExpandParams);

// Both values of a pair times their scale, rounded like the CPU's.
DEVICE u32 scaled_pair(u32 pair, float scale) {
    return pack_bf16(low_bf16(pair) * FP8_TOO_SMALL_BY * scale, high_bf16(pair) * FP8_TOO_SMALL_BY * scale);
}

extern "C" __global__ void expand_fp8(ExpandParams p) {
    allow_next_kernel();
    // The product of the previous panel may still read `out`.
    wait_for_previous_kernel();
    const u32 eights = p.inputs / 8;  // groups of 8 codes; a group lies within one 128 x 128 block
    for (u32 row = blockIdx.x; row < p.count; row += gridDim.x) {
        const u32 output = p.first + row;
        const uint2* codes = (const uint2*)p.codes + (u64)output * eights;
        const float* scales = p.scales + output / FP8_BLOCK * p.columns;
        uint4* to = (uint4*)p.out + (u64)row * eights;
        for (u32 column = threadIdx.x; column < eights; column += blockDim.x) {
            const uint2 v = codes[column];
            const float scale = scales[column * 8 / FP8_BLOCK];
            to[column] = make_uint4(scaled_pair(fp8_first_pair(v.x), scale), scaled_pair(fp8_second_pair(v.x), scale),
                                    scaled_pair(fp8_first_pair(v.y), scale), scaled_pair(fp8_second_pair(v.y), scale));
        }
    }
}
