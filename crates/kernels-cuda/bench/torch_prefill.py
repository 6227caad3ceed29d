"""The anchor of prefill benchmarks: PyTorch's cuDNN attention and cuBLAS products on Qwen3's shapes.

Prints, for each prompt length, the time of causal BF16 attention of one layer, the time of a layer's
products for the same rows, and both times the number of layers. Run it in the same call as
`oscar bench prefill`, on the same GPU.
"""
import sys
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# layers, hidden, query heads, KV heads, head size, intermediate
SHAPES = {"qwen3-8b": (36, 4096, 32, 8, 128, 12288), "qwen3-4b": (36, 2560, 32, 8, 128, 9728)}
CHUNK = 4096  # rows of a product


def median_ms(call, repetitions):
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repetitions):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def attention_ms(context, heads, kv_heads, size):
    q = torch.randn(1, heads, context, size, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, kv_heads, context, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return median_ms(call, 5)


def products_ms(context, hidden, heads, kv_heads, size, intermediate):
    shapes = [(hidden, (heads + 2 * kv_heads) * size), (heads * size, hidden), (hidden, 2 * intermediate),
              (intermediate, hidden)]
    rows = min(context, CHUNK)
    pairs = [(torch.randn(rows, i, device="cuda", dtype=torch.bfloat16),
              torch.randn(o, i, device="cuda", dtype=torch.bfloat16)) for i, o in shapes]
    return median_ms(lambda: [x @ w.T for x, w in pairs], 9) * context / rows


def main():
    name = sys.argv[1] if len(sys.argv) > 1 else "qwen3-8b"
    layers, hidden, heads, kv_heads, size, intermediate = SHAPES[name]
    for context in (int(c) for c in (sys.argv[2] if len(sys.argv) > 2 else "4096,32768,100000").split(",")):
        attention = attention_ms(context, heads, kv_heads, size)
        products = products_ms(context, hidden, heads, kv_heads, size, intermediate)
        rate = 4 * heads * size * context * (context + 1) / 2 / attention / 1e9
        print(f"{name} {context}: attention {attention:.2f} ms a layer ({rate:.0f} TFLOP/s), products "
              f"{products:.2f} ms a layer, all layers {layers * (attention + products):.0f} ms", flush=True)


if __name__ == "__main__":
    main()
