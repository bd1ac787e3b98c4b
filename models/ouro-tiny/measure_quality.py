# SPDX-License-Identifier: Apache-2.0
"""Quality of ouro-tiny per loop, measured from dense dumps of the reference executor.

  /usr/bin/python3 measure_quality.py make FOLDER [SEQUENCES]     writes FOLDER/<kind>.h5 (held-out sequences of the training script's evaluation)
  for k in text needle kv copy sum; do loopgauge run --trace FOLDER/$k.h5 --switches t0s0q0 --dump FOLDER/$k.dump.h5 --dump-only hidden; done
  /usr/bin/python3 measure_quality.py table FOLDER                bits per byte (text) and accuracy of answer bytes (tasks) of head(H[r]), r = 1..4
"""
import json, lzma, pathlib, struct, sys
import h5py
import numpy as np

ROOT = pathlib.Path(sys.argv[0]).resolve().parent
for candidate in (ROOT.parent.parent, pathlib.Path.cwd()):
    if (candidate / "models" / "ouro-tiny" / "train_ouro_tiny.py").exists(): ROOT = candidate
MODEL = ROOT / "models" / "ouro-tiny"
KINDS = ("text", "needle", "kv", "copy", "sum")
S = 1024

def sequences(count):
    source = (MODEL / "train_ouro_tiny.py").read_text()
    names = {"json": json, "lzma": lzma, "np": np, "BOS": 256, "EOS": 257}
    names["a"] = type("a", (), {"data": str(MODEL / "corpus"), "held": str(ROOT / "data" / "corpus")})
    exec(source[source.index("# ---- data"):source.index("def worker")], names)
    held, random = names["load"]("held"), np.random.default_rng(12345)
    for kind in KINDS:
        made = [names["make"](random, S, held, kind) for _ in range(64)]
        yield kind, made[:count]

def make(folder, count):
    for kind, made in sequences(count):
        with h5py.File(folder / f"{kind}.h5", "w") as f:
            f.attrs.update(format="loopgauge-trace", version=1, name=f"quality-{kind}", description="held-out sequences", source="measure_quality.py", vocab_size=264)
            for i, (ids, _) in enumerate(made):
                g = f.create_group(f"requests/{i}")
                g.attrs.update(id=i, arrival=0, max_new_tokens=1, eos_token_id=-1, seed=0, task=kind)
                g["prompt"] = ids.astype(np.int32)

def head():
    raw = (MODEL / "model.safetensors").read_bytes()
    n, = struct.unpack("<Q", raw[:8]); entry = json.loads(raw[8:8 + n])["lm_head.weight"]
    b, e = entry["data_offsets"]; bits = np.frombuffer(raw[8 + n + b:8 + n + e], np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32).reshape(entry["shape"]).astype(np.float64)

def table(folder, count):
    weight = head()
    for kind, made in sequences(count):
        with h5py.File(folder / f"{kind}.dump.h5") as f:
            rows = []
            for loop in (1, 2, 3, 4):
                bits, right, n = [], [], 0
                for i, (ids, w) in enumerate(made):
                    hidden = f[f"requests/{i}/hidden/loop{loop}"][:S].astype(np.float64)
                    logits = hidden @ weight.T
                    logits -= logits.max(1, keepdims=True)
                    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
                    mask = w[1:] >= (1.0 if kind in ("text", "copy") else 4.0)
                    bits.append(-logp[np.arange(S), ids[1:].astype(int)][mask] / np.log(2)); right.append((logits.argmax(1) == ids[1:])[mask])
                bits, right = np.concatenate(bits), np.concatenate(right)
                rows.append((bits.mean(), right.mean() * 100, len(bits)))
            print(kind, "bits/byte", " ".join(f"{r[0]:.3f}" for r in rows), "| top-1 %", " ".join(f"{r[1]:.1f}" for r in rows), "| scored", rows[0][2])

folder = pathlib.Path(sys.argv[2]); count = int(sys.argv[3]) if len(sys.argv) > 3 else 8
{"make": make, "table": table}[sys.argv[1]](folder, count)
