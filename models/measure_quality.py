# SPDX-License-Identifier: Apache-2.0
"""Quality of a shipped model per loop, measured from dense dumps of the reference executor: head(H[r]) of every loop, r = 1..4, on held-out
sequences as the model's training script draws them for its own evaluation.

  /usr/bin/python3 models/measure_quality.py make MODEL FOLDER [SEQUENCES [LENGTH]]    writes FOLDER/<kind>.h5; MODEL is ouro-tiny or ouro-small
  for t in FOLDER/*.h5; do loopgauge run --checkpoint models/MODEL --trace $t --switches t0s0q0 --dump ${t%.h5}.dump --dump-only hidden; done
  /usr/bin/python3 models/measure_quality.py table MODEL FOLDER [SEQUENCES [LENGTH]]   bits per byte and top-1 accuracy of the scored bytes

Scored: every byte of prose, the second and later characters of copies, the answers of the other tasks. Needs h5py and numpy.
"""
import argparse, json, lzma, pathlib, random, struct, sys
import h5py
import numpy as np

MODELS = pathlib.Path(__file__).resolve().parent
HELD = MODELS.parent / "data" / "corpus"


def tiny_sequences(count, length):
    """(kind, [(ids, scored)]) with the generators of the training script, which cannot be imported without PyTorch."""
    model = MODELS / "ouro-tiny"
    source = (model / "train_ouro_tiny.py").read_text()
    names = {"json": json, "lzma": lzma, "np": np, "BOS": 256, "EOS": 257}
    names["a"] = type("a", (), {"data": str(model / "corpus"), "held": str(HELD)})
    exec(source[source.index("# ---- data"):source.index("def worker")], names)
    held, generator = names["load"]("held"), np.random.default_rng(12345)
    for kind in ("text", "needle", "kv", "copy", "sum"):
        made = [names["make"](generator, length, held, kind) for _ in range(64)][:count]
        yield kind, [(ids.astype(np.int32), weights >= (1.0 if kind in ("text", "copy") else 4.0)) for ids, weights in made]


def small_sequences(count, length):
    sys.path.insert(0, str(MODELS / "ouro-small"))
    import tasks
    held = tasks.load_held_out(HELD)
    scored = lambda made, threshold: [(np.array(ids, np.int32), np.array(weights) >= threshold) for ids, weights in made]
    for name, text in held.items():
        yield f"text-{name}", scored(tasks.held_out_blocks(text, length)[:count], tasks.TEXT)
    levels = [("needle", 1), ("needle", 4), ("kv", 8), ("copy", None), ("sum", 4), ("sum", 8), ("sum", 16)]
    levels += [("chain", hops) for hops in tasks.HOPS] + [("swap", swaps) for swaps in (2, 4, 6, 8)]
    for kind, level in levels:
        generator = random.Random(f"ouro-small {kind} {level}")
        made = [tasks.task(generator, kind, length, held, level) for _ in range(count)]
        yield kind if level is None else f"{kind}-{level}", scored(made, tasks.TEXT if kind == "copy" else tasks.ANSWER)


def write_traces(sequences, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for kind, made in sequences:
        with h5py.File(folder / f"{kind}.h5", "w") as file:
            file.attrs.update(format="loopgauge-trace", version=1, name=f"loops-{kind}", description="held-out sequences",
                              source="models/measure_quality.py", vocab_size=264)
            for i, (ids, _) in enumerate(made):
                group = file.create_group(f"requests/{i}")
                group.attrs.update(id=i, arrival=0, max_new_tokens=1, eos_token_id=-1, seed=0, task="other")
                group["prompt"] = ids


def output_embedding(model):
    for path in sorted((MODELS / model).glob("*.safetensors")):
        raw = path.read_bytes()
        size, = struct.unpack("<Q", raw[:8])
        entry = json.loads(raw[8:8 + size]).get("lm_head.weight")
        if entry is None: continue
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        bits = np.frombuffer(raw[begin:end], np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(entry["shape"]).astype(np.float64)
    raise SystemExit(f"{MODELS / model}: no safetensors file holds lm_head.weight")


def print_table(sequences, model, folder):
    weight = output_embedding(model)
    print("| kind | scored bytes | bits per byte, loop 1 / 2 / 3 / 4 | top-1 %, loop 1 / 2 / 3 / 4 |\n|---|---|---|---|")
    for kind, made in sequences:
        if not (folder / f"{kind}.dump").exists():
            print(f"{kind}: no {kind}.dump in {folder}, left out", file=sys.stderr)
            continue
        bits, right = [[] for _ in range(4)], [[] for _ in range(4)]
        with h5py.File(folder / f"{kind}.dump") as file:
            for loop in range(4):
                for i, (ids, scored) in enumerate(made):
                    hidden = file[f"requests/{i}/hidden/loop{loop + 1}"][:len(ids) - 1].astype(np.float64)
                    logits = hidden @ weight.T
                    logits -= logits.max(1, keepdims=True)
                    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
                    mask = scored[1:]
                    bits[loop].append(-log_p[np.arange(len(ids) - 1), ids[1:]][mask] / np.log(2))
                    right[loop].append((logits.argmax(1) == ids[1:])[mask])
        bits, right = [np.concatenate(x) for x in bits], [np.concatenate(x) for x in right]
        print(f"| {kind} | {len(bits[0])} | {' / '.join(f'{x.mean():.3f}' for x in bits)} | {' / '.join(f'{100 * x.mean():.1f}' for x in right)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("verb", choices=("make", "table"))
    parser.add_argument("model", choices=("ouro-tiny", "ouro-small"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("sequences", nargs="?", type=int, default=8)
    parser.add_argument("length", nargs="?", type=int, default=1024)
    a = parser.parse_args()
    sequences = (tiny_sequences if a.model == "ouro-tiny" else small_sequences)(a.sequences, a.length)
    write_traces(sequences, a.folder) if a.verb == "make" else print_table(sequences, a.model, a.folder)


if __name__ == "__main__":
    main()
