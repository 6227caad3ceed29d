// The choice of a row's experts from the logits of its router.
#pragma once
#include "experts.cuh"

// The expert of a lane below `per_row`: its weight, and its place among the chosen in ascending id.
struct Choice {
    u32 expert, place;
    float weight;
};

// Orders scores; NaN comes last, and 0 is left for what is no expert.
DEVICE u32 order_key(float score) {
    if (score != score) return 1;
    const u32 bits = __float_as_uint(score);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Called by one warp. Of equal scores the lower id is chosen.
DEVICE Choice choose(const ExpertsParams& p, u32 row, u32 lane) {
    const u32 ALL = 0xffffffffu;
    const float* logits = p.logits + (u64)row * p.experts;
    constexpr u32 EACH = MOST_EXPERTS / 32;
    float score[EACH];
    u32 key[EACH];
    float largest = NEGATIVE_INFINITY, sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        const u32 e = lane + 32 * i;
        score[i] = e < p.experts ? __ldcg(logits + e) : NEGATIVE_INFINITY;
#ifdef GENERAL
        if (p.router_bias && e < p.experts) score[i] += p.router_bias[e];
#endif
        largest = fmaxf(largest, score[i]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, step));
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        const u32 e = lane + 32 * i;
        score[i] = p.sigmoid ? 1.0f / (1.0f + __expf(-score[i])) : __expf(score[i] - largest);
        sum += e < p.experts ? score[i] : 0.0f;
    }
    sum = warp_sum(sum);
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        const u32 e = lane + 32 * i;
        if (!p.sigmoid) score[i] /= sum;
        key[i] = e < p.experts ? order_key(score[i] + (p.correction ? p.correction[e] : 0.0f)) : 0;
    }
    Choice mine = {ALL, 0, 0.0f};
    for (u32 n = 0; n < p.per_row; n++) {
        u32 best = 0, expert = ALL;
#pragma unroll
        for (u32 i = 0; i < EACH; i++) best = max(best, key[i]);
        best = __reduce_max_sync(ALL, best);
#pragma unroll
        for (u32 i = 0; i < EACH; i++)
            if (key[i] == best) expert = min(expert, lane + 32 * i);
        expert = __reduce_min_sync(ALL, expert);
        float of_best = 0.0f;
#pragma unroll
        for (u32 i = 0; i < EACH; i++)
            if (lane + 32 * i == expert) of_best = score[i], key[i] = 0;
        of_best = __shfl_sync(ALL, of_best, expert & 31);
        if (lane == n) mine.expert = expert, mine.weight = of_best;
    }
    for (u32 n = 0; n < p.per_row; n++) mine.place += __shfl_sync(ALL, mine.expert, n) < mine.expert;
    // The sum takes experts in ascending id.
    float total = 0.0f;
    for (u32 n = 0; n < p.per_row; n++) {
        const u32 holder = __ffs(__ballot_sync(ALL, lane < p.per_row && mine.place == n)) - 1;
        total += __shfl_sync(ALL, mine.weight, holder);
    }
    mine.weight *= p.normalize ? p.factor / fmaxf(total, 1.17549435e-38f) : p.factor;
    return mine;
}

DEVICE void store_choice(const ExpertsParams& p, u32 row, u32 lane) {
    const Choice mine = choose(p, row, lane);
    const u32 at = row * p.per_row + mine.place;
    if (lane < p.per_row) p.chosen[at] = mine.expert, p.weights[at] = mine.weight;
}
