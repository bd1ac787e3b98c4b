#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What PyTorch gives at the shape of Ouro-1.4B on this GPU: `loopgauge bench peers` runs this script beside its own rows.

The model is written as a careful user of PyTorch would write it for speed: q/k/v in one weight and gate and up in another, a static K/V cache for each loop
and layer, the four sandwich norms of a layer, everything between two attentions in one function for torch.compile, the whole decode step as one CUDA graph, and
of the backends of scaled_dot_product_attention the one that is fastest at each shape. Weights, K/V and prompts are random.

  dense    every loop attends to every position
  sparse   loop 2 attends to every position and keeps its output, the keys that torch.topk finds (10 %) and their share m of the probability; loops 3 and 4
           attend to those keys only and correct loop 2's output: O = O_ref + m (A(q, K_S, V_S) - A(q_ref, K_ref_S, V_ref_S))

Prints one JSON object a line: {"kind": "peer"|"announce"|"row"|"left_out", ...}; times in microseconds between CUDA events, in the order in which they were
taken.
Exit code 0; 2 usage; 4 without PyTorch or without a CUDA device, with one sentence on standard error.
"""
import argparse
import dataclasses
import json
import logging
import math
import signal
import statistics
import sys
import time

SPARSE_SHARE = 0.10
EXIT_UNSUPPORTED = 4


def say(kind, **fields):
    print(json.dumps({"kind": kind, **fields}), flush=True)


def fail(message):
    print(f"peers.py: {message}", file=sys.stderr)
    sys.exit(EXIT_UNSUPPORTED)


try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    fail(f"{sys.executable} has no PyTorch to compare with ({error})")


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int = 24
    loops: int = 4
    hidden: int = 2048
    heads: int = 16
    head_dim: int = 128
    intermediate: int = 5632
    vocab: int = 49152
    epsilon: float = 1e-6
    theta: float = 1e6

    def layer_weight_bytes(self):
        return 2 * (4 * self.hidden * self.hidden + 3 * self.intermediate * self.hidden)

    def step_bytes(self, context, batch):
        """What a dense decode step must read at least."""
        kv = 2 * 2 * self.heads * self.head_dim * (context + 1)
        return self.loops * self.layers * (self.layer_weight_bytes() + batch * kv) + 2 * self.vocab * self.hidden

    def attention_flops(self, length):
        return self.loops * self.layers * 4 * self.heads * self.head_dim * length * (length + 1) // 2

    def prefill_flops(self, length):
        return self.loops * self.layers * self.layer_weight_bytes() * length + self.attention_flops(length)


# ---- the model; x [batch, tokens, hidden], q, k, v [batch, heads, tokens, head_dim], all BF16

def norm(x, weight, shape):
    return F.rms_norm(x, (shape.hidden,), weight, shape.epsilon)


def rotated(x, cosine, sine):
    low, high = x.chunk(2, -1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1)


def before_attention(shape, x, w, cosine, sine, k_place, v_place):
    """Writes k and v into their places of the cache; returns q."""
    input_norm, qkv = w
    q, k, v = F.linear(norm(x, input_norm, shape), qkv).unflatten(-1, (3, shape.heads, shape.head_dim)).permute(2, 0, 3, 1, 4)
    k_place.copy_(rotated(k, cosine, sine))
    v_place.copy_(v)
    return rotated(q, cosine, sine)


def after_attention(shape, x, attended, w):
    o_proj, norm_after, norm_before_mlp, gate_up, down, norm_after_mlp = w
    x = x + norm(F.linear(attended.transpose(1, 2).flatten(2), o_proj), norm_after, shape)
    gate, up = F.linear(norm(x, norm_before_mlp, shape), gate_up).chunk(2, -1)
    return x + norm(F.linear(F.silu(gate) * up, down), norm_after_mlp, shape)


def between_layers(shape, x, attended, behind, ahead, cosine, sine, k_place, v_place):
    x = after_attention(shape, x, attended, behind)
    return x, before_attention(shape, x, ahead, cosine, sine, k_place, v_place)


def between_loops(shape, x, attended, behind, final_norm, ahead, cosine, sine, k_place, v_place):
    x = norm(after_attention(shape, x, attended, behind), final_norm, shape)
    return x, before_attention(shape, x, ahead, cosine, sine, k_place, v_place)


class Model:
    def __init__(self, shape, device):
        self.shape, self.device = shape, device
        generator = torch.Generator(device).manual_seed(1)

        def random(*size, scale=0.03, mean=0.0):
            return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(mean, scale, generator=generator)

        def norm_weight():
            return random(shape.hidden, scale=0.1, mean=1.0)

        self.random = random
        self.embedding, self.head, self.final_norm = random(shape.vocab, shape.hidden, scale=1.0), random(shape.vocab, shape.hidden), norm_weight()
        self.ahead, self.behind = [], []  # what comes before and what comes after the attention of each layer
        for _ in range(shape.layers):
            self.ahead.append((norm_weight(), random(3 * shape.hidden, shape.hidden)))
            self.behind.append((random(shape.hidden, shape.hidden), norm_weight(), norm_weight(), random(2 * shape.intermediate, shape.hidden),
                                random(shape.hidden, shape.intermediate), norm_weight()))
        self.between_layers, self.between_loops = between_layers, between_loops

    def rope(self, first, count):
        half = self.shape.head_dim // 2
        frequency = self.shape.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(first, first + count, dtype=torch.float64)[:, None] * frequency
        return [table.to(self.device, torch.bfloat16) for table in (angle.cos(), angle.sin())]

    def cache(self, batch, positions):
        """K and V of every loop and layer, random."""
        s = self.shape
        return [[tuple(self.random(batch, s.heads, positions, s.head_dim, scale=1.0) for _ in range(2)) for _ in range(s.layers)] for _ in range(s.loops)]

    def forward(self, tokens, first, cache, rope, attend):
        """H after the last loop of tokens at positions first, first + 1, ...; attend(loop, layer, q) -> [batch, heads, tokens, head_dim]."""
        s, count = self.shape, tokens.shape[1]
        places = [(loop, layer) for loop in range(s.loops) for layer in range(s.layers)]

        def at(place):
            k, v = cache[place[0]][place[1]]
            return k[:, :, first:first + count], v[:, :, first:first + count]

        x = F.embedding(tokens, self.embedding)
        q = before_attention(s, x, self.ahead[0], *rope, *at(places[0]))
        for here, following in zip(places, places[1:]):
            attended = attend(*here, q)
            behind, ahead = self.behind[here[1]], self.ahead[following[1]]
            if following[1] > 0:
                x, q = self.between_layers(s, x, attended, behind, ahead, *rope, *at(following))
            else:
                x, q = self.between_loops(s, x, attended, behind, self.final_norm, ahead, *rope, *at(following))
        return norm(after_attention(s, x, attend(*places[-1], q), self.behind[-1]), self.final_norm, s)

    def next_token(self, states):
        return F.linear(states[:, -1:], self.head).argmax(-1)


def dense_attention(cache, length, causal=False):
    def attend(loop, layer, q):
        k, v = cache[loop][layer]
        return F.scaled_dot_product_attention(q, k[:, :, :length], v[:, :, :length], is_causal=causal)
    return attend


def selected(plane, rows):
    """Rows [batch, heads, keys] of a plane [batch, heads, positions, head_dim]; `rows` count through the whole plane."""
    return plane.flatten(0, 2).index_select(0, rows.flatten()).view(*rows.shape, plane.shape[-1])


def sparse_attention(cache, length, share=SPARSE_SHARE):
    keys = max(1, math.ceil(share * length))
    kept, first_rows = {}, []

    def attend(loop, layer, q):
        k, v = cache[loop][layer]
        if loop == 0:
            return F.scaled_dot_product_attention(q, k[:, :, :length], v[:, :, :length])
        if loop == 1:
            batch, heads, positions, width = k.shape
            if not first_rows:
                first_rows.append(torch.arange(batch * heads, device=k.device).view(batch, heads, 1) * positions)
            output = F.scaled_dot_product_attention(q, k[:, :, :length], v[:, :, :length])
            logits = torch.matmul(q * width ** -0.5, k[:, :, :length].transpose(-1, -2)).squeeze(2)
            values, index = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), keys, sorted=False)
            mass, rows = values.sum(-1).to(q.dtype)[..., None, None], index + first_rows[0]
            reference = F.scaled_dot_product_attention(q, selected(k, rows), selected(v, rows))
            kept[layer] = (rows, mass, torch.addcmul(output, mass, reference, value=-1))
            return output
        rows, mass, rest = kept[layer]
        return torch.addcmul(rest, mass, F.scaled_dot_product_attention(q, selected(k, rows), selected(v, rows)))
    return attend


# ---- time

def as_graph(work):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def timed(work, repeats):
    for _ in range(2):
        work()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return times


class CompileTimeout(Exception):
    pass


class Compiled:
    """The functions between two attentions, compiled as long as there is time for it: afterwards those of new extents run as they are written."""

    def __init__(self, seconds, tuned):
        self.left, self.reason, self.tuned = seconds, "" if seconds > 0 else "no time was given to torch.compile", tuned
        self.ready = set()  # extents (batch, tokens) that are compiled
        torch._dynamo.config.recompile_limit = 64
        # A compiler of its own for each: what one has tuned must not be found by the other.
        options = {"coordinate_descent_tuning": tuned}
        self.functions = [torch.compile(function, dynamic=False, fullgraph=True, options=options) for function in (between_layers, between_loops)]

    @property
    def name(self):
        return "compiled and tuned" if self.tuned else "compiled"

    def use(self, model, extents, work):
        """Makes the model use the compiled functions; work() runs it at these extents, which compiles them. False where that takes too long or fails."""
        if extents not in self.ready and not self.reason:
            model.between_layers, model.between_loops = self.functions
            self.compile(extents, work)
        usable = extents in self.ready
        model.between_layers, model.between_loops = self.functions if usable else (between_layers, between_loops)
        return usable

    def compile(self, extents, work):
        def interrupt(signum, frame):
            raise CompileTimeout

        deadline = time.monotonic() + self.left
        previous = signal.signal(signal.SIGALRM, interrupt)
        logging.disable(logging.CRITICAL)  # pages for every kernel whose tuning is interrupted
        # Again and again: what tunes kernels takes an exception for a kernel that does not work, and goes on with the next.
        signal.setitimer(signal.ITIMER_REAL, self.left, 0.2)
        try:
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ready.add(extents)
        except Exception as error:  # whatever a compiler may raise: the functions as they are written still run
            if time.monotonic() < deadline:
                self.reason = f"torch.compile failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
            logging.disable(logging.NOTSET)
        self.left = deadline - time.monotonic()
        if self.left <= 0 and not self.reason:
            self.reason = "torch.compile was given no more time"


BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION, "memory-efficient": SDPBackend.EFFICIENT_ATTENTION}


def fastest_backend(work, repeats):
    """(name, times) of the backend with the shortest median for work(), captured."""
    best = None
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel([backend]):
                times = timed(as_graph(work), repeats)
        except RuntimeError:  # this backend does not take these extents
            torch.cuda.synchronize()
            continue
        if best is None or statistics.median(times) < statistics.median(best[1]):
            best = (name, times)
    if best is None:
        raise RuntimeError("no backend of scaled_dot_product_attention takes these extents")
    return best


class Bench:
    def __init__(self, model, options):
        self.model, self.options = model, options
        self.compiled = Compiled(options.compile_seconds, tuned=False)
        self.tuned = Compiled(options.tune_seconds, tuned=True)

    def row(self, what, setting, implementation, context, batch, times, bytes=0, flops=0):
        say("row", what=what, setting=setting, implementation=implementation, context=context, batch=batch, samples_us=times, bytes=bytes, flops=flops,
            peak_bytes=torch.cuda.max_memory_allocated())

    def attempt(self, name, work):
        say("announce", what=name)
        torch.cuda.reset_peak_memory_stats()
        try:
            work()
        except torch.cuda.OutOfMemoryError as error:
            say("left_out", what=name, reason=str(error).splitlines()[0])
        except RuntimeError as error:
            say("left_out", what=name, reason=f"{type(error).__name__}: {str(error).splitlines()[0][:300]}")

    def with_compilers(self, name, extents, work, compilers):
        """Calls work(how) with each compiler that has time for the functions, and with them as they are written where none has."""
        ran = False
        for compiler in compilers:
            if compiler.use(self.model, extents, lambda: work(None)):
                work(compiler.name)
                ran = True
                self.model.between_layers, self.model.between_loops = between_layers, between_loops
            else:
                say("left_out", what=f"{name}, {compiler.name}", reason=compiler.reason)
        if not ran:
            work("eager")

    def decode(self, cache, context, batch):
        model, s, repeats = self.model, self.model.shape, self.options.repeats
        length = context + 1
        q = model.random(batch, s.heads, 1, s.head_dim, scale=1.0)
        one_loop = dense_attention(cache, length)
        backend, times = fastest_backend(lambda: [one_loop(0, layer, q) for layer in range(s.layers)], repeats)
        self.row("attention_decode.loop1", "dense", backend, context, batch, [t / s.layers for t in times], bytes=4 * batch * s.heads * s.head_dim * length)
        tokens, rope = torch.randint(s.vocab, (batch, 1), device=model.device), model.rope(context, 1)

        def measure(setting, attend, bytes):
            def step():
                tokens.copy_(model.next_token(model.forward(tokens, context, cache, rope, attend)))

            def work(how):
                if how is None:
                    step()
                else:
                    self.row("decode step", setting, f"{how}, CUDA graph, {backend}", context, batch, timed(as_graph(step), repeats), bytes=bytes)

            compilers = [self.compiled] + ([self.tuned] if batch == 1 else [])  # tuning turns products with one row into kernels of their own
            with sdpa_kernel([BACKENDS[backend], SDPBackend.FLASH_ATTENTION], set_priority=True):
                self.with_compilers(f"decode step {setting}, context {context}, batch {batch}", (batch, 1), work, compilers)

        measure("dense", dense_attention(cache, length), s.step_bytes(context, batch))
        if context < self.options.sparse_from:
            return
        logits = torch.randn(batch, s.heads, length, device=model.device)
        keys = math.ceil(SPARSE_SHARE * length)
        self.row("select_keys", "sparse", "torch.topk", context, batch, timed(as_graph(lambda: torch.topk(logits, keys, sorted=False)), repeats),
                 bytes=4 * batch * s.heads * length)
        measure("sparse", sparse_attention(cache, length), 0)

    def prefill(self, cache, length):
        model, s, repeats = self.model, self.model.shape, min(5, self.options.repeats)
        q = model.random(1, s.heads, length, s.head_dim, scale=1.0)
        attend = dense_attention(cache, length, causal=True)
        backend, _ = fastest_backend(lambda: attend(0, 0, q), 3)
        tokens, rope = torch.randint(s.vocab, (1, length), device=model.device), model.rope(0, length)

        def work(how):
            def prompt():
                model.next_token(model.forward(tokens, 0, cache, rope, attend))

            if how is None:
                prompt()
            else:
                self.row("prefill", "dense", f"{how}, {backend}", length, length, timed(prompt, repeats), flops=s.prefill_flops(length))

        with sdpa_kernel([BACKENDS[backend], SDPBackend.FLASH_ATTENTION], set_priority=True):
            self.with_compilers(f"prefill dense, {length} tokens", (1, length), work, [self.compiled])
            times = timed(lambda: [attend(loop, layer, q) for loop in range(s.loops) for layer in range(s.layers)], repeats)
        self.row("prefill.attention", "dense", backend, length, length, times, flops=s.attention_flops(length))

    def run(self):
        slack = 64  # places for new tokens
        for batch in sorted({batch for _, batch in self.options.shapes}):
            contexts = sorted(context for context, b in self.options.shapes if b == batch)
            prompts = sorted(self.options.prompts) if batch == 1 else []
            # One cache for all of them: the extents that torch.compile sees differ by batch and tokens only.
            cache = []
            positions = max(contexts + prompts) + slack
            self.attempt(f"K/V of {batch} x {positions} positions", lambda: cache.extend(self.model.cache(batch, positions)))
            if not cache:
                continue
            for context in contexts:
                self.attempt(f"decode, context {context}, batch {batch}", lambda: self.decode(cache, context, batch))
            for length in prompts:
                self.attempt(f"prefill, {length} tokens", lambda: self.prefill(cache, length))
            cache.clear()
            torch.cuda.empty_cache()
        if self.options.prompts and not any(batch == 1 for _, batch in self.options.shapes):
            cache = self.model.cache(1, max(self.options.prompts) + slack)
            for length in sorted(self.options.prompts):
                self.attempt(f"prefill, {length} tokens", lambda: self.prefill(cache, length))


@torch.no_grad()
def self_check():
    """The model agrees with itself, on the CPU and small: a decode step with the prompt one token longer, sparse attention that takes every key with dense."""
    model = Model(Shape(layers=3, hidden=64, heads=4, head_dim=16, intermediate=96, vocab=100), "cpu")
    length = 40
    tokens = torch.randint(100, (1, length + 1))
    whole, cache = model.cache(1, length + 8), model.cache(1, length + 8)
    expected = model.forward(tokens, 0, whole, model.rope(0, length + 1), dense_attention(whole, length + 1, causal=True))[:, -1]
    model.forward(tokens[:, :length], 0, cache, model.rope(0, length), dense_attention(cache, length, causal=True))
    worst = {}
    for name, attend in (("dense", dense_attention(cache, length + 1)), ("sparse", sparse_attention(cache, length + 1, share=1.0))):
        got = model.forward(tokens[:, length:], length, cache, model.rope(length, 1), attend)[:, -1]
        worst[name] = float((got - expected).float().abs().max() / expected.float().abs().max())
    tenth = model.forward(tokens[:, length:], length, cache, model.rope(length, 1), sparse_attention(cache, length + 1))[:, -1]
    worst["a tenth of the keys"] = float((tenth - expected).float().abs().max() / expected.float().abs().max())
    compiled = Compiled(120.0, tuned=False)
    together = [None]

    def prompt():
        together[0] = model.forward(tokens, 0, whole, model.rope(0, length + 1), dense_attention(whole, length + 1, causal=True))[:, -1]

    if compiled.use(model, (1, length + 1), prompt):
        prompt()
        worst["compiled"] = float((together[0] - expected).float().abs().max() / expected.float().abs().max())
    else:
        say("left_out", what="compiled", reason=compiled.reason)
    for name, distance in worst.items():
        say("check", what=name, distance=distance)
    return 0 if all(distance < 0.05 for name, distance in worst.items() if name != "a tenth of the keys") and worst["a tenth of the keys"] > 0 else 1


def shape_list(text):
    pairs = [tuple(int(number) for number in pair.split("x")) for pair in text.split(",") if pair]
    if any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
        raise ValueError(text)
    return pairs


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say what there is to measure with")
    parser.add_argument("--self-check", action="store_true", help="whether the model agrees with itself, on the CPU; measures nothing")
    parser.add_argument("--shapes", type=shape_list, default="2048x1,8192x1,32768x1,2048x8,8192x8", help="CONTEXTxBATCH of decode steps")
    parser.add_argument("--prompts", type=lambda text: [int(number) for number in text.split(",") if number], default="2048,8192", help="lengths of prompts")
    parser.add_argument("--sparse-from", type=int, default=8192, help="context from which the sparse variant is measured as well")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--compile-seconds", type=float, default=90, help="time for torch.compile in all; 0: eager only")
    parser.add_argument("--tune-seconds", type=float, default=60, help="time for tuned kernels of batch 1 in all; 0: none")
    options = parser.parse_args()
    if options.self_check:
        return self_check()
    if not torch.cuda.is_available():
        fail(f"PyTorch {torch.__version__} sees no CUDA device")
    device = torch.cuda.get_device_name()
    say("peer", description=f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, {device}")
    if options.check:
        return 0
    with torch.no_grad():
        say("announce", what="weights")
        Bench(Model(Shape(), torch.device("cuda")), options).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
