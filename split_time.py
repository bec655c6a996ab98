import sys, torch, torch.nn.functional as F, cuteflash, statistics
from torch.nn.attention import sdpa_kernel, SDPBackend
dev = torch.device("cuda")
def timed(fns, n=20, reps=25):
    for f in fns: f()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for i in range(n): fns[i % len(fns)]()
    g.replay(); torch.cuda.synchronize()
    ts = []
    for _ in range(reps):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize()
        ts.append(a.elapsed_time(b) / n * 1e3)
    return statistics.median(ts)
def case(b, s, h, hk, d=128, sq=1, fams=("sm90",), cudnn=True):
    byts = 2 * b * s * hk * d * 2
    copies = max(1, min(8, (300 << 20) // byts))
    q = torch.randn(b, sq, h, d, device=dev, dtype=torch.bfloat16)
    kv = [[torch.randn(b, s, hk, d, device=dev, dtype=torch.bfloat16) for _ in range(2)] for _ in range(copies)]
    row = f"b{b} s{s} {h}/{hk} q{sq} d{d}: "
    res = {}
    with torch.no_grad():
        for fam in fams:
            def mk(k, v): return lambda: cuteflash.flash_attn_func(q, k, v, num_splits=0, family=fam, causal=sq > 1)
            res[fam] = timed([mk(k, v) for k, v in kv])
        if cudnn:
            def mc(k, v):
                a, bb, c = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                def f():
                    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                        return F.scaled_dot_product_attention(a, bb, c, enable_gqa=True)
                return f
            try: res["cudnn"] = timed([mc(k, v) for k, v in kv])
            except Exception as e: row += "cudnn: " + str(e)[:60]
    print(row + "  ".join(f"{n} {t:.2f}us {byts/t/1e3:.0f}GB/s" for n, t in res.items()), flush=True)
def main(fams):
    for a in [(1, 8192, 32, 8), (1, 131072, 32, 8), (16, 8192, 32, 8), (64, 4096, 64, 8), (32, 4096, 32, 32), (8, 32768, 32, 1)]:
        case(*a, fams=fams)
    case(1, 8192, 32, 8, sq=4, fams=fams, cudnn=False)
    case(16, 8192, 32, 8, sq=4, fams=fams, cudnn=False)
if __name__ == "__main__": main(sys.argv[1:] or ["sm90"])
