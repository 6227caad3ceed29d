// The functions between the two products of a feed-forward part (oscar_backend::Gate).
#pragma once
#include "common.cuh"

// Numbers of the gates, as the host has them.
enum GateKind { SILU = 0, GELU_TANH = 1, CLAMPED = 2 };

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exp2f(-x * LOG2E)); }

// gelu(gate) * up, with the approximation by tanh. 0.5 * (1 + tanh(x)) is the sigmoid of 2x, which loses no
// bits where tanh is near -1.
DEVICE float gelu_tanh_gate(float gate, float up) {
    const float inner = 0.7978845608028654f * __fmaf_rn(0.044715f * gate * gate, gate, gate);
    return gate * sigmoid(2.0f * inner) * up;
}

// (up + 1) * gate * sigmoid(1.702 * gate), with gate at most 7 and up between -7 and 7. NaN stays NaN.
DEVICE float clamped_gate(float gate, float up) {
    gate = gate > 7.0f ? 7.0f : gate;
    up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    return (up + 1.0f) * gate * sigmoid(1.702f * gate);
}

DEVICE float silu_gate(float gate, float up) { return gate * sigmoid(gate) * up; }

DEVICE float gate_of(u32 kind, float gate, float up) {
    switch (kind) {
        case SILU: return silu_gate(gate, up);
        case GELU_TANH: return gelu_tanh_gate(gate, up);
        default: return clamped_gate(gate, up);
    }
}
