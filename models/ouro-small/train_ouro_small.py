# SPDX-License-Identifier: Apache-2.0
"""Train ouro-small: a byte-level looped transformer in the Hugging Face Ouro layout (sandwich RMSNorm, RoPE, SwiGLU, layers shared by four
loops, final norm after every loop, exit gate) on public-domain text and tasks that need several steps (tasks.py).

  python3 train_ouro_small.py --seconds 230 --out OUTPUT_FOLDER        one CUDA GPU, PyTorch 2.5 or newer, numpy, safetensors

The run ends by itself after --seconds of wall time: the learning rate follows the clock. Written: config.json, BF16 shards with their index, and
eval.json: bits per byte and accuracy of every loop on held-out text and on each task. The order of batches depends on the worker processes,
so weights are not reproduced bit for bit.

Why late loops help here: cross-entropy weighs mostly on the last loop (--loop-weights), the physical layers are few, the tasks need more
serial steps than one loop has layers, and the text is read a few times only, for a model that has memorized its text is over-confident on other
text, the more so the more it computes. The gate learns from detached states, so it does not bend them.
"""
import time
STARTED = time.time()
import argparse, json, math, os, pathlib, random, sys, multiprocessing as mp
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import tasks

p = argparse.ArgumentParser()
p.add_argument("--out", required=True, help="folder for the checkpoint and eval.json")
p.add_argument("--seconds", type=float, default=230, help="wall time of the whole run, evaluation included")
p.add_argument("--corpus", default=str(HERE.parent / "ouro-tiny" / "corpus"), help="folder of *.train.txt.xz")
p.add_argument("--held", default=str(HERE.parent.parent / "data" / "corpus"), help="folder of *.held.txt")
p.add_argument("--layers", type=int, default=2)
p.add_argument("--hidden", type=int, default=640)
p.add_argument("--heads", type=int, default=5)
p.add_argument("--inter", type=int, default=1536)
p.add_argument("--seq", type=int, default=2048)
p.add_argument("--batch", type=int, default=32)
p.add_argument("--lr", type=float, default=2e-3)
p.add_argument("--dropout", type=float, default=0.0, help="of the two branches of a layer")
p.add_argument("--loop-weights", default="0.05,0.10,0.25,0.60", help="share of each loop's cross-entropy")
p.add_argument("--text-share", type=float, default=0.16, help="share of sequences that are prose")
p.add_argument("--exit-cost", type=float, default=0.03, help="nats that one more loop must gain, for the gate")
p.add_argument("--workers", type=int, default=4, help="processes that make sequences")
p.add_argument("--seed", type=int, default=1)
p.add_argument("--no-compile", action="store_true")
p.add_argument("--device", default="cuda")
p.add_argument("--eval-sequences", type=int, default=16, help="sequences of each task in the final evaluation")
a = p.parse_args()
VOCAB, LOOPS, EPS, THETA = 264, 4, 1e-6, 10000.0
LOOP_WEIGHTS = [float(x) for x in a.loop_weights.split(",")]
if len(LOOP_WEIGHTS) != LOOPS or abs(sum(LOOP_WEIGHTS) - 1) > 1e-6: p.error("--loop-weights: four numbers that sum to 1")
if a.hidden % a.heads: p.error("--hidden: not a multiple of --heads")
GATE_LIMIT = 0.5  # gate logits above this are penalised: below 1, all loops run where an implementation compares with threshold 1 in BF16


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
        return self.weight.to(x.dtype) * h.to(x.dtype)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(a.hidden, a.hidden, bias=False) for _ in range(4))

    def forward(self, x, cos, sin):
        B, T, H = x.shape
        D = H // a.heads
        q, k, v = (proj(x).view(B, T, a.heads, D).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        rotate = lambda t: torch.cat((-t[..., D // 2 :], t[..., : D // 2]), -1)
        q = q * cos + rotate(q) * sin
        k = k * cos + rotate(k) * sin
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(o.transpose(1, 2).reshape(B, T, H))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(a.hidden, a.inter, bias=False)
        self.up_proj = nn.Linear(a.hidden, a.inter, bias=False)
        self.down_proj = nn.Linear(a.inter, a.hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = Attention(), MLP()
        self.input_layernorm, self.input_layernorm_2, self.post_attention_layernorm, self.post_attention_layernorm_2 = (Norm(a.hidden) for _ in range(4))

    def forward(self, x, cos, sin):
        x = x + F.dropout(self.input_layernorm_2(self.self_attn(self.input_layernorm(x), cos, sin)), a.dropout, self.training)
        return x + F.dropout(self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x))), a.dropout, self.training)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, a.hidden)
        self.layers = nn.ModuleList(Layer() for _ in range(a.layers))
        self.norm = Norm(a.hidden)
        self.early_exit_gate = nn.Linear(a.hidden, 1)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model()
        self.lm_head = nn.Linear(a.hidden, VOCAB, bias=False)
        for name, q in self.named_parameters():
            if q.dim() == 2: nn.init.normal_(q, 0, 0.5 if "embed" in name else 0.02)
        nn.init.zeros_(self.model.early_exit_gate.weight)
        nn.init.constant_(self.model.early_exit_gate.bias, -1.0)

    def rope(self, T, dtype, device):
        D = a.hidden // a.heads
        inverse = 1.0 / (THETA ** (torch.arange(0, D, 2, device=device).float() / D))
        angle = torch.outer(torch.arange(T, device=device).float(), inverse)
        angle = torch.cat((angle, angle), -1)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def forward(self, ids, eager=False):
        """ids int64 [B, T] -> the normed states of the loops, bfloat16 [LOOPS, B, T, hidden]."""
        x = self.model.embed_tokens(ids).to(torch.bfloat16)
        cos, sin = self.rope(ids.shape[1], x.dtype, ids.device)
        states = []
        for _ in range(LOOPS):
            for layer in self.model.layers:
                x = layer.forward(x, cos, sin) if eager else layer(x, cos, sin)  # forward: past torch.compile
            x = self.model.norm(x)
            states.append(x)
        return torch.stack(states)


def exit_distribution(gates):
    """gates float [LOOPS, ...] logits -> probability of leaving after each loop, same shape; the last loop takes the remainder."""
    stay = torch.ones_like(gates[0])
    out = []
    for g in gates[:-1]:
        leave = torch.sigmoid(g)
        out.append(leave * stay)
        stay = stay * (1 - leave)
    return torch.stack(out + [stay])


def cross_entropy(model, states, targets):
    """-> float [LOOPS, B, T] in nats, and the logits"""
    logits = model.lm_head(states).float()
    ce = F.cross_entropy(logits.flatten(0, -2), targets.expand(LOOPS, *targets.shape).reshape(-1), reduction="none")
    return ce.view(LOOPS, *targets.shape), logits


def loss_function(model, ids, weights, loop_weights, loop_cost):
    states = model(ids[:, :-1])
    targets, w = ids[:, 1:], weights[:, 1:]
    ce, _ = cross_entropy(model, states, targets)
    total = w.sum()
    language = ((ce * loop_weights.view(-1, 1, 1)).sum(0) * w).sum() / total
    # The gate: expected loss plus the cost of the loops, an entropy term against collapse, and a bound on its logits. It moves nothing else.
    gates = model.model.early_exit_gate(states.detach()).float().squeeze(-1)
    leave = exit_distribution(gates)
    entropy = -(leave * (leave + 1e-9).log()).sum(0)
    gate_weight = w.clamp(max=1.0) + 0.1
    expected = (leave * (ce.detach() + loop_cost.view(-1, 1, 1))).sum(0) - 0.05 * entropy
    gate = (expected * gate_weight).sum() / gate_weight.sum() + F.relu(gates - GATE_LIMIT).pow(2).mean()
    return language + gate, (ce.detach() * w).sum((1, 2)) / total


# ---- data --------------------------------------------------------------------------------------------------------------------------------

def worker(queue, seed):
    texts, r = tasks.load_training(a.corpus), random.Random(seed)
    while True:
        made = [tasks.training_sequence(r, a.seq, texts, a.text_share) for _ in range(a.batch)]
        queue.put((np.array([ids for ids, _ in made], np.int16), np.array([w for _, w in made], np.uint8)))


def evaluation_sets(sequences):
    """name -> sequences. Text: every whole block of the held-out files. Tasks: seeded, prose from the held-out files."""
    held = tasks.load_held_out(a.held)
    sets = {f"text {name}": tasks.held_out_blocks(text, a.seq)[: 4 * sequences] for name, text in held.items()}
    levels = [("needle", 1), ("needle", 4), ("needle", 6), ("kv", 8), ("kv", 32), ("copy", None), ("sum", 4), ("sum", 8), ("sum", 16)]
    levels += [("chain", h) for h in tasks.HOPS] + [("swap", s) for s in tasks.SWAPS]
    for kind, level in levels:
        r = random.Random(f"ouro-small {kind} {level}")
        sets[kind if level is None else f"{kind} {level}"] = [tasks.task(r, kind, a.seq, held, level) for _ in range(sequences)]
    return sets


@torch.no_grad()
def evaluate(model, sequences):
    model.eval()
    result, widest, leaving, tokens = {}, -1e9, torch.zeros(LOOPS, device=a.device), 0
    for name, made in evaluation_sets(sequences).items():
        threshold = tasks.TEXT if name.startswith(("text", "copy")) else tasks.ANSWER
        nats, right, count = torch.zeros(LOOPS, device=a.device), torch.zeros(LOOPS, device=a.device), 0
        for i in range(0, len(made), 16):
            ids = torch.tensor([s[0] for s in made[i : i + 16]], device=a.device)
            scored = torch.tensor([s[1] for s in made[i : i + 16]], device=a.device)[:, 1:] >= threshold
            with torch.autocast(a.device, torch.bfloat16):
                states = model(ids[:, :-1], eager=True)
                ce, logits = cross_entropy(model, states, ids[:, 1:])
                gates = model.model.early_exit_gate(states).float().squeeze(-1)
            nats += (ce * scored).sum((1, 2))
            right += ((logits.argmax(-1) == ids[:, 1:]) & scored).sum((1, 2))
            count += int(scored.sum())
            widest = max(widest, gates.max().item())
            leaving += exit_distribution(gates).sum((1, 2))
            tokens += gates[0].numel()
        result[name] = {"scored": count, "bits": [round(x, 4) for x in (nats / max(count, 1) / math.log(2)).tolist()],
                        "accuracy": [round(x, 4) for x in (right / max(count, 1)).tolist()]}
    texts = [v for k, v in result.items() if k.startswith("text")]
    scored = sum(t["scored"] for t in texts)
    result["text"] = {"scored": scored, **{key: [round(sum(t[key][i] * t["scored"] for t in texts) / max(scored, 1), 4) for i in range(LOOPS)]
                                           for key in ("bits", "accuracy")}}
    model.train()
    return result, {"largest gate logit": widest, "exit distribution": [round(x, 4) for x in (leaving / tokens).tolist()]}


def improves(bits, step):
    return all(later < earlier - step for earlier, later in zip(bits, bits[1:]))


def show(result, gate):
    print(f"{'':14} {'scored':>7}  {'bits per byte, loops 1 to 4':34} top-1 %, loops 1 to 4", flush=True)
    for name, row in result.items():
        print(f"{name:14} {row['scored']:7}  {' '.join(f'{x:8.4f}' for x in row['bits'])}{'   every loop better' if improves(row['bits'], 0) else ' ' * 20} "
              f"{' '.join(f'{100 * x:6.2f}' for x in row['accuracy'])}")
    print(gate, flush=True)


def save(model, record):
    from safetensors.torch import save_file
    out = pathlib.Path(a.out)
    out.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().to(torch.bfloat16).contiguous().cpu() for k, v in model.state_dict().items()}
    size = lambda t: t.numel() * t.element_size()
    total, filled, shards = sum(map(size, tensors.values())), 0, [{}, {}]
    for name in sorted(tensors):  # two shards of about the same size, tensors in the order of their names
        shards[1 if filled + size(tensors[name]) / 2 > total / 2 else 0][name] = tensors[name]
        filled += size(tensors[name])
    names = [f"model-{i + 1:05d}-of-00002.safetensors" for i in range(2)]
    for name, shard in zip(names, shards):
        save_file(shard, str(out / name), {"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": {t: name for name, shard in zip(names, shards) for t in shard}}
    config = {"architectures": ["OuroForCausalLM"], "model_type": "ouro", "vocab_size": VOCAB, "hidden_size": a.hidden, "intermediate_size": a.inter,
              "num_hidden_layers": a.layers, "num_attention_heads": a.heads, "num_key_value_heads": a.heads, "head_dim": a.hidden // a.heads,
              "hidden_act": "silu", "max_position_embeddings": a.seq, "rms_norm_eps": EPS, "rope_theta": THETA, "rope_scaling": None,
              "tie_word_embeddings": False, "total_ut_steps": LOOPS, "early_exit_threshold": 1.0, "attention_dropout": 0.0,
              "use_sliding_window": False, "bos_token_id": tasks.BOS, "eos_token_id": 257, "pad_token_id": 258, "torch_dtype": "bfloat16"}
    for name, content in (("model.safetensors.index.json", index), ("config.json", config), ("eval.json", record)):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    print("saved", {f.name: f.stat().st_size for f in sorted(out.iterdir())}, flush=True)


def main():
    # Worker processes are forked before CUDA starts.
    queue = mp.Queue(16)
    processes = [mp.Process(target=worker, args=(queue, 1000 * a.seed + i), daemon=True) for i in range(a.workers)]
    for process in processes: process.start()
    torch.manual_seed(a.seed)
    torch.set_float32_matmul_precision("high")
    model = LM().to(a.device)
    parameters = sum(q.numel() for q in model.parameters())
    print("parameters", parameters, "arguments", vars(a), flush=True)
    loop_weights = torch.tensor(LOOP_WEIGHTS, device=a.device)
    loop_cost = torch.arange(LOOPS, device=a.device).float() * a.exit_cost
    matrices = [q for n, q in model.named_parameters() if q.dim() == 2 and "early_exit_gate" not in n]
    others = [q for n, q in model.named_parameters() if q.dim() < 2 or "early_exit_gate" in n]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=a.lr, betas=(0.9, 0.95), **({"fused": True} if a.device == "cuda" else {}))

    def step_gradients():
        ids, weights = queue.get()
        ids, weights = torch.from_numpy(ids), torch.from_numpy(weights)
        if a.device == "cuda": ids, weights = ids.pin_memory(), weights.pin_memory()
        ids = ids.to(a.device, non_blocking=True).long()
        weights = weights.to(a.device, non_blocking=True).float() / tasks.TEXT
        with torch.autocast(a.device, torch.bfloat16):
            loss, ce = loss_function(model, ids, weights, loop_weights, loop_cost)
        loss.backward()
        return loss.detach(), ce

    model.train()
    if not a.no_compile:
        try:
            for layer in model.model.layers: layer.compile()
            step_gradients()
        except Exception as error:
            print("torch.compile failed, going on without it:", str(error)[:500], flush=True)
            for layer in model.model.layers: layer._compiled_call_impl = None
        optimizer.zero_grad(set_to_none=True)
        print(f"compiled at {time.time() - STARTED:.1f} s", flush=True)

    reserve = min(20.0, 0.1 * a.seconds)  # for the evaluation and the files
    begin, end = time.time() - STARTED, a.seconds - reserve
    steps, tokens, logged, looks = 0, 0, (time.time(), 0), [0.3, 0.6]
    while (now := time.time() - STARTED) < end:
        progress = (now - begin) / (end - begin)
        if looks and progress > looks[0]:
            print(f"---- evaluation at {100 * looks.pop(0):.0f} %", flush=True)
            show(*evaluate(model, 4))
        rate = a.lr * min(1.0, (steps + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
        for group in optimizer.param_groups: group["lr"] = rate
        loss, ce = step_gradients()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        tokens += a.batch * a.seq
        if steps % 200 == 0 or steps in (1, 10, 50):
            values = [round(x, 4) for x in ce.tolist()]  # waits for the device
            speed = (tokens - logged[1]) / (time.time() - logged[0])
            logged = (time.time(), tokens)
            print(f"step {steps} loss {loss.item():.4f} nats of loops {values} gradient {norm.item():.2f} rate {rate:.6f} tokens/s {speed:.0f} "
                  f"queue {queue.qsize()} at {time.time() - STARTED:.0f} s", flush=True)
    if a.device == "cuda": torch.cuda.synchronize()
    trained = time.time() - STARTED
    for process in processes: process.terminate()

    with torch.no_grad():  # what is measured is what is saved
        for q in model.parameters(): q.copy_(q.to(torch.bfloat16).float())
    result, gate = evaluate(model, a.eval_sequences)
    show(result, gate)
    record = {"arguments": vars(a), "parameters": parameters, "steps": steps, "tokens": tokens, "seconds trained": round(trained, 1),
              "torch": torch.__version__, "device": torch.cuda.get_device_name(0) if a.device == "cuda" else a.device,
              "gate": gate, "text improves with every loop": improves(result["text"]["bits"], 0), "quality": result}
    for key in ("corpus", "held", "out"): record["arguments"] = {k: v for k, v in record["arguments"].items() if k != key}
    save(model, record)
    print(f"end at {time.time() - STARTED:.1f} s", flush=True)


if __name__ == "__main__":
    main()
