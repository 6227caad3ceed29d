// Decode attention over pages: one launch a layer for every sequence, BF16 and coded tokens together.
//
// A persistent block works through its range of the plan (decode_plan.cuh), segment by segment, a segment being what it reads
// of one item. WARPS warps read; one more hands them the segment's units, one by one as their rings have room, and starts
// the copies. Readers do not wait for one another until the segment ends; the next segment's first pages are on their way
// while one is merged. An item that several blocks read is merged by the last of them in the plan, some heads each, when
// they have read all else; they are all there at the same time, since there are no more blocks than multiprocessors.
//
// What a block reads and where it lies is found out before it waits for the kernels of its layer: tables, what is coded ahead and
// the plan, which overlaps with no kernel before it, were finished before a kernel behind the plan could begin, and attention is
// behind it. Of the pages a slot a warp is read before, where they are older than the step or coded ahead of it; more would keep
// the memory busy while those kernels fetch what everything here waits for. Two are, where only a product comes before (both
// measured).
//
// Compiled with HEAD_DIM (64, 128, 256), QUERY_TILES (1: up to 8 query heads to a KV head, 2: up to 16), WARPS, STAGES,
// BLOCKS (blocks that share a multiprocessor), SHARED_BYTES (of dynamic shared memory) and FROM_PROJECTIONS: is the way of the new
// token into the cache gone here (decode_heads.cuh)? Then the plan gives every item workers of its own. RACECHECK adds what
// compute-sanitizer's tool of that name needs to see that one thing comes before another.
#include "decode_filler.cuh"
#include "decode_heads.cuh"
#include "decode_merge.cuh"
#include "decode_query.cuh"
#include "decode_readers.cuh"

// One lane of each warp initializes the barriers of the warp's ring; several lanes would do it one after the other, 60 cycles a
// barrier. Before anything is asked of memory: the fence would wait for it.
DEVICE void make_barriers(Shared& shared, int lane, int warp) {
    if (warp >= WARPS || lane != 0) return;
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        barrier_init(shared_address(&shared.full[warp][i]), FULL_ARRIVALS);
        barrier_init(shared_address(&shared.empty[warp][i]), EMPTY_ARRIVALS);
    }
    barriers_before_bulk_copies();
}

DEVICE Ring ring_of(Shared& shared, int warp) {
    Ring ring;
    ring.full = shared_address(shared.full[warp]), ring.empty = shared_address(shared.empty[warp]), ring.slot = ring.phase = 0;
    return ring;
}

// Reads the units of a segment as they come. All readers.
DEVICE void read_segment(State& state, Ring& ring, Shared& shared, const DecodeArgs& a, float down, int lane, int warp) {
    const Segment& g = shared.segments[warp];
    state.clear();
    read_near(state, ring, shared, lane, warp);
    if (shared.slot_unit[warp][ring.slot] != NO_UNIT) {
        if (state.fresh) {
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++) state.m[n][0] = state.m[n][1] = 0.f;
        } else {
            state.to_units(shared.to_codes);
        }
        if (pieces_of(g.head) != 1) {
            CodedQuery query;
            load_query(query, shared, down, lane);
            read_any_width(state, query, ring, shared, a.step.sink, lane, warp);
        } else {
#if SPLIT_QUERY
            SplitQuery query;
            load_query(query, shared, lane);
#else
            CodedQuery query;
            load_query(query, shared, down, lane);
#endif
            read_two_bit(state, query, ring, shared, a.step.sink, lane, warp);
        }
        state.to_units(shared.from_codes);
    }
    if (lane == 0) shared.last_slot[warp] = ring.slot;
    __syncwarp();
}

DEVICE void merge_owed(const DecodeArgs& a, const OwedMerge& owed) {
    if (owed.mergers == 0) return;
    if (owed.readers.count <= 2 * SHARERS) merge_item<2>(a, owed);
    else merge_item<6>(a, owed);
}

#if FROM_PROJECTIONS
constexpr int EARLY_SLOTS = 2;  // of a warp that are filled before the kernels of the layer are waited for

// A worker reads of one item. Between the end of the kernel before and the first score lie the projections and what is made of
// them: the loads of those are the first that a reader waits for, and all else is done while they are on their way.
extern "C" __global__ void __launch_bounds__(THREADS + 32, BLOCKS) decode_attention(const __grid_constant__ DecodeArgs a) {
    extern __shared__ u8 memory[];
    Shared& shared = *(Shared*)memory;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 worker = blockIdx.x;
    allow_next_kernel();
    make_barriers(shared, lane, warp);
    fetch_rotations(a, worker, lane, warp);
    const WorkerRange plan = a.plan.range(worker);
    Filler filler;
    LayerHeads heads;
    if (warp == WARPS) {
        filler.load_pages(a.plan.worker(worker)->pages, lane);
        heads.load(a, lane);
        wait_for_barriers();
    } else {
        barriers_are_made();
    }
    if (!plan.begin.before(plan.end)) {
        wait_for_previous_kernel();
        return;
    }
    Segment& g = shared.segments[warp];
    const u32 item = plan.begin.sequence * a.kv_heads + plan.begin.head;
    auto describe = [&](const HeadPages& head) {
        const bool ends = plan.begin.sequence == plan.end.sequence && plan.begin.head == plan.end.head;
        set_sequence(g, a, plan.first);
        __syncwarp();
        set_item(g, head, plan.begin.unit, ends ? plan.end.unit : 0xffffffffu);
        __syncwarp();
    };
    if (warp == WARPS) {
        describe(heads.of(a, plan.begin.head));
        filler.begin(lane);
        // Nothing of what is read here is of this step: the new token's row is put into its tile later.
        for (int i = 0; i < EARLY_SLOTS; i++) filler.hand_out(shared, g, lane, true);
        fetch_partial(a, worker, lane);
        wait_for_previous_kernel();
        filler.serve(shared, g, lane, true);
        return;
    }
    NewToken token(a, plan, lane, warp);
    wait_for_previous_kernel();
    token.load();
    uint4 readers = {};
    if (threadIdx.x == 0) readers = __ldcg((const uint4*)a.plan.item(item));
    describe(a.heads[plan.begin.head]);
    put_units(shared, g.head.value_bits);
    QueryRows rows;
    token.make(shared, a, rows, lane, warp);
    float down = prepare_query(shared, a, rows, readers, g.head.key_bits, g.head.value_bits);
    Ring ring = ring_of(shared, warp);
    State state;
    read_segment(state, ring, shared, a, down, lane, warp);
    put_down(shared, state, lane, warp);
    merge_owed(a, finish_segment(shared, a, g.row, plan.begin.head, worker, true));
}
#else
extern "C" __global__ void __launch_bounds__(THREADS + 32, BLOCKS) decode_attention(const __grid_constant__ DecodeArgs a) {
    extern __shared__ u8 memory[];
    Shared& shared = *(Shared*)memory;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 worker = blockIdx.x;
    allow_next_kernel();
    make_barriers(shared, lane, warp);
    if (threadIdx.x < a.kv_heads * (sizeof(HeadPages) / 16) && threadIdx.x < NEAR_HEADS * (sizeof(HeadPages) / 16))
        copy_to_shared(shared_address((uint4*)shared.heads + threadIdx.x), (const uint4*)a.heads + threadIdx.x);
    const WorkerRange plan = a.plan.range(worker);
    Filler filler;
    if (warp == WARPS) filler.load_pages(a.plan.worker(worker)->pages, lane);
    if (!plan.begin.before(plan.end)) {
        wait_for_previous_kernel();
        return;
    }
    Segment& g = shared.segments[warp];
    Place at = plan.begin;
    set_sequence(g, a, plan.first);
    auto next_item = [&]() {
        if (++at.head == a.kv_heads) {
            at.head = 0;
            __syncwarp();
            if (++at.sequence < a.step.sequence_count) set_sequence(g, a, a.step.sequences[at.sequence]);
            __syncwarp();
        }
        at.unit = 0;
    };
    // Describes the next item of the range, from `at` on, that has something to read.
    auto find = [&]() {
        __syncwarp();
        bool found = false;
        while (at.before(plan.end)) {
            bool ends = at.sequence == plan.end.sequence && at.head == plan.end.head;
            found = set_item(g, head_pages(shared, a, at.head), at.unit, ends ? plan.end.unit : 0xffffffffu);
            if (found) break;
            next_item();
        }
        __syncwarp();
        return found;
    };
    wait_for_copied_bytes();
    __syncthreads();
    if (warp == WARPS) {
        // A worker's range begins with an item that it reads.
        find();
        filler.begin(lane);
        const u32 old = g.context.old_until(g.head, g.begin, g.old_codes, g.boundary);
        if (g.begin < old) filler.hand_out(shared, g, lane, true, old);
        fetch_partial(a, worker, lane);
        wait_for_previous_kernel();
        filler.serve(shared, g, lane, true);
        for (next_item(); find(); next_item()) {
            filler_ends_segment();
            filler.begin(lane);
            filler.serve(shared, g, lane, false);
        }
        return;
    }
    Ring ring = ring_of(shared, warp);
    State state;
    OwedMerge owed;
    bool first = true, more = find();
    while (more) {
        const u32 row = g.row, head = at.head, item = at.sequence * a.kv_heads + at.head;
        // Needed at the segment's end.
        uint4 readers = {};
        if (threadIdx.x == 0) readers = __ldcg((const uint4*)a.plan.item(item));
        put_units(shared, g.head.value_bits);
        QueryRows rows(a, row, head, lane, warp);
        if (first) wait_for_previous_kernel();
        rows.load();
        float down = prepare_query(shared, a, rows, readers, g.head.key_bits, g.head.value_bits);
        read_segment(state, ring, shared, a, down, lane, warp);
        put_down(shared, state, lane, warp);
        const OwedMerge owes = finish_segment(shared, a, row, head, worker, first);
        if (first) owed = owes;
        first = false;
        next_item();
        more = find();
        if (more) {
            // The filler may have the slots that held the result.
            readers_end_segment();
            writes_before_bulk_copies();
            ring.release();
        }
    }
    merge_owed(a, owed);
}
#endif
