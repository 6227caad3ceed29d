"""The anchor of prefill benchmarks: PyTorch's cuDNN attention and cuBLAS products on Qwen3's shapes.

Prints, for each prompt length, the time of causal BF16 attention of one layer, the time of a layer's
products for the same rows, and both times the number of layers. Those are short bursts on a GPU that
rests in between; `in sequence` is the time of all layers one after the other, as a prompt runs them,
when the GPU's power limit counts. Run it in the same call as `oscar bench prefill`, on the same GPU.
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


def attention(context, heads, kv_heads, size):
    q = torch.randn(1, heads, context, size, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, kv_heads, context, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return call


def products(context, hidden, heads, kv_heads, size, intermediate):
    shapes = [(hidden, (heads + 2 * kv_heads) * size), (heads * size, hidden), (hidden, 2 * intermediate),
              (intermediate, hidden)]
    rows = min(context, CHUNK)
    pairs = [(torch.randn(rows, i, device="cuda", dtype=torch.bfloat16),
              torch.randn(o, i, device="cuda", dtype=torch.bfloat16)) for i, o in shapes]
    return lambda: [x @ w.T for x, w in pairs], context / rows


def main():
    name = sys.argv[1] if len(sys.argv) > 1 else "qwen3-8b"
    layers, hidden, heads, kv_heads, size, intermediate = SHAPES[name]
    for context in (int(c) for c in (sys.argv[2] if len(sys.argv) > 2 else "4096,32768,100000").split(",")):
        attend = attention(context, heads, kv_heads, size)
        multiply, times = products(context, hidden, heads, kv_heads, size, intermediate)
        attention_ms, products_ms = median_ms(attend, 5), median_ms(multiply, 9) * times

        def prompt():
            for _ in range(layers):
                attend()
                for _ in range(round(times)):
                    multiply()

        # The rows of a partial chunk count in proportion.
        sequence_ms = median_ms(prompt, 3) + layers * products_ms * (1 - round(times) / times)
        rate = 4 * heads * size * context * (context + 1) / 2 / attention_ms / 1e9
        print(f"{name} {context}: attention {attention_ms:.2f} ms a layer ({rate:.0f} TFLOP/s), products "
              f"{products_ms:.2f} ms a layer, all layers {layers * (attention_ms + products_ms):.0f} ms, "
              f"in sequence {sequence_ms:.0f} ms", flush=True)


if __name__ == "__main__":
    main()
