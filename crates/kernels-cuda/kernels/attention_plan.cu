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

// Bytes a worker reads in the time that going on to a second item costs it.
constexpr u32 SWITCH_COST = 100 << 10;

// Bytes of a unit: a BF16 tile, a coded page or half of one.
DEVICE u32 near_cost(const PlanArgs& a) { return 4 * TILE_TOKENS * a.head_dim; }
DEVICE u32 coded_cost(const PlanArgs& a, const HeadPages& h) {
    // A head without history has no such units; any cost will do.
    if (!h.keeps_history()) return near_cost(a);
    return (8 * a.head_dim * (h.key_bits + h.value_bits) + 8 * PAGE_TOKENS) / pieces_of(h);
}

DEVICE u64 item_cost(const PlanArgs& a, const ContextShape& c, const HeadPages& h) {
    return (u64)c.near_units * near_cost(a) + (u64)c.pages * pieces_of(h) * coded_cost(a, h);
}

// How many of the first `n` workers begin at or before a place.
DEVICE u32 begun(const DecodePlan& plan, u32 n, const Place& at) {
    u32 low = 0, high = n;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (at.before(plan.worker(middle)->begin)) high = middle;
        else low = middle + 1;
    }
    return low;
}

// The first unit of an item that has at least `bytes` before it.
DEVICE u32 unit_of(const PlanArgs& a, const ContextShape& c, u32 head, u64 bytes) {
    u64 near = (u64)c.near_units * near_cost(a);
    u32 coded = coded_cost(a, a.heads[head]);
    return bytes <= near ? (u32)((bytes + near_cost(a) - 1) / near_cost(a)) : c.near_units + (u32)((bytes - near + coded - 1) / coded);
}

// The place where `target` bytes lie before it, rounded up to a whole unit.
DEVICE Place place_of(const PlanArgs& a, u64 target) {
    const u32 n = a.step.sequence_count;
    u32 low = 0, high = n;  // last sequence that begins at or before the target
    while (low + 1 < high) {
        u32 middle = (low + high) / 2;
        if (a.cost_before[middle] <= target) low = middle;
        else high = middle;
    }
    u64 rest = target - a.cost_before[low];
    ContextShape c = context_of(a.step, a.step.sequences[low]);
    u32 h = 0;
    while (h + 1 < a.kv_heads && rest >= item_cost(a, c, a.heads[h])) rest -= item_cost(a, c, a.heads[h++]);
    u32 unit = unit_of(a, c, h, rest);
    if (unit < units_of(c, a.heads[h])) return {low, h, unit};
    return h + 1 < a.kv_heads ? Place{low, h + 1, 0} : Place{low + 1, 0, 0};
}

// Workers of an item where each item has its own: its share of `workers`, at least one.
DEVICE u32 own_workers(u64 cost, u64 total, u32 workers, u64 least) {
    u64 share = cost * workers / total, most = cost / least;
    share = share < most ? share : most;
    return cost == 0 ? 0 : share < 1 ? 1 : (u32)share;
}

extern "C" __global__ void __launch_bounds__(256) decode_plan(PlanArgs a) {
    __shared__ u64 warp_total[8];
    __shared__ u32 own[256];         // workers of an item, where each has its own
    __shared__ u64 slowest_shared;  // most bytes that such a worker reads
    wait_for_previous_kernel();
    const u32 n = a.step.sequence_count, items = n * a.kv_heads, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    if (tid == 0) a.cost_before[0] = 0, slowest_shared = 0;
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
    // A worker takes at least two of the largest units, so that no two begin at the same place.
    const u64 least = a.least_cost > 2 * largest ? a.least_cost : 2 * largest, wanted = total / least;
    u32 active = wanted < 1 ? 1 : wanted < a.plan.workers ? (u32)wanted : a.plan.workers;
    const Place end = {n, 0, 0};
    // Where items are few, give each its own workers: none then goes from one item to the next.
    const bool few = total > 0 && items <= a.plan.workers && items <= 256;
    bool own_workers_each = false;
    if (few) {
        const u32 sequence = tid / a.kv_heads, head = tid % a.kv_heads;
        u64 cost = 0;
        ContextShape c = {};
        own[tid] = 0;
        if (tid < items) {
            c = context_of(a.step, a.step.sequences[sequence]);
            cost = item_cost(a, c, a.heads[head]);
            own[tid] = own_workers(cost, total, a.plan.workers, least);
            if (cost > 0) atomicMax(&slowest_shared, cost / own[tid]);
        }
        __syncthreads();
        u32 first = 0, used = 0;
        for (u32 i = 0; i < items; i++) {
            if (i == tid) first = used;
            used += own[i];
        }
        own_workers_each = used <= a.plan.workers && slowest_shared <= total / active + SWITCH_COST;
        if (own_workers_each) {
            active = used;
            if (tid < items)
                for (u32 i = 0; i < own[tid]; i++)
                    a.plan.worker(first + i)->begin = {sequence, head, unit_of(a, c, head, cost * i / own[tid])};
        }
    }
    for (u32 w = tid; w < a.plan.workers; w += 256)
        if (w >= active || total == 0) a.plan.worker(w)->begin = end;
        else if (!own_workers_each) a.plan.worker(w)->begin = place_of(a, total * w / active);
    __syncthreads();
    for (u32 w = tid; w < a.plan.workers; w += 256) {
        WorkerPlan& plan = *a.plan.worker(w);
        plan.end = w + 1 < a.plan.workers ? a.plan.worker(w + 1)->begin : end;
        if (plan.begin.sequence < n) plan.first = a.step.sequences[plan.begin.sequence];
    }
    for (u32 item = tid; item < items; item += 256) {
        u32 sequence = item / a.kv_heads, head = item % a.kv_heads;
        u32 units = units_of(context_of(a.step, a.step.sequences[sequence]), a.heads[head]);
        if (units == 0) {
            *a.plan.item(item) = {0, 0, 0, 0};
            continue;
        }
        u32 first = begun(a.plan, active, {sequence, head, 0}) - 1;
        u32 last = begun(a.plan, active, {sequence, head, units - 1}) - 1;
        const Place begin = a.plan.worker(first)->begin;
        *a.plan.item(item) = {first, last - first + 1, begin.sequence != sequence || begin.head != head, 0};
    }
}

// Page ids of every worker's first units: a block for each worker, a thread for each unit.
extern "C" __global__ void __launch_bounds__(FIRST_PAGES) decode_plan_pages(PlanArgs a) {
    wait_for_previous_kernel();
    WorkerPlan& plan = *a.plan.worker(blockIdx.x);
    const Place begin = plan.begin;
    if (begin.sequence >= a.step.sequence_count) return;
    const SequenceInfo info = plan.first;
    const ContextShape c = context_of(a.step, info);
    const HeadPages head = a.heads[begin.head];
    const u32 unit = begin.unit + threadIdx.x;
    plan.pages[threadIdx.x] =
        unit < units_of(c, head) ? page_of(c, head, a.step.full + info.table, a.step.coded + info.table, unit) : NO_PAGE;
}
