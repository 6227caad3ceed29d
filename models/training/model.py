"""The Qwen2 decoder for training, and its optimizers.

Everything but attention works on (tokens, channels), so a change of row length compiles nothing again.
"""

import math
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPE = torch.bfloat16


def norm(x, weight, eps):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype)


def rotate(x, cos, sin):
    """x: (tokens, heads, channels); cos and sin: (tokens, 1, channels / 2)."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def before_attention(x, cos, sin, norm_weight, q, k, v, q_bias, k_bias, v_bias, eps, head_dim):
    weight = torch.cat([q, k, v]).to(x.dtype)
    bias = torch.cat([q_bias, k_bias, v_bias]).to(x.dtype)
    heads = F.linear(norm(x, norm_weight, eps), weight, bias).view(x.shape[0], -1, head_dim)
    query, key, value = heads.split([len(q) // head_dim, len(k) // head_dim, len(v) // head_dim], 1)
    return rotate(query, cos, sin), rotate(key, cos, sin), value.contiguous()


def after_attention(x, attended, o, norm_weight, gate, up, down, eps):
    x = x + F.linear(attended, o.to(x.dtype))
    h = norm(x, norm_weight, eps)
    h = F.silu(F.linear(h, gate.to(x.dtype))) * F.linear(h, up.to(x.dtype))
    return x + F.linear(h, down.to(x.dtype))


def head_loss(x, norm_weight, embedding, targets, weights, eps):
    logits = F.linear(norm(x, norm_weight, eps), embedding.to(x.dtype)).float()
    losses = torch.logsumexp(logits, -1) - logits.gather(1, targets[:, None]).squeeze(1)
    return (losses * weights).sum() / weights.sum().clamp(min=1.0)


def head_judge(x, norm_weight, embedding, targets, eps):
    logits = F.linear(norm(x, norm_weight, eps), embedding.to(x.dtype)).float()
    losses = torch.logsumexp(logits, -1) - logits.gather(1, targets[:, None]).squeeze(1)
    return logits.argmax(-1) == targets, losses


class Attention:
    """Causal attention by whichever implementation is fastest and right here."""

    def __init__(self, backends, grouped):
        self.backends, self.grouped = backends, grouped

    def __call__(self, q, k, v, rows):
        q, k, v = (x.view(rows, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        if not self.grouped:
            repeat = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        if self.backends is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        else:
            with sdpa_kernel(self.backends):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return out.transpose(1, 2).reshape(rows * q.shape[2], -1)


class Block(nn.Module):
    def __init__(self, config, device):
        super().__init__()
        hidden, mlp, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        queries, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

        def matrix(rows, columns, scale=1.0):
            values = torch.randn(rows, columns, device=device) * scale / math.sqrt(columns)
            return nn.Parameter(values)

        self.input_layernorm = nn.Parameter(torch.ones(hidden, device=device))
        self.post_attention_layernorm = nn.Parameter(torch.ones(hidden, device=device))
        self.q, self.k, self.v = matrix(queries, hidden), matrix(kv, hidden), matrix(kv, hidden)
        self.q_bias, self.k_bias, self.v_bias = (
            nn.Parameter(torch.zeros(rows, device=device)) for rows in (queries, kv, kv)
        )
        self.o = matrix(hidden, queries, 0.1)
        self.gate, self.up, self.down = matrix(mlp, hidden), matrix(mlp, hidden), matrix(hidden, mlp, 0.1)

    def names(self):
        attention, mlp = "self_attn.{}_proj", "mlp.{}_proj"
        found = {"input_layernorm.weight": self.input_layernorm}
        found["post_attention_layernorm.weight"] = self.post_attention_layernorm
        for name in "qkv":
            found[attention.format(name) + ".weight"] = getattr(self, name)
            found[attention.format(name) + ".bias"] = getattr(self, name + "_bias")
        found["self_attn.o_proj.weight"] = self.o
        return found | {mlp.format(name) + ".weight": getattr(self, name) for name in ("gate", "up", "down")}


class Qwen2(nn.Module):
    def __init__(self, config, device, compiled):
        super().__init__()
        self.eps, self.head_dim = config["rms_norm_eps"], config["head_dim"]
        size = (config["vocab_size"], config["hidden_size"])
        self.embedding = nn.Parameter(torch.randn(size, device=device) * config["initializer_range"])
        self.blocks = nn.ModuleList(Block(config, device) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.Parameter(torch.ones(config["hidden_size"], device=device))
        self.heads = (config["num_attention_heads"], config["num_key_value_heads"])
        steps = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float64) / self.head_dim
        angles = torch.arange(config["max_position_embeddings"], device=device, dtype=torch.float64)[:, None]
        angles = angles * config["rope_theta"] ** -steps
        self.cos, self.sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
        self.attention = Attention(None, False)
        self.wrap(compiled)

    def wrap(self, compiled):
        self.compiled = compiled
        wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self.before, self.after = wrap(before_attention), wrap(after_attention)
        self.head_loss, self.head_judge = wrap(head_loss), wrap(head_judge)

    def forward(self, ids):
        rows, length = ids.shape
        cos, sin = (table[:length].repeat(rows, 1, 1) for table in (self.cos, self.sin))
        x = F.embedding(ids.reshape(-1), self.embedding).to(DTYPE)
        for b in self.blocks:
            projections = (b.input_layernorm, b.q, b.k, b.v, b.q_bias, b.k_bias, b.v_bias)
            q, k, v = self.before(x, cos, sin, *projections, self.eps, self.head_dim)
            attended = self.attention(q, k, v, rows)
            x = self.after(x, attended, b.o, b.post_attention_layernorm, b.gate, b.up, b.down, self.eps)
        return x

    def loss(self, ids, targets, weights):
        x = self(ids)
        return self.head_loss(x, self.norm, self.embedding, targets.reshape(-1), weights.reshape(-1), self.eps)

    def judge(self, ids, targets):
        with torch.enable_grad():  # the graph that training has compiled
            x = self(ids).detach()
        right, losses = self.head_judge(x, self.norm.detach(), self.embedding.detach(), targets.reshape(-1), self.eps)
        return right.view(ids.shape), losses.view(ids.shape)

    def logits(self, ids):
        x = norm(self(ids), self.norm, self.eps)
        return F.linear(x, self.embedding.to(x.dtype)).view(*ids.shape, -1)

    def names(self):
        found = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        for i, block in enumerate(self.blocks):
            found |= {f"model.layers.{i}.{name}": p for name, p in block.names().items()}
        return found

    def save(self, path):
        from safetensors.torch import save_file

        tensors = {name: p.detach().to(torch.bfloat16).cpu().contiguous() for name, p in self.names().items()}
        save_file(tensors, path, metadata={"format": "pt"})

    @torch.no_grad()
    def load(self, path):
        from safetensors.torch import load_file

        tensors = load_file(path)
        for name, p in self.names().items():
            p.copy_(tensors[name].to(p.device))


def choose_attention(model, rows, length):
    """Times what there is, and takes the fastest whose results agree with the plain one. Says which."""
    device = model.embedding.device
    query_heads, kv_heads = model.heads

    def tensors(count):
        torch.manual_seed(0)
        shape = (count * length, 1, model.head_dim)
        make = lambda heads: torch.randn(shape[0], heads, shape[2], device=device, dtype=DTYPE)  # noqa: E731
        q, k, v, out = make(query_heads), make(kv_heads), make(kv_heads), make(query_heads)
        return [x.requires_grad_() for x in (q, k, v)], out.view(count * length, -1)

    def once(attention, inputs, out, count):
        result = attention(*inputs, count)
        return [result.detach(), *torch.autograd.grad(result, inputs, out)]

    small, large = tensors(2), tensors(rows)
    try:
        reference = once(Attention([SDPBackend.FLASH_ATTENTION], False), *small, 2)
    except RuntimeError as error:
        return f"attention as PyTorch chooses: {error}"
    best, notes = None, []
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        for grouped in (True, False):
            attention = Attention([getattr(SDPBackend, name)], grouped)
            label = f"{name.split('_')[0].lower()}{' grouped' if grouped else ''}"
            try:
                for a, b in zip(once(attention, *small, 2), reference):
                    if (a - b).float().abs().max() > 0.02 * b.float().abs().max():
                        raise RuntimeError("differs")
                once(attention, *large, rows)
                torch.cuda.synchronize()
                start = time.time()
                for _ in range(3):
                    once(attention, *large, rows)
                torch.cuda.synchronize()
                seconds = (time.time() - start) / 3
            except RuntimeError as error:
                notes.append(f"{label} no ({str(error).splitlines()[0][:60]})")
                continue
            notes.append(f"{label} {seconds * 1e3:.1f} ms")
            if best is None or seconds < best[0]:
                best = (seconds, attention)
    if best:
        model.attention = best[1]
    return "attention of a layer, forward and backward: " + ", ".join(notes)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (Newton-Schulz), for matrices. Matrices of a shape go together."""

    def __init__(self, parameters, lr, momentum=0.95, decay=0.05):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})
        self.shapes = {}
        for group in self.param_groups:
            for p in group["params"]:
                self.shapes.setdefault(p.shape, []).append(p)
        self.steps = 0

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        self.steps += 1
        momentum = group["momentum"] - 0.1 * max(0.0, 1 - self.steps / 300)
        for shape, parameters in self.shapes.items():
            gradient = torch.stack([p.grad for p in parameters])
            state = self.state[parameters[0]]
            if "buffer" not in state:
                state["buffer"] = torch.zeros_like(gradient)
            buffer = state["buffer"].lerp_(gradient, 1 - momentum)
            update = orthogonal(gradient.lerp(buffer, momentum))
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["decay"])
            torch._foreach_add_(parameters, list(update.float().unbind()), alpha=-group["lr"] * scale)


def orthogonal(x):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        product = x @ x.mT
        x = a * x + (b * product + c * product @ product) @ x
    return x.mT if tall else x


def optimizers(model, matrix_rate, vector_rate):
    matrices = [p for block in model.blocks for p in block.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": [model.embedding], "lr": vector_rate, "weight_decay": 0.01},
        # Biases start at zero and shall grow to what a real model has.
        {"params": vectors, "lr": vector_rate, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-9, fused=model.embedding.is_cuda)
    both = [Muon(matrices, matrix_rate), adam]
    for optimizer in both:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return both
