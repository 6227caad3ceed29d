// Decode attention against a reference in double precision: shapes, widths, group sizes, odd lengths, hostile values.
// The error of a head is relative to the same average of the values' magnitudes, so that cancellation is not counted.
#include "harness.hpp"

struct Case {
    const char* name; int head_dim, kv_heads, group; std::vector<u32> lengths; u32 sink, recent; bool codes;
    std::vector<std::pair<u32, u32>> widths;  // by head, repeated
    int mode;  // 0 ordinary, 1 flat, 2 one huge score, 3 tiny value scales, 4 wild scales, 5 large offsets
    double tolerance; bool mixed = false;
};

static int failures = 0;

static void check(const Case& c, Kernel& k, u32 least_cost) {
    Random random(c.head_dim * 131 + c.group * 17 + c.lengths.size() + c.mode);
    Step step(c.lengths, c.sink, c.recent, c.codes, random, c.mixed);
    const int D = c.head_dim; const u32 heads = c.kv_heads;
    std::vector<HeadPages> table(heads); std::vector<std::vector<u8>> full(heads), coded(heads);
    for (u32 h = 0; h < heads; h++) {
        auto [kb, vb] = c.codes ? c.widths[h % c.widths.size()] : std::pair<u32, u32>{0, 0};
        CodedPage shape{kb, vb, (u32)D};
        full[h].assign((size_t)step.full_pages * full_page_bytes(D) + 16, 0xff);  // NaN where nothing was stored
        coded[h].assign((size_t)step.coded_pages * shape.bytes() + 16, 0xff);
        for (size_t i = 0; i < step.sequences.size(); i++) {
            auto& s = step.sequences[i]; u32 n = s.first_position + 1;
            for (u32 j = 0; j < n; j++) {
                bool code = c.codes && j >= step.sink && j < s.boundary; u32 b = j / 64, t = j % 64;
                if (!code) {
                    u16* page = (u16*)(full[h].data() + (size_t)step.full[s.table + b] * full_page_bytes(D));
                    for (int side = 0; side < 2; side++) for (int d = 0; d < D; d++) page[full_element(side, D, t, d)] = float_to_bf16(random.normal() * (side ? 1.f : 0.3f));
                } else {
                    u8* page = coded[h].data() + (size_t)step.coded[s.table + b] * shape.bytes();
                    if (t % 16 == 0 || j == step.sink) for (int side = 0; side < 2; side++) memset(page + shape.codes(side) + (t / 16) * 2 * D * shape.side_bits(side), 0, 2 * D * shape.side_bits(side));
                    for (int side = 0; side < 2; side++) {
                        u32 bits = shape.side_bits(side); float levels = (float)((1 << bits) - 1);
                        float scale = (0.5f + random.unit()) / levels, minimum = -scale * levels / 2 + 0.1f * random.normal();
                        if (side == 0) scale *= 0.6f, minimum *= 0.6f;
                        if (side == 1 && c.mode == 3) scale *= 0x1p-20f, minimum = 0x1p-18f * random.normal();
                        if (side == 1 && c.mode == 4) { scale = std::ldexp(scale, -(int)random.below(24)); if (random.below(5) == 0) scale = 0; }
                        if (c.mode == 5) minimum += side ? 300.f : 4.f;
                        store_params(page, shape, side, t, float_to_half(scale), float_to_half(minimum));
                        for (int d = 0; d < D; d++) store_code(page, shape, side, t, d, random.below(1u << bits));
                    }
                }
            }
        }
        table[h] = {upload(full[h]), upload(coded[h]), kb, vb, 0, 0};
    }
    const u32 rows = (u32)c.lengths.size(), query_heads = heads * c.group;
    std::vector<float> q((size_t)rows * query_heads * D);
    for (auto& x : q) x = c.mode == 1 ? 0.f : random.normal() * (c.mode == 2 ? 8.f : 1.f);
    const float scale = 1.f / std::sqrt((float)D);
    CUdeviceptr dq = upload(q), heads_ptr = upload(table), out = device_alloc(q.size() * 4), partials = device_alloc(k.partial_bytes());
    CUdeviceptr cost = device_alloc((rows + 1) * 8), words = device_alloc(304 * k.workers + 16 * rows * heads);
    CK(cuMemsetD8(out, 0xff, q.size() * 4)); CK(cuMemsetD8(partials, 0xff, k.partial_bytes()));
    StepTables tables = step.tables(); DecodePlan plan{words, (u32)k.workers, 0};
    PlanArgs pa{tables, heads_ptr, cost, plan, heads, (u32)D, least_cost, heads, round_cost(k.v), 0};
    DecodeArgs da{tables, plan, heads_ptr, dq, 0, {}, out, 0, partials, heads, (u32)c.group, scale * 1.4426950408889634f};
    for (int i = 0; i < 2; i++) { launch_plan(k, pa, 0); launch_decode(k, da, 0); }  // twice: partial results must be taken away
    CK(cuCtxSynchronize());
    std::vector<float> got(q.size()); CK(cuMemcpyDtoH(got.data(), out, got.size() * 4));
    double worst = 0; std::vector<double> errors(rows * query_heads, 0); std::vector<std::thread> threads;
    for (int w = 0; w < 16; w++) threads.emplace_back([&, w] {
        for (u32 item = w; item < rows * heads; item += 16) {
            u32 i = item / heads, h = item % heads; auto& s = step.sequences[i]; if (s.rows != 1) continue; u32 n = s.first_position + 1; CodedPage shape{table[h].key_bits, table[h].value_bits, (u32)D};
            std::vector<float> kv((size_t)n * 2 * D);
            for (u32 j = 0; j < n; j++) for (int side = 0; side < 2; side++) {
                bool code = c.codes && j >= step.sink && j < s.boundary; u32 b = j / 64, t = j % 64; float* row = &kv[((size_t)j * 2 + side) * D];
                if (!code) { const u16* page = (const u16*)(full[h].data() + (size_t)step.full[s.table + b] * full_page_bytes(D)); for (int d = 0; d < D; d++) row[d] = bf16_to_float(page[full_element(side, D, t, d)]); }
                else { const u8* page = coded[h].data() + (size_t)step.coded[s.table + b] * shape.bytes(); u32 pair = *(const u32*)(page + param_byte(shape, side, t)); float sc = half_to_float(pair & 0xffff), mn = half_to_float(pair >> 16);
                    for (int d = 0; d < D; d++) row[d] = sc * load_code(page, shape, side, t, d) + mn; }
            }
            for (int g = 0; g < c.group; g++) {
                const float* query = &q[((size_t)i * query_heads + h * c.group + g) * D]; const float* o = &got[((size_t)i * query_heads + h * c.group + g) * D];
                std::vector<double> p(n); double m = -1e300, l = 0; std::vector<double> r(D, 0.0), mag(D, 0.0);
                for (u32 j = 0; j < n; j++) { double a = 0; for (int d = 0; d < D; d++) a += (double)query[d] * kv[(size_t)j * 2 * D + d]; p[j] = a * scale; m = std::max(m, p[j]); }
                for (u32 j = 0; j < n; j++) { double e = std::exp(p[j] - m); l += e; for (int d = 0; d < D; d++) { double x = e * kv[((size_t)j * 2 + 1) * D + d]; r[d] += x; mag[d] += std::fabs(x); } }
                double num = 0, den = 0; for (int d = 0; d < D; d++) { double x = r[d] / l; num += (o[d] - x) * (o[d] - x); den += (mag[d] / l) * (mag[d] / l); }
                double e = std::sqrt(num / (den + 1e-300)); errors[i * query_heads + h * c.group + g] = std::isfinite(e) ? e : 1e9;
            }
        }
    });
    for (auto& t : threads) t.join();
    u32 at = 0; for (u32 i = 0; i < errors.size(); i++) if (errors[i] > worst) worst = errors[i], at = i;
    bool ok = worst <= c.tolerance; failures += !ok;
    u32 active = active_workers(words, k.workers);
    printf("%-4s %-30s d%d g%d kv%d workers %u/%d: worst error %.2e (row %u of length %u, head %u)\n", ok ? "ok" : "FAIL", c.name, D, c.group, heads, active, k.workers, worst, at / query_heads, c.lengths[at / query_heads], at % query_heads);
    for (auto& t : table) { cuMemFree(t.full); cuMemFree(t.coded); }
    for (CUdeviceptr p : {dq, heads_ptr, out, partials, cost, words, (CUdeviceptr)tables.sequences, (CUdeviceptr)tables.full, (CUdeviceptr)tables.coded}) cuMemFree(p);
}

int main(int argc, char** argv) {
    Kernel::folder = argc > 1 ? argv[1] : ".";
    bool quick = argc > 2 && std::string(argv[2]) == "quick";
    CK(cuInit(0)); CUdevice d; CUcontext ctx; CK(cuDeviceGet(&d, 0)); CK(cuDevicePrimaryCtxRetain(&ctx, d)); CK(cuCtxSetCurrent(ctx));
    std::vector<u32> odd = {1, 15, 16, 17, 63, 64, 65, 319, 320, 335, 336, 337, 351, 352, 400, 1000, 1023, 1024, 2777, 5000};
    std::vector<std::pair<u32, u32>> two = {{2, 2}}, all; for (u32 k = 1; k <= 4; k++) for (u32 v = 1; v <= 4; v++) all.push_back({k, v});
    std::vector<u32> small = {7, 130, 400, 731};
    for (Variant v : std::vector<Variant>{{128, 1, 15, 3, 1}, {128, 1, 15, 3, 2}, {128, 2, 7, 3, 0}, {64, 1, 15, 4, 0}, {64, 2, 7, 4, 0}, {256, 1, 7, 3, 0}, {256, 2, 4, 3, 0}}) {
        if (quick && v.head_dim != 128) continue;
        Kernel k(v); int D = v.head_dim, base = v.tiles == 1 ? 4 : 12;
        printf("-- %s: %u bytes of shared memory, %d workers\n", v.file().c_str(), k.shared, k.workers);
        u32 fine = 1;  // as many workers as possible
        check({"two bits, odd lengths", D, 2, base, odd, 64, 256, true, two, 0, 2e-3}, k, fine);
        check({"bf16 only", D, 2, base, odd, 0, 0, false, two, 0, 1e-4}, k, fine);
        check({"one worker each", D, 2, base, small, 64, 256, true, two, 0, 2e-3}, k, 1u << 30);
        check({"mixed with prefill", D, 2, base, odd, 64, 256, true, two, 0, 2e-3, true}, k, fine);
        if (quick) continue;
        check({"all widths", D, 16, base, {700, 1333}, 64, 256, true, all, 0, 2e-3}, k, fine);
        for (int g = 1; g <= (v.split == 1 ? 4 : 8); g++) check({"group size", D, 1, g + 8 * (v.tiles - 1), small, 64, 256, true, two, 0, 2e-3}, k, fine);
        for (u32 sink : {0u, 16u, 48u, 128u}) for (u32 recent : {1u, 37u}) check({"other windows", D, 2, base, small, sink, recent, true, {{2, 2}, {3, 4}}, 0, 2e-3}, k, fine);
        check({"flat", D, 1, base, {20000}, 64, 256, true, two, 1, 2e-3}, k, fine);
        check({"huge scores", D, 2, base, odd, 64, 256, true, two, 2, 6e-3}, k, fine);
        check({"tiny value scales", D, 2, base, odd, 64, 16, true, two, 3, 2e-3}, k, fine);
        check({"wild value scales", D, 2, base, odd, 0, 1, true, {{2, 2}, {4, 3}}, 4, 2e-3}, k, fine);
        check({"large offsets", D, 2, base, odd, 64, 256, true, two, 5, 2e-3}, k, fine);
        if (D == 128) {
            check({"flat over 128K", D, 1, base, {131072}, 64, 256, true, two, 1, 2e-3}, k, fine);
            check({"128K", D, 1, base, {131072 + 5}, 64, 256, true, two, 0, 2e-3}, k, fine);
        }
    }
    printf(failures ? "%d FAILED\n" : "all checks passed\n", failures);
    return failures != 0;
}
