"""Trains a small Qwen2 model (biases on q, k and v, no QK-norm) on the project's own tasks, in minutes on one GPU.

It is a test asset: a second architecture that really uses its context, so that damage by a KV-cache format shows.
The text is generated (tasks.py) or the repository's own; nothing is downloaded.

    python models/training/train_qwen2.py --out DIR --seconds 510
    python models/training/train_qwen2.py --check DIR     # the same answers from Hugging Face transformers?

Invariant: training ends `--seconds` after the start, whatever the machine; learning rate and row length follow the
share of that time which has passed. After each evaluation the best model so far lies complete in DIR.
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import queue
import random
import shutil
import sys
import time
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"
STARTED = time.time()

import numpy as np  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
import tasks  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "models/oscar-15m"
# Tokens of a row, and the share of the training time from which rows are that long.
PHASES = [(512, 0.0), (1024, 0.12), (2048, 0.25), (4096, 0.45), (6144, 0.82)]
# A multiple of every row length.
STEP_TOKENS = 98_304
EVAL_TOKENS = 4096
ROPE_THETA = 1e6
EPS = 1e-6
# From this share of the time on the learning rate falls to zero.
DECAY_FROM = 0.5
WARMUP_STEPS = 100


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the model")
    parser.add_argument("--check", type=Path, help="compare a finished model with transformers instead of training")
    parser.add_argument("--seconds", type=float, default=510, help="wall time from start to end")
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--mlp", type=int, default=512)
    parser.add_argument("--matrix-rate", type=float, default=0.015, help="learning rate of matrices (Muon)")
    parser.add_argument("--vector-rate", type=float, default=0.003, help="learning rate of the rest (AdamW)")
    parser.add_argument("--eval-every", type=float, default=60, help="seconds between evaluations")
    parser.add_argument("--eval-cases", type=int, default=12, help="cases of each task; twice as many at the end")
    parser.add_argument("--workers", type=int, default=11)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--tiny", action="store_true", help="short rows and small steps, to test the script on a CPU")
    return parser.parse_args()


# --- batches, made by processes ahead of the trainer ---


def produce(seed, phases, step_tokens, phase, queues):
    """A worker: fills the queue of the current phase, then the next one's."""
    np.random.seed(seed)
    documents = tasks.Documents(ROOT, Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")), seed)
    parent = os.getppid()
    while os.getppid() == parent:
        for at in range(phase.value, min(phase.value + 2, len(phases))):
            if not queues[at].full():
                length = phases[at][0]
                with contextlib.suppress(queue.Full):
                    queues[at].put(documents.rows(step_tokens // length, length), timeout=0.5)
                break
        else:
            time.sleep(0.02)


class Batches:
    """Batches from the workers. Old ones come again, in another order, when the workers are too slow."""

    KEPT = 200

    def __init__(self, args, phases, step_tokens):
        context = multiprocessing.get_context("fork")
        self.phase = context.Value("i", 0)
        self.queues = [context.Queue(48) for _ in phases]
        shared = (phases, step_tokens, self.phase, self.queues)
        self.workers = [
            context.Process(target=produce, args=(1000 * args.seed + i, *shared), daemon=True)
            for i in range(args.workers)
        ]
        for worker in self.workers:
            worker.start()
        self.kept, self.reused, self.random = [], 0, random.Random(0)

    def next(self, phase):
        if phase != self.phase.value:
            self.phase.value = phase
            self.kept = []
        try:
            batch = self.queues[phase].get(timeout=None if not self.kept else 0.005)
        except queue.Empty:
            self.reused += 1
            return self.random.choice(self.kept)
        self.kept = self.kept[-self.KEPT + 1 :] + [batch]
        return batch

    def stop(self):
        for worker in self.workers:
            worker.terminate()


def main():
    args = arguments()
    if args.check:
        return check(args.check)
    phases, step_tokens, eval_tokens = PHASES, STEP_TOKENS, EVAL_TOKENS
    if args.tiny:
        phases, step_tokens, eval_tokens = [(256, 0.0), (512, 0.6)], 2048, 512
    # Before PyTorch is loaded: processes are forked.
    batches = Batches(args, phases, step_tokens)
    try:
        Trainer(args, phases, step_tokens, eval_tokens, batches).run()
    finally:
        batches.stop()


class Trainer:
    def __init__(self, args, phases, step_tokens, eval_tokens, batches):
        import model

        self.args, self.phases, self.step_tokens, self.batches = args, phases, step_tokens, batches
        self.eval_tokens, self.lib, self.torch = eval_tokens, model, model.torch
        args.out.mkdir(parents=True, exist_ok=True)
        self.log_file = (args.out / "training.log").open("w")
        self.config = {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": args.hidden,
            "intermediate_size": args.mlp, "num_hidden_layers": args.layers, "num_attention_heads": args.heads,
            "num_key_value_heads": args.kv_heads, "head_dim": args.head_dim, "vocab_size": 6144,
            "rms_norm_eps": EPS, "rope_theta": ROPE_THETA, "hidden_act": "silu", "tie_word_embeddings": True,
            "max_position_embeddings": 8192, "use_sliding_window": False, "attention_dropout": 0.0,
            "torch_dtype": "bfloat16", "initializer_range": 0.02, "bos_token_id": None, "eos_token_id": 2,
            "pad_token_id": 0, "use_cache": True,
        }  # fmt: skip
        self.torch.manual_seed(args.seed)
        self.model = model.Qwen2(self.config, args.device, compiled=not args.eager and args.device == "cuda")
        self.optimizers = model.optimizers(self.model, args.matrix_rate, args.vector_rate)
        self.documents = tasks.Documents(ROOT, Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")), "evaluation")
        self.best, self.rate = (-1.0, 0.0), 1.0

    def log(self, text):
        line = f"{time.time() - STARTED:6.1f} s  {text}"
        print(line, flush=True)
        self.log_file.write(line + "\n")
        self.log_file.flush()

    def batch(self, ids, weights):
        """Inputs, targets and weights on the device."""
        torch = self.torch
        ids = torch.from_numpy(ids.astype(np.int32))
        weights = torch.from_numpy(weights.astype(np.float32))
        if self.args.device == "cuda":
            ids, weights = ids.pin_memory(), weights.pin_memory()
        ids = ids.to(self.args.device, non_blocking=True).long()
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weights.to(self.args.device, non_blocking=True)

    def run(self):
        args, torch = self.args, self.torch
        parameters = sum(p.numel() for p in self.model.parameters())
        self.log(f"{parameters / 1e6:.2f} M parameters, {parameters * 2 / 2**20:.2f} MiB in BF16")
        cases = self.cases(args.eval_cases)
        if args.device == "cuda":
            self.log(self.lib.choose_attention(self.model, self.step_tokens // self.eval_tokens, self.eval_tokens))
        end = STARTED + args.seconds - min(15.0, 0.1 * args.seconds)  # the last evaluation and saving
        clock, spoken, evaluated, step, tokens = None, time.time(), time.time(), 0, 0
        losses, window, phase = [], 0, -1
        while True:
            now = time.time()
            if clock is None and step == 2:
                # Compiling is over.
                clock = spoken = evaluated = now
                self.log("the first two steps are done")
            progress = 0.0 if clock is None else (now - clock) / max(1.0, end - clock)
            if now >= end:
                break
            entered = max(i for i, (_, start) in enumerate(self.phases) if start <= progress)
            if entered != phase:
                phase = entered
                self.log(f"rows of {self.phases[phase][0]} tokens")
            ids, targets, weights = self.batch(*self.batches.next(phase))
            try:
                loss = self.model.loss(ids, targets, weights)
                loss.backward()
            except Exception as error:
                if step > 0 or not self.model.compiled:
                    raise
                self.log(f"torch.compile failed, going on without: {error}")
                self.model.wrap(False)
                self.model.zero_grad(set_to_none=True)
                continue
            self.step(step, progress)
            losses.append(loss.detach())
            step, tokens, window = step + 1, tokens + ids.numel(), window + ids.numel()
            if step % 4 == 0:
                losses[-1].item()  # do not queue further ahead than this
            if time.time() - spoken >= min(10, args.eval_every):
                mean = torch.stack(losses).mean().item()
                rate = window / (time.time() - spoken)
                self.log(
                    f"step {step}  loss {mean:.4f}  {rate / 1e3:.0f} k tokens/s  {tokens / 1e6:.0f} M tokens  "
                    f"time {progress:.0%}  reused {self.batches.reused}"
                )
                losses, window, spoken = [], 0, time.time()
                if not math.isfinite(mean):
                    self.recover()
            if time.time() - evaluated >= args.eval_every:
                before = time.time()
                self.evaluate(cases, step)
                evaluated = time.time()
                spoken += evaluated - before
        self.log(f"{step} steps, {tokens / 1e6:.0f} M tokens")
        # The last weights are the model unless something went wrong: the learning rate has fallen to zero.
        self.evaluate(cases, step)
        self.evaluate(self.cases(2 * args.eval_cases, "last"), step, save=False)
        self.log(f"done, saved in {args.out}")

    def step(self, step, progress):
        rate = min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, (1.0 - progress) / (1.0 - DECAY_FROM)) * self.rate
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * max(rate, 0.0)
            optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def recover(self):
        """After a loss that is no number: the best model so far, and smaller steps."""
        self.rate *= 0.5
        if (self.args.out / "model.safetensors").exists():
            self.model.load(self.args.out / "model.safetensors")
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self.log(f"the loss is no number: back to the best model, rate times {self.rate}")

    # --- evaluation ---

    def cases(self, count, name="held out"):
        documents = self.documents
        documents.r.seed(f"{name} cases")
        made = [documents.evaluation(task, count, self.eval_tokens) for task in tasks.EVALUATED]
        prose = documents.encode([(ROOT / "crates/tasks/src/prose.txt").read_text()])[0]
        rows = len(prose) // (self.eval_tokens + 1)
        prose = prose[: rows * (self.eval_tokens + 1)].reshape(rows, -1)
        return made + [(prose, np.ones((rows, self.eval_tokens), bool))]

    def predictions(self, ids):
        """For each row: whether each next token is the most likely one, and its loss. Rows are padded to a whole
        step, so that nothing is compiled again."""
        torch, rows = self.torch, self.step_tokens // self.eval_tokens
        right, losses = [], []
        for start in range(0, len(ids), rows):
            part = ids[start : start + rows]
            padded = np.zeros((rows, ids.shape[1]), ids.dtype)
            padded[: len(part)] = part
            inputs, targets, _ = self.batch(padded, np.zeros((1, 1)))
            with torch.no_grad():
                hit, loss = self.model.judge(inputs, targets)
            right.append(hit[: len(part)].cpu().numpy())
            losses.append(loss[: len(part)].float().cpu().numpy())
        return np.concatenate(right), np.concatenate(losses)

    def evaluate(self, cases, step, save=True):
        """Exact match of whole answers. Greedy decoding writes the right answer exactly if each of its tokens is
        the most likely one after the right ones before it, so one forward pass tells."""
        torch = self.torch
        masters = [p.detach().clone() for p in self.model.parameters()]
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(p.bfloat16().float())  # what is saved
        sizes = [len(ids) for ids, _ in cases]
        right, losses = self.predictions(np.concatenate([ids.astype(np.int32) for ids, _ in cases]))
        at, parts, scores, total = 0, [], [], 0.0
        for name, (_, answers), size in zip([*tasks.EVALUATED, "prose"], cases, sizes):
            hit, loss = right[at : at + size], losses[at : at + size]
            mean = float(loss[answers].mean())
            if name == "prose":
                parts.append(f"prose loss {mean:.3f}")
            else:
                scores.append(float((hit | ~answers).all(1).mean()))
                total += mean
                parts.append(f"{name} {scores[-1]:.1%} ({hit[answers].mean():.4f})")
            at += size
        mean = float(np.mean(scores))
        self.log(f"EVAL step {step}  mean {mean:.1%}  " + "  ".join(parts))
        # Equal scores: the lower loss.
        if save and math.isfinite(total) and (mean, -total) > self.best:
            self.best = (mean, -total)
            self.save()
        with torch.no_grad():
            for p, master in zip(self.model.parameters(), masters):
                p.copy_(master)

    def save(self):
        out = self.args.out
        partial = out / "model.safetensors.partial"
        self.model.save(partial)
        partial.chmod(0o644)
        partial.replace(out / "model.safetensors")
        (out / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        generation = {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": False}
        (out / "generation_config.json").write_text(json.dumps(generation) + "\n")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(TOKENIZER / name, out / name)
        settings = json.loads((out / "tokenizer_config.json").read_text())
        settings["model_max_length"] = self.config["max_position_embeddings"]
        (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        size = (out / "model.safetensors").stat().st_size
        self.log(f"saved the best so far, {size / 2**20:.2f} MiB")


def check(folder):
    """The saved model in transformers and in this file's own forward pass."""
    import model
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = json.loads((folder / "config.json").read_text())
    own = model.Qwen2(config, device, compiled=False)
    own.load(folder / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    missing = [name for name, p in theirs.named_parameters() if not torch.isfinite(p).all()]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents = tasks.Documents(ROOT, Tokenizer.from_file(str(folder / "tokenizer.json")), "check")
    ids, _ = documents.evaluation("niah_lines", 1, 1024)
    length = int(np.flatnonzero(ids[0] == 2)[-1]) + 1
    ids = torch.from_numpy(ids[:, :length].astype(np.int64)).to(device)
    with torch.no_grad():
        right = theirs(ids).logits.float()
        mine = own.logits(ids).float()
        prompt = ids[:, : int((ids[0] == 1).nonzero()[-1]) + 5]
        written = theirs.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    difference = (right.log_softmax(-1) - mine.log_softmax(-1)).abs()
    print(f"log-probabilities differ by {difference.max():.4f} at most, {difference.mean():.5f} in the mean")
    print("expected", repr(tokenizer.decode(ids[0, prompt.shape[1] :])), "written", repr(tokenizer.decode(written)))
    if missing or difference.mean() > 0.05:
        sys.exit("transformers reads another model")


if __name__ == "__main__":
    main()
