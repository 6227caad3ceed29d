// Plans a step's decode attention: one block, once for all layers whose heads have the same widths.
#include "decode_plan.cuh"

struct PlanArgs {
    StepTables step;
    const HeadPages* heads;  // of one layer
    u64* cost_before;        // [sequences + 1], scratch
    DecodePlan plan;
    u32 kv_heads;
    u32 head_dim;
    u32 least_cost;  // bytes below which a worker is not worth its start
};

// Bytes of a unit: a BF16 tile, a coded page or half of one.
DEVICE u32 near_cost(const PlanArgs& a) { return 4 * TILE_TOKENS * a.head_dim; }
DEVICE u32 coded_cost(const PlanArgs& a, const HeadPages& h) {
    return (8 * a.head_dim * (h.key_bits + h.value_bits) + 8 * PAGE_TOKENS) / pieces_of(h);
}

DEVICE u64 item_cost(const PlanArgs& a, const ContextShape& c, const HeadPages& h) {
    return (u64)c.near_units * near_cost(a) + (u64)c.pages * pieces_of(h) * coded_cost(a, h);
}

// Is (item, unit) a at or before b?
DEVICE bool not_after(uint2 a, u32 item, u32 unit) { return a.x < item || (a.x == item && a.y <= unit); }

// How many of the first `n` starts are at or before (item, unit).
DEVICE u32 starts_until(const uint2* starts, u32 n, u32 item, u32 unit) {
    u32 low = 0, high = n;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (not_after(starts[middle], item, unit)) low = middle + 1;
        else high = middle;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(256) decode_plan(PlanArgs a) {
    __shared__ u64 warp_total[8];
    __shared__ u32 active_shared;
    const u32 n = a.step.sequence_count, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    u64 before = 0;
    u32 largest = near_cost(a);
    for (u32 h = 0; h < a.kv_heads; h++) {
        u32 cost = coded_cost(a, a.heads[h]);
        largest = cost > largest ? cost : largest;
    }
    // Costs of the sequences, summed from the first on.
    for (u32 first = 0; first < n; first += 256) {
        u64 cost = 0;
        if (first + tid < n) {
            ContextShape c = context_of(a.step, a.step.sequences[first + tid]);
            for (u32 h = 0; h < a.kv_heads; h++) cost += item_cost(a, c, a.heads[h]);
        }
        for (int step = 1; step < 32; step *= 2) {
            u64 other = __shfl_up_sync(0xffffffffu, cost, step);
            if (lane >= step) cost += other;
        }
        if (lane == 31) warp_total[warp] = cost;
        __syncthreads();
        u64 offset = before;
        for (u32 w = 0; w < warp; w++) offset += warp_total[w];
        if (first + tid < n) a.cost_before[first + tid + 1] = offset + cost;
        for (u32 w = 0; w < 8; w++) before += warp_total[w];
        __syncthreads();
    }
    const u64 total = before;
    if (tid == 0) {
        a.cost_before[0] = 0;
        // A worker takes at least two of the largest units, so that no two begin at the same place.
        u64 least = a.least_cost > 2 * largest ? a.least_cost : 2 * largest;
        u64 wanted = total / least;
        u32 active = wanted < 1 ? 1 : wanted < a.plan.workers ? (u32)wanted : a.plan.workers;
        active_shared = active;
        a.plan.words[0] = active;
        a.plan.starts()[active] = make_uint2(n * a.kv_heads, 0);
    }
    __syncthreads();
    const u32 active = active_shared;
    for (u32 w = tid; w < active; w += 256) {
        u64 target = total * w / active;
        u32 low = 0, high = n;  // last sequence that begins at or before the target
        while (low + 1 < high) {
            u32 middle = (low + high) / 2;
            if (a.cost_before[middle] <= target) low = middle;
            else high = middle;
        }
        u32 item = low * a.kv_heads, unit = 0;
        if (n > 0 && total > 0) {
            u64 rest = target - a.cost_before[low];
            ContextShape c = context_of(a.step, a.step.sequences[low]);
            u32 h = 0;
            while (h + 1 < a.kv_heads && rest >= item_cost(a, c, a.heads[h])) rest -= item_cost(a, c, a.heads[h++]);
            u64 near = (u64)c.near_units * near_cost(a);
            unit = rest <= near ? (u32)((rest + near_cost(a) - 1) / near_cost(a))
                                : c.near_units + (u32)((rest - near + coded_cost(a, a.heads[h]) - 1) / coded_cost(a, a.heads[h]));
            item += h;
            if (unit >= units_of(c, a.heads[h])) item++, unit = 0;
        }
        a.plan.starts()[w] = make_uint2(item, unit);
    }
    __syncthreads();
    for (u32 item = tid; item < n * a.kv_heads; item += 256) {
        ContextShape c = context_of(a.step, a.step.sequences[item / a.kv_heads]);
        u32 units = units_of(c, a.heads[item % a.kv_heads]);
        u32 first = starts_until(a.plan.starts(), active, item, 0) - 1;
        u32 last = units == 0 ? first : starts_until(a.plan.starts(), active, item, units - 1) - 1;
        a.plan.items()[item] = make_uint2(first, last - first + 1);
    }
}
