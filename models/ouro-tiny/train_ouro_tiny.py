# SPDX-License-Identifier: Apache-2.0
"""Train a small byte-level looped transformer with the Ouro layout (sandwich RMSNorm, RoPE, SwiGLU, shared
layers applied total_ut_steps times, final norm after every loop, early-exit gate) on public-domain text plus
retrieval, copy and arithmetic tasks. Saves bf16 safetensors in the Hugging Face Ouro layout.

Needs a CUDA GPU, PyTorch 2, numpy and safetensors:  python3 train_ouro_tiny.py --out OUTPUT_FOLDER
Training text is corpus/*.train.txt.xz beside this file, held-out text ../../data/corpus/*.held.txt."""
import argparse, json, lzma, math, os, pathlib, time, multiprocessing as mp
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F

HERE = pathlib.Path(__file__).resolve().parent
p = argparse.ArgumentParser()
p.add_argument("--data", default=str(HERE / "corpus"), help="folder of *.train.txt.xz")
p.add_argument("--held", default=str(HERE.parent.parent / "data" / "corpus"), help="folder of *.held.txt"); p.add_argument("--seconds", type=float, default=480)
p.add_argument("--state", default="state.pt"); p.add_argument("--total-steps", type=int, default=9000)
p.add_argument("--seq", type=int, default=1024); p.add_argument("--batch", type=int, default=64)
p.add_argument("--hidden", type=int, default=384); p.add_argument("--heads", type=int, default=3)
p.add_argument("--layers", type=int, default=4); p.add_argument("--inter", type=int, default=1024)
p.add_argument("--lr", type=float, default=2.5e-3); p.add_argument("--out", default="")
p.add_argument("--no-compile", action="store_true"); p.add_argument("--beta", type=float, default=0.05)
a = p.parse_args()
BOS, EOS, PAD, VOCAB, LOOPS = 256, 257, 258, 264, 4
torch.manual_seed(1); torch.set_float32_matmul_precision("high"); dev = "cuda"

class Norm(nn.Module):
    def __init__(s, d): super().__init__(); s.weight = nn.Parameter(torch.ones(d))
    def forward(s, x):
        h = x.float(); h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return s.weight * h.to(x.dtype)

class Attn(nn.Module):
    def __init__(s):
        super().__init__(); h = a.hidden
        s.q_proj, s.k_proj, s.v_proj, s.o_proj = (nn.Linear(h, h, bias=False) for _ in range(4))
    def forward(s, x, cos, sin):
        B, T, H = x.shape; D = H // a.heads
        q, k, v = (l(x).view(B, T, a.heads, D).transpose(1, 2) for l in (s.q_proj, s.k_proj, s.v_proj))
        rot = lambda t: torch.cat((-t[..., D // 2:], t[..., : D // 2]), -1)
        q = q * cos + rot(q) * sin; k = k * cos + rot(k) * sin
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return s.o_proj(o.transpose(1, 2).reshape(B, T, H))

class MLP(nn.Module):
    def __init__(s):
        super().__init__()
        s.gate_proj = nn.Linear(a.hidden, a.inter, bias=False); s.up_proj = nn.Linear(a.hidden, a.inter, bias=False)
        s.down_proj = nn.Linear(a.inter, a.hidden, bias=False)
    def forward(s, x): return s.down_proj(F.silu(s.gate_proj(x)) * s.up_proj(x))

class Layer(nn.Module):
    def __init__(s):
        super().__init__(); s.self_attn = Attn(); s.mlp = MLP()
        s.input_layernorm, s.input_layernorm_2, s.post_attention_layernorm, s.post_attention_layernorm_2 = (Norm(a.hidden) for _ in range(4))
    def forward(s, x, cos, sin):
        x = x + s.input_layernorm_2(s.self_attn(s.input_layernorm(x), cos, sin))
        return x + s.post_attention_layernorm_2(s.mlp(s.post_attention_layernorm(x)))

class Model(nn.Module):
    def __init__(s):
        super().__init__()
        s.embed_tokens = nn.Embedding(VOCAB, a.hidden); s.layers = nn.ModuleList(Layer() for _ in range(a.layers))
        s.norm = Norm(a.hidden); s.early_exit_gate = nn.Linear(a.hidden, 1)

class LM(nn.Module):
    def __init__(s):
        super().__init__(); s.model = Model(); s.lm_head = nn.Linear(a.hidden, VOCAB, bias=False)
        for n, q in s.named_parameters():
            if q.dim() == 2: nn.init.normal_(q, 0, 0.02 if "embed" not in n else 0.5)
        nn.init.zeros_(s.model.early_exit_gate.weight); nn.init.constant_(s.model.early_exit_gate.bias, -1.0)
    def rope(s, T, dtype):
        D = a.hidden // a.heads; inv = 1.0 / (10000.0 ** (torch.arange(0, D, 2, device=dev).float() / D))
        f = torch.outer(torch.arange(T, device=dev).float(), inv); e = torch.cat((f, f), -1)
        return e.cos().to(dtype), e.sin().to(dtype)
    def forward(s, ids):
        x = s.model.embed_tokens(ids); dt = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        x = x.to(dt); cos, sin = s.rope(ids.shape[1], dt); hs = []
        for _ in range(LOOPS):
            for l in s.model.layers: x = l(x, cos, sin)
            x = s.model.norm(x).to(dt); hs.append(x)
        return hs

def exit_pdf(gates):
    rem = torch.ones_like(gates[0]); out = []
    for i, g in enumerate(gates):
        lam = torch.sigmoid(g)
        if i < len(gates) - 1: out.append(lam * rem); rem = rem * (1 - lam)
        else: out.append(rem)
    return torch.stack(out, -1)

def loss_fn(m, ids, w):
    hs = m(ids[:, :-1]); y = ids[:, 1:]; W = w[:, 1:]
    ces, gs = [], []
    for h in hs:
        lg = m.lm_head(h).float(); ces.append(F.cross_entropy(lg.reshape(-1, VOCAB), y.reshape(-1), reduction="none").view_as(y).float())
        gs.append(m.model.early_exit_gate(h).float().squeeze(-1))
    pdf = exit_pdf(gs); ce = torch.stack(ces, -1)
    ent = -(pdf * (pdf + 1e-9).log()).sum(-1)
    tot = W.sum()
    # expected loss under the exit distribution, plus a quarter of the uniform average so every depth stays trained
    l = ((pdf * ce).sum(-1) * 0.5 + ce.mean(-1) * 0.25 + ce[..., -1] * 0.25 - a.beta * ent)
    return (l * W).sum() / tot, (ce * W.unsqueeze(-1)).sum((0, 1)) / tot, pdf.mean((0, 1))

# ---- data -------------------------------------------------------------------------------------------------
TEXT = None
NAMES = "abel bram cora dale edda finn gwen hale iris joel kira lars mona nils olga pete rhea sven tove ursa vera wade yuri zora".split()
def load(split):
    read = lambda n: lzma.open(f"{a.data}/{n}.train.txt.xz").read() if split == "train" else open(f"{a.held}/{n}.held.txt", "rb").read()
    return [np.frombuffer(read(n), np.uint8) for n in ("kjv", "jargon", "devil")]
def text(r, n, T):
    t = T[r.choice(3, p=[.6, .32, .08])]; n = min(n, len(t) - 1); i = r.integers(0, len(t) - n); return t[i:i + n].tobytes()
def digits(r, n): return "".join(str(d) for d in r.integers(0, 10, n))
def key(r, n): return "".join("abcdefghijklmnopqrstuvwxyz0123456789"[d] for d in r.integers(0, 36, n))
def make(r, S, T, kind=None):
    """returns (ids uint16[S+1], weights float32[S+1])"""
    ids = [BOS]; w = [0.0]
    def put(b, wt):
        b = b.encode() if isinstance(b, str) else b; ids.extend(b); w.extend([wt] * len(b))
    while len(ids) < S + 1:
        k = kind or r.choice(["text", "needle", "kv", "copy", "sum"], p=[.22, .30, .18, .10, .20])
        if k == "text": put(text(r, S + 1 - len(ids), T), 1.0)
        elif k == "needle":
            n = int(r.integers(1, 5)); names = r.choice(NAMES, n, replace=False); codes = [digits(r, 5) for _ in names]
            room = max(64, S + 1 - len(ids) - 70 * n); order = r.permutation(n)
            for nm, c in zip(names, codes):
                put(text(r, int(r.integers(8, max(9, room // (n + 1)))), T), 0.3); put(f"\n[The code of {nm} is ", 0.2); put(c, 0.0); put("]\n", 0.2)
            put(text(r, int(r.integers(8, max(9, room // (n + 1)))), T), 0.3)
            for j in order: put(f"\n[The code of {names[j]}? ", 0.1); put(codes[j], 8.0); put("]\n", 0.5)
        elif k == "kv":
            n = int(r.integers(4, 33)); ks = [key(r, 3) for _ in range(n)]; vs = [digits(r, 3) for _ in range(n)]
            put("\n", 0)
            for x, y in zip(ks, vs): put(f"{x}:", 0); put(y, 0); put("\n", 0)
            for j in r.permutation(n)[: max(4, n // 2)]: put(f"?{ks[j]}:", 0); put(vs[j], 5.0); put("\n", 0.2)
        elif k == "copy":
            n = int(r.integers(16, 129)); s = key(r, n); put("\n<", 0); put(s[0], 0); put(s[1:], 0); put("><", 0.2); put(s[:2], 0); put(s[2:], 1.0); put(">\n", 0.2)
        else:
            put("\n", 0)
            for _ in range(4):
                n = int(r.integers(2, 7)); xs = r.integers(0, 10, n); put("+".join(map(str, xs)) + "=", 0.0); put(f"{xs.sum() % 100:02d};", 4.0)
        if k != "text" and r.random() < .3 and len(ids) < S: put(text(r, int(r.integers(16, 200)), T), 1.0)
    return np.array(ids[:S + 1], np.uint16), np.array(w[:S + 1], np.float32)

def worker(q, seed):
    T = load("train"); r = np.random.default_rng(seed)
    while True:
        xs = [make(r, a.seq, T) for _ in range(a.batch)]
        q.put((np.stack([x[0] for x in xs]), np.stack([x[1] for x in xs])))

def evaluate(m, S):
    m.eval(); T = load("held"); r = np.random.default_rng(12345); res = {}
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        for kind in ("text", "needle", "kv", "copy", "sum"):
            xs = [make(r, S, T, kind) for _ in range(64)]
            ids = torch.from_numpy(np.stack([x[0] for x in xs]).astype(np.int64)).to(dev); w = torch.from_numpy(np.stack([x[1] for x in xs])).to(dev)
            hs = m(ids[:, :-1]); y = ids[:, 1:]; W = w[:, 1:]; thr = 1.0 if kind in ("text", "copy") else 4.0; mask = W >= thr
            res[kind] = [(round(F.cross_entropy(m.lm_head(h).float()[mask], y[mask]).item() / math.log(2), 4), round((m.lm_head(h).argmax(-1)[mask] == y[mask]).float().mean().item(), 4)) for h in hs]
            if kind == "text":
                res["pdf"] = [round(v, 3) for v in exit_pdf([m.model.early_exit_gate(h).float().squeeze(-1) for h in hs]).mean((0, 1)).tolist()]
                f = [h.float() for h in hs]
                res["rel_change"] = [round(((f[i] - f[i - 1]).norm(dim=-1) / f[i].norm(dim=-1)).mean().item(), 4) for i in range(1, 4)]
    m.train(); return res

if __name__ == "__main__":
    t0 = time.time(); m = LM().to(dev); n = sum(q.numel() for q in m.parameters()); print("params", n, flush=True)
    dec = [q for q in m.parameters() if q.dim() == 2]; nod = [q for q in m.parameters() if q.dim() < 2]
    opt = torch.optim.AdamW([{"params": dec, "weight_decay": 0.1}, {"params": nod, "weight_decay": 0.0}], lr=a.lr, betas=(0.9, 0.95), fused=True)
    step = 0
    if os.path.exists(a.state): s = torch.load(a.state); m.load_state_dict(s["m"]); opt.load_state_dict(s["o"]); step = s["step"]; print("resumed", step)
    q = mp.Queue(64); seed0 = 1000 + step * 100
    ps = [mp.Process(target=worker, args=(q, seed0 + i), daemon=True) for i in range(14)]; [x.start() for x in ps]
    f = loss_fn if a.no_compile else torch.compile(loss_fn)
    tok = 0; tlog = time.time()
    while time.time() - t0 < a.seconds and step < a.total_steps:
        lr = a.lr * min(1, (step + 1) / 200) * (0.5 * (1 + math.cos(math.pi * step / a.total_steps)) * 0.97 + 0.03)
        for g in opt.param_groups: g["lr"] = lr
        i, w = q.get(); ids = torch.from_numpy(i.astype(np.int64)).pin_memory().to(dev, non_blocking=True); w = torch.from_numpy(w).pin_memory().to(dev, non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16): l, ces, pdf = f(m, ids, w)
        l.backward(); gn = nn.utils.clip_grad_norm_(m.parameters(), 1.0); opt.step(); opt.zero_grad(set_to_none=True); step += 1; tok += ids.numel()
        if step % 250 == 0 or step in (1, 10, 50):
            print(f"step {step} loss {l.item():.4f} ce {[round(v, 3) for v in ces.tolist()]} pdf {[round(v, 2) for v in pdf.tolist()]} gn {gn.item():.2f} lr {lr:.5f} tok/s {tok / (time.time() - tlog):.0f} q {q.qsize()} t {time.time() - t0:.0f}", flush=True); tok = 0; tlog = time.time()
    torch.save({"m": m.state_dict(), "o": opt.state_dict(), "step": step}, a.state)
    print("eval", step, json.dumps(evaluate(m, a.seq)), flush=True)
    for x in ps: x.terminate()
    if a.out:
        from safetensors.torch import save_file
        os.makedirs(a.out, exist_ok=True)
        save_file({k: v.detach().to(torch.bfloat16).contiguous().cpu() for k, v in m.state_dict().items()}, f"{a.out}/model.safetensors", {"format": "pt"})
        json.dump({"architectures": ["OuroForCausalLM"], "model_type": "ouro", "vocab_size": VOCAB, "hidden_size": a.hidden, "intermediate_size": a.inter, "num_hidden_layers": a.layers, "num_attention_heads": a.heads, "num_key_value_heads": a.heads, "head_dim": a.hidden // a.heads, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False, "total_ut_steps": 4, "early_exit_threshold": 1.0, "attention_dropout": 0.0, "use_sliding_window": False, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "torch_dtype": "bfloat16"}, open(f"{a.out}/config.json", "w"), indent=2)
        print("saved", os.listdir(a.out), os.path.getsize(f"{a.out}/model.safetensors"))
