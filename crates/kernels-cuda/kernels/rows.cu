// Operations on rows of activations: embedding, RMSNorm, gates, selection of rows, rounding, bias.
// Rows are f32. Steps with many rows also have a BF16 copy for the matrix products of cuBLASLt.
#include "gate.cuh"

struct EmbedParams {
    const u16* table;  // BF16 [vocabulary][width]
    const u32* tokens;  // null: the tokens are in `few`
    float* out;
    u32 width;
    float scale;  // factor of the embeddings
    u32 few[16];
};
CHECK_LAYOUT(EmbedParams);

// One block per row.
extern "C" __global__ void embed(const __grid_constant__ EmbedParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const u32 token = p.tokens ? p.tokens[blockIdx.x] : p.few[blockIdx.x];
    const u16* row = p.table + (u64)token * p.width;
    float* out = p.out + (u64)blockIdx.x * p.width;
    // Eight elements per load if the width allows it.
    const u32 eights = p.width % 8 == 0 ? p.width / 8 : 0;
    for (u32 i = threadIdx.x; i < eights; i += blockDim.x) {
        uint4 v = ((const uint4*)row)[i];
        const float f = p.scale;
        ((float4*)out)[2 * i] = make_float4(f * low_bf16(v.x), f * high_bf16(v.x), f * low_bf16(v.y), f * high_bf16(v.y));
        ((float4*)out)[2 * i + 1] = make_float4(f * low_bf16(v.z), f * high_bf16(v.z), f * low_bf16(v.w), f * high_bf16(v.w));
    }
    for (u32 i = 8 * eights + threadIdx.x; i < p.width; i += blockDim.x) out[i] = p.scale * bf16_to_f32(row[i]);
}

struct RmsNormParams {
    const float* x;
    const float* weight;
    float* out;    // f32 result, or null
    u16* rounded;  // BF16 result, or null
    u32 width;
    float eps;
};
CHECK_LAYOUT(RmsNormParams);

DEVICE float block_sum(float x) {
    __shared__ float parts[32];
    x = warp_sum(x);
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = x;
    __syncthreads();
    u32 warps = blockDim.x >> 5;
    x = threadIdx.x < warps ? parts[threadIdx.x] : 0.0f;
    if (threadIdx.x < 32) x = warp_sum(x);
    if (threadIdx.x == 0) parts[0] = x;
    __syncthreads();
    return parts[0];
}

constexpr int NORM_QUADS = 4;  // float4 per thread: rows of up to 16 * blockDim.x elements

// One block per row. The width is a multiple of 4 and at most 16 * blockDim.x.
extern "C" __global__ void rms_norm(RmsNormParams p) {
    const u32 quads = p.width / 4;
    const float4* weights = (const float4*)p.weight;
    float4 x[NORM_QUADS], w[NORM_QUADS];
    allow_next_kernel();
#pragma unroll
    for (int k = 0; k < NORM_QUADS; k++) {
        u32 i = threadIdx.x + k * blockDim.x;
        if (i < quads) w[k] = weights[i];
    }
    // The weights are constant, so they were loaded before the wait.
    wait_for_previous_kernel();
    const float4* row = (const float4*)(p.x + (u64)blockIdx.x * p.width);
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < NORM_QUADS; k++) {
        u32 i = threadIdx.x + k * blockDim.x;
        x[k] = i < quads ? row[i] : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < NORM_QUADS; k++) {
        squares = __fmaf_rn(x[k].x, x[k].x, __fmaf_rn(x[k].y, x[k].y, squares));
        squares = __fmaf_rn(x[k].z, x[k].z, __fmaf_rn(x[k].w, x[k].w, squares));
    }
    const float scale = 1.0f / sqrtf(block_sum(squares) / (float)p.width + p.eps);
    float4* out = p.out ? (float4*)(p.out + (u64)blockIdx.x * p.width) : 0;
    uint2* rounded = p.rounded ? (uint2*)(p.rounded + (u64)blockIdx.x * p.width) : 0;
#pragma unroll
    for (int k = 0; k < NORM_QUADS; k++) {
        u32 i = threadIdx.x + k * blockDim.x;
        if (i >= quads) break;
        float4 y = make_float4(x[k].x * scale * w[k].x, x[k].y * scale * w[k].y, x[k].z * scale * w[k].z,
                               x[k].w * scale * w[k].w);
        if (out) out[i] = y;
        if (rounded) rounded[i] = make_uint2(pack_bf16(y.x, y.y), pack_bf16(y.z, y.w));
    }
}

struct AddNormParams {
    const float* x;
    const float* weight;
    float* out;
    u32 width;
    float eps;
};
CHECK_LAYOUT(AddNormParams);

// out += norm(x). One block per row of any width.
extern "C" __global__ void add_rms_norm(AddNormParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const float* x = p.x + (u64)blockIdx.x * p.width;
    float* out = p.out + (u64)blockIdx.x * p.width;
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < p.width; i += blockDim.x) squares = __fmaf_rn(x[i], x[i], squares);
    const float scale = 1.0f / sqrtf(block_sum(squares) / (float)p.width + p.eps);
    for (u32 i = threadIdx.x; i < p.width; i += blockDim.x) out[i] += x[i] * scale * p.weight[i];
}

struct SwigluParams {
    const float* gate_up;         // rows of [gate | up], or null
    const u16* rounded_gate_up;   // the same in BF16, used if `gate_up` is null
    float* out;                   // f32 result, or null
    u16* rounded;                 // BF16 result, used if `out` is null
    u32 width;                    // of gate and of up
    u32 rows;
};
CHECK_LAYOUT(SwigluParams);

DEVICE float gated(float gate, float up) { return gate / (1.0f + exp2f(-gate * LOG2E)) * up; }

// Blocks take whole rows. The width is a multiple of 4.
template <class Gate>
DEVICE void gate_rows(const SwigluParams& p, Gate of) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const u32 quads = p.width / 4;
    for (u32 row = blockIdx.x; row < p.rows; row += gridDim.x)
        for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < quads; i += gridDim.y * blockDim.x) {
            float4 gate, up;
            if (p.gate_up) {
                const float4* from = (const float4*)(p.gate_up + (u64)row * 2 * p.width);
                gate = from[i], up = from[quads + i];
            } else {
                const uint2* from = (const uint2*)(p.rounded_gate_up + (u64)row * 2 * p.width);
                const uint2 g = from[i], u = from[quads + i];
                gate = make_float4(low_bf16(g.x), high_bf16(g.x), low_bf16(g.y), high_bf16(g.y));
                up = make_float4(low_bf16(u.x), high_bf16(u.x), low_bf16(u.y), high_bf16(u.y));
            }
            const float4 y = make_float4(of(gate.x, up.x), of(gate.y, up.y), of(gate.z, up.z), of(gate.w, up.w));
            if (p.out) ((float4*)(p.out + (u64)row * p.width))[i] = y;
            else ((uint2*)(p.rounded + (u64)row * p.width))[i] = make_uint2(pack_bf16(y.x, y.y), pack_bf16(y.z, y.w));
        }
}

extern "C" __global__ void swiglu(SwigluParams p) {
    gate_rows(p, [](float gate, float up) { return gated(gate, up); });
}
extern "C" __global__ void gelu_tanh_rows(SwigluParams p) {
    gate_rows(p, [](float gate, float up) { return gelu_tanh_gate(gate, up); });
}
extern "C" __global__ void clamped_rows(SwigluParams p) {
    gate_rows(p, [](float gate, float up) { return clamped_gate(gate, up); });
}

struct SelectParams {
    const float* x;      // f32 rows, or null
    const u16* rounded;  // the same in BF16, used if `x` is null
    const u32* rows;
    float* out;
    u32 width;
};
CHECK_LAYOUT(SelectParams);

// One block per selected row.
extern "C" __global__ void select_rows(SelectParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const u64 from = (u64)p.rows[blockIdx.x] * p.width;
    float* out = p.out + (u64)blockIdx.x * p.width;
    if (!p.x) {
        for (u32 i = threadIdx.x; i < p.width; i += blockDim.x) out[i] = bf16_to_f32(p.rounded[from + i]);
        return;
    }
    const float* x = p.x + from;
    const u32 quads = p.width % 4 == 0 ? p.width / 4 : 0;
    for (u32 i = threadIdx.x; i < quads; i += blockDim.x) ((float4*)out)[i] = ((const float4*)x)[i];
    for (u32 i = 4 * quads + threadIdx.x; i < p.width; i += blockDim.x) out[i] = x[i];
}

struct RoundParams {
    const float* x;
    u16* high;
    u16* low;  // BF16 of the rounding error, or null
    u64 count;
};
CHECK_LAYOUT(RoundParams);

extern "C" __global__ void round_to_bf16(RoundParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += (u64)gridDim.x * blockDim.x) {
        float x = p.x[i];
        u16 high = f32_to_bf16(x);
        p.high[i] = high;
        if (p.low) p.low[i] = f32_to_bf16(x - bf16_to_f32(high));
    }
}

struct BiasParams {
    const float* bias;
    float* out;
    u32 width;
    u32 rows;
};
CHECK_LAYOUT(BiasParams);

extern "C" __global__ void add_bias(BiasParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    u64 total = (u64)p.rows * p.width;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (u64)gridDim.x * blockDim.x)
        p.out[i] += p.bias[i % p.width];
}
