// Plans the decode attention of a step (decode_plan.cuh): once for all layers whose heads have the
// same widths. One thread block per worker. Every block computes the whole plan in shared memory,
// then writes its own WorkerPlan and a share of the ItemPlans.
#include "decode_plan.cuh"

struct PlanArgs {
    StepTables step;
    const HeadPages* heads;  // of one layer
    u64* cost_before;        // [sequences + 1], scratch for more than THREADS sequences
    DecodePlan plan;
    u64 plan_bytes;          // blocks with blockIdx.y = i plan the i-th layer from there
    u32 kv_heads;
    u32 head_dim;
    u32 least_cost;   // fewest bytes that are worth a worker
    u32 spare;        // workers left idle if little is read
    u32 round_cost;   // bytes of one round: one slot per warp of a worker
    u32 own_workers;  // 1: every item must have its own workers (FROM_PROJECTIONS); there are
                      // then no more items than workers
};
CHECK_LAYOUT(PlanArgs);

constexpr u32 THREADS = 256;
constexpr u32 MOST_WORKERS = 256, MOST_HEADS = 256;  // as in src/attention/decode.rs
// Bytes that a worker could read in the time it takes to switch to a second item.
constexpr u32 SWITCH_COST = 100 << 10;
// The kernel before attention may still occupy a few multiprocessors when attention starts. If
// workers read less than this on average, those that start late would determine the time, so
// `spare` workers are left idle.
constexpr u32 LITTLE = 640 << 10;
// If workers read at most this many rounds, more of them are left idle as long as no worker needs
// one more round. Their multiprocessors are then free for the next kernel.
constexpr u64 FEW_ROUNDS = 4;
constexpr u32 MOST_SPARE = 3;  // at most MOST_SPARE * spare workers are left idle

// a / b, rounded down. Exact below 2^53; bytes times workers stay below that. Much faster than a
// 64-bit integer division.
DEVICE u64 quotient(u64 a, u64 b) { return (u64)((double)a / (double)b); }

// The plan, in shared memory.
struct Plan {
    u64 page_cost[MOST_HEADS];     // bytes of a coded page, by head; 0 for a zero-width head
    u32 pieces[MOST_HEADS];        // units per coded page
    u64 cost_before[THREADS + 1];  // cost of all sequences before each one, if they are few
    u32 own_before[THREADS + 1];   // workers before each item, if every item has its own
    Place begins[MOST_WORKERS + 1];
    u64 warp_sums[THREADS / 32];
    u64 slowest;
    u32 largest;
};

// Exclusive prefix sum over the threads of the block; `total` is the sum over all.
template <class T>
DEVICE T sum_before(T x, T* warp_sums, T& total) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    T sum = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        T other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    T before = sum - x;
    total = 0;
#pragma unroll
    for (u32 w = 0; w < THREADS / 32; w++) {
        if (w < warp) before += warp_sums[w];
        total += warp_sums[w];
    }
    return before;
}

struct Planner {
    const PlanArgs& a;
    Plan& plan;
    u64* cost_before;  // cost of all sequences before each one
    u64 near_cost;     // cost of a BF16 tile

    DEVICE u64 item_cost(const ContextShape& c, u32 head) const {
        return c.near_units * near_cost + c.pages * plan.page_cost[head];
    }
    DEVICE u32 units(const ContextShape& c, u32 head) const { return c.near_units + c.pages * plan.pieces[head]; }

    // The first unit of an item with at least `bytes` before it.
    DEVICE u32 unit_of(const ContextShape& c, u32 head, u64 bytes) const {
        const u64 near = c.near_units * near_cost;
        if (bytes <= near || plan.pieces[head] == 0) return (u32)quotient(bytes + near_cost - 1, near_cost);
        const u32 coded = (u32)plan.page_cost[head] / plan.pieces[head];
        return c.near_units + (u32)quotient(bytes - near + coded - 1, coded);
    }

    // The place with `target` bytes before it, rounded up to a whole unit.
    DEVICE Place place_of(u64 target) const {
        // Binary search for the last sequence that begins at or before the target.
        u32 low = 0, high = a.step.sequence_count;
        while (low + 1 < high) {
            u32 middle = (low + high) / 2;
            if (cost_before[middle] <= target) low = middle;
            else high = middle;
        }
        u64 rest = target - cost_before[low];
        const SequenceInfo s = a.step.sequences[low];
        ContextShape c = context_of(a.step, s, 0);
        u32 h = 0;
        while (h + 1 < a.kv_heads && rest >= item_cost(c, h)) {
            rest -= item_cost(c, h++);
            set_pages(c, a.step, s.boundary, s.view, s.view_end, h);
        }
        const u32 unit = unit_of(c, h, rest);
        if (unit < units(c, h)) return {low, h, unit};
        if (h + 1 < a.kv_heads) return {low, h + 1, 0};
        // Skip to the next sequence with units: the first item of a worker's range must have units.
        do low++;
        while (low < a.step.sequence_count && cost_before[low + 1] == cost_before[low]);
        return {low, 0, 0};
    }

    // The number of the first `n` workers that begin at or before a place.
    DEVICE u32 begun(u32 n, const Place& at) const {
        u32 low = 0, high = n;
        while (low < high) {
            u32 middle = (low + high) / 2;
            if (at.before(plan.begins[middle])) high = middle;
            else low = middle + 1;
        }
        return low;
    }

    // The item of worker `w`, if every item has its own workers.
    DEVICE u32 item_of(u32 items, u32 w) const {
        u32 low = 0, high = items;
        while (low + 1 < high) {
            u32 middle = (low + high) / 2;
            if (plan.own_before[middle] <= w) low = middle;
            else high = middle;
        }
        return low;
    }

    // Sums the costs of the sequences; stores the prefix sums if `keep`. Blocks that share the
    // scratch memory write the same numbers.
    DEVICE u64 add_up(u64 page_of_all_heads, bool keep) const {
        const u32 n = a.step.sequence_count, tid = threadIdx.x;
        u64 total = 0;
        if (keep && tid == 0) cost_before[0] = 0;
        for (u32 first = 0; first < n; first += THREADS) {
            u64 cost = 0, all;
            if (first + tid < n) {
                const SequenceInfo s = a.step.sequences[first + tid];
                ContextShape c = context_of(a.step, s, 0);
                cost = c.near_units * near_cost * a.kv_heads;
                if (s.view == NO_VIEW) cost += c.pages * page_of_all_heads;
                for (u32 h = 0; s.view != NO_VIEW && s.rows == 1 && h < a.kv_heads; h++) {
                    set_pages(c, a.step, s.boundary, s.view, s.view_end, h);
                    cost += c.pages * plan.page_cost[h];
                }
            }
            const u64 before = sum_before(cost, plan.warp_sums, all);
            if (keep && first + tid < n) cost_before[first + tid + 1] = total + before + cost;
            total += all;
        }
        return total;
    }

    // The workers that read an item, if `active` workers read. `own`: every item has its own.
    DEVICE ItemPlan readers_of(u32 item, u32 active, bool own) const {
        const u32 sequence = item / a.kv_heads, head = item % a.kv_heads;
        const u32 units = this->units(context_of(a.step, a.step.sequences[sequence], head), head);
        if (own) return {plan.own_before[item], plan.own_before[item + 1] - plan.own_before[item], 0, 0};
        if (units == 0) return {0, 0, 0, 0};
        const u32 first = begun(active, {sequence, head, 0}) - 1;
        const u32 last = begun(active, {sequence, head, units - 1}) - 1;
        const Place at = plan.begins[first];
        return {first, last - first + 1, at.sequence != sequence || at.head != head, 0};
    }
};

// Number of workers of an item: its share of `workers`, at least one.
DEVICE u32 own_workers(u64 cost, u64 total, u32 workers, u64 least) {
    u64 share = quotient(cost * workers, total), most = quotient(cost, least);
    share = share < most ? share : most;
    return cost == 0 ? 0 : share < 1 ? 1 : (u32)share;
}

// The same if every item must have its own workers: one, plus a share of the `rest`.
DEVICE u32 one_and_share(u64 cost, u64 total, u32 rest, u64 least) {
    const u64 share = quotient(cost * rest, total), most = quotient(cost, least);
    return cost == 0 ? 0 : 1 + (u32)(share < most ? share : most > 0 ? most - 1 : 0);
}

extern "C" __global__ void __launch_bounds__(THREADS) decode_plan(PlanArgs a) {
    __shared__ Plan plan;
    wait_for_previous_kernel();
    const u32 layer = blockIdx.y;
    a.heads += layer * a.kv_heads;
    a.step.view_heads += layer * a.kv_heads;
    a.cost_before += (u64)layer * (a.step.sequence_count + 1);
    a.plan.memory += layer * a.plan_bytes;
    const u32 n = a.step.sequence_count, items = n * a.kv_heads, workers = a.plan.workers, tid = threadIdx.x;
    const u64 near_bytes = 4 * TILE_TOKENS * (u64)a.head_dim;
    u64 page_cost = 0;
    if (tid == 0) plan.slowest = 0, plan.largest = (u32)near_bytes;
    __syncthreads();
    if (tid < a.kv_heads) {
        const HeadPages head = a.heads[tid];
        const u32 pieces = pieces_of(head);
        page_cost = pieces == 0 ? 0 : 8 * a.head_dim * (head.key_bits + head.value_bits) + 8 * PAGE_TOKENS;
        plan.page_cost[tid] = page_cost, plan.pieces[tid] = pieces;
        if (pieces > 0) atomicMax(&plan.largest, (u32)page_cost / pieces);
    }
    u64 page_of_all_heads;
    sum_before(page_cost, plan.warp_sums, page_of_all_heads);
    Planner p = {a, plan, n <= THREADS ? plan.cost_before : a.cost_before, near_bytes};
    // Among codes a BF16 tile costs the time of 1.5 times its bytes, except if everything is read
    // in a few rounds (measured on an H200).
    if (page_of_all_heads > 0 &&
        p.add_up(page_of_all_heads, false) > FEW_ROUNDS * workers * (u64)a.round_cost)
        p.near_cost = near_bytes * 3 / 2;
    const u64 total = p.add_up(page_of_all_heads, true);
    // A worker reads at least two of the largest units, so that no two workers begin at the same
    // place.
    const u64 least = a.least_cost > 2 * plan.largest ? a.least_cost : 2 * plan.largest, wanted = quotient(total, least);
    u32 most = workers;
    if (a.spare < workers && total < (u64)LITTLE * workers) {
        // With FROM_PROJECTIONS no small kernel comes before attention, so no multiprocessor is
        // late.
        if (!a.own_workers) most = workers - a.spare;
        const u64 round = a.round_cost, rounds = quotient(total + most * round - 1, most * round);
        if (rounds > 0 && rounds <= (a.own_workers ? 1 : FEW_ROUNDS) && MOST_SPARE * a.spare < workers) {
            const u32 fewest = (u32)quotient(total + rounds * round - 1, rounds * round), least = workers - MOST_SPARE * a.spare;
            most = fewest > least ? fewest : least;
        }
    }
    u32 active = wanted < 1 ? 1 : wanted < most ? (u32)wanted : most;
    // If there are few items, give each its own workers, so that no worker switches items.
    bool own_workers_each = false;
    if (total > 0 && items <= (a.own_workers ? workers : most) && items <= THREADS) {
        u32 own = 0, used;
        if (tid < items) {
            const u32 head = tid % a.kv_heads;
            const u64 cost = p.item_cost(context_of(a.step, a.step.sequences[tid / a.kv_heads], head), head);
            own = a.own_workers ? one_and_share(cost, total, most - items, least) : own_workers(cost, total, most, least);
            if (cost > 0) atomicMax(&plan.slowest, quotient(cost, own));
        }
        plan.own_before[tid] = sum_before(own, (u32*)plan.warp_sums, used);
        if (tid == 0) plan.own_before[items] = used;
        __syncthreads();
        own_workers_each = a.own_workers || (used <= most && plan.slowest <= quotient(total, active) + SWITCH_COST);
        if (own_workers_each) active = used;
    }
    __syncthreads();
    for (u32 w = tid; w <= workers; w += THREADS) {
        Place begin = {n, 0, 0};
        if (w < active && total > 0) {
            if (own_workers_each) {
                const u32 item = p.item_of(items, w), own = plan.own_before[item + 1] - plan.own_before[item];
                const u32 sequence = item / a.kv_heads, head = item % a.kv_heads;
                const ContextShape c = context_of(a.step, a.step.sequences[sequence], head);
                begin = {sequence, head, p.unit_of(c, head, quotient(p.item_cost(c, head) * (w - plan.own_before[item]), own))};
            } else {
                begin = p.place_of(quotient(total * w, active));
            }
        }
        plan.begins[w] = begin;
    }
    __syncthreads();
    // Write the plan of this block's worker, with the page ids of its first units.
    const u32 worker = blockIdx.x;
    const Place begin = plan.begins[worker];
    if (begin.sequence < n && tid < FIRST_PAGES) {
        WorkerPlan& out = *a.plan.worker(worker);
        const SequenceInfo info = a.step.sequences[begin.sequence];
        const ContextShape c = context_of(a.step, info, begin.head);
        const HeadPages head = a.heads[begin.head];
        const u32 unit = begin.unit + tid;
        const bool any = unit < units_of(c, head);
        out.pages[tid] = any ? page_of(c, head, a.step, info.table, unit) : NO_PAGE;
        if (tid == 0) out.first = info;
    }
    if (tid == 0) a.plan.worker(worker)->begin = begin, a.plan.worker(worker)->end = plan.begins[worker + 1];
    for (u32 item = blockIdx.x * THREADS + tid; item < items; item += gridDim.x * THREADS)
        *a.plan.item(item) = p.readers_of(item, active, own_workers_each);
    // Attention reads the plan before wait_for_previous_kernel. That is safe: this kernel never
    // calls allow_next_kernel, so the next kernel starts after this one has finished.
    __threadfence();
}
