// What the kernels of a mixture of experts share: experts_route.cuh, experts.cu, experts_grouped.cu.
//
// Compiled with FP8 for codes, and with GENERAL=1 for layers with biases or another gate than silu.
#pragma once
#include "gate.cuh"

struct ExpertsParams {
    float* x;                  // [rows][hidden]: the residual
    const float* norm;         // weights of the norm before the layer
    float* normed;             // [rows][hidden]; BF16 if `rounded`
    const float* router;       // [experts][hidden]
    const float* correction;   // [experts], added to scores for the choice, or null
    float* logits;             // [rows][experts]
    u32* finished;             // [rows]: blocks that have written logits of 16 rows; zero between launches
    u32* chosen;               // [rows][chosen]: experts in ascending id
    float* weights;            // [rows][chosen]
    u32* slots;                // [slot]: row * per_row + index, sorted by expert
    u32* slot_of;              // [rows][chosen]: the inverse
    uint4* tiles;              // (expert, first slot, slots, 0)
    u32* tile_count;
    float* between;            // [slot][width]; BF16 if `rounded`
    float* partial;            // [slot][hidden]; BF16 if `rounded`
    const u8* gate_up;         // [experts][gate, up][width][hidden]
    const float* gate_up_scales;
    const u8* down;            // [experts][hidden][width]
    const float* down_scales;
    u32 rows;
    u32 experts;
    u32 per_row;               // experts of a row
    u32 hidden;
    u32 width;
    u32 sigmoid;               // 1: scores are sigmoids, 0: a softmax
    u32 normalize;
    float factor;
    float eps;
    u32 channels;              // FP8: 1: a scale for each output, 0: for each 128 x 128
    u32 rounded;               // 1: many rows, multiplied in BF16 (experts_grouped.cu)
    u32 tile_rows;             // most rows of a tile
    u32 stages;                // experts_grouped.cu: chunks in shared memory
    // The rest is for GENERAL.
    u32 gate;                  // GateKind
    const float* router_bias;  // [experts], or null
    const float* gate_up_bias; // [experts][gate, up][width], or null
    const float* down_bias;    // [experts][hidden], or null
};
CHECK_LAYOUT(ExpertsParams);

// What becomes of the gate and the up of an output of an expert.
DEVICE float gated_output(const ExpertsParams& p, u32 expert, u32 output, float gate, float up) {
#ifdef GENERAL
    if (p.gate_up_bias) {
        const float* bias = p.gate_up_bias + (u64)expert * 2 * p.width;
        gate += bias[output], up += bias[p.width + output];
    }
    return gate_of(p.gate, gate, up);
#else
    return __fdividef(gate, 1.0f + exp2_fast(-gate * LOG2E)) * up;
#endif
}

// An output of an expert with its bias.
DEVICE float with_down_bias(const ExpertsParams& p, u32 expert, u32 output, float sum) {
#ifdef GENERAL
    if (p.down_bias) sum += p.down_bias[(u64)expert * p.hidden + output];
#endif
    return sum;
}

constexpr u32 MOST_CHOSEN = 32, MOST_EXPERTS = 256;

// Asynchronous copies of 16 bytes, or of zeros.
DEVICE void copy_or_clear(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// The same, for weights that are read once in a step.
DEVICE void copy_or_clear_once(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(there ? 16 : 0), "l"(read_once())
                 : "memory");
}
