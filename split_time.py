import sys, torch, torch.nn.functional as F, cuteflash, statistics, dataclasses
from torch.nn.attention import sdpa_kernel, SDPBackend
from cuteflash.compile import compiled
from cuteflash.dispatch import kernel_class, current_target
from cuteflash.problem import FwdProblem
from cuteflash.split_planning import SplitLaunch
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.traits.sm80 import FwdTraitsSm80
dev = torch.device("cuda")
SCALARS = (128**-0.5, 0.0, 1 << 30, 1 << 30, 132)
def T(n, kv, b, **k): return FwdTraitsSm90(64, n, 128, 128, kv_stage=kv, pingpong=False, splits=True, blocks_per_sm=b, **k)
def A(n, kv, b, **k): return FwdTraitsSm80(64, n, 128, 128, num_warps=4, kv_stage=kv, blocks_per_sm=b, splits=True, **k)
VARIANTS = {
    "64x2x2": T(64, 2, 2), "64x2x2qr": T(64, 2, 2, q_in_regs=True), "64x2x2q2": T(64, 2, 2, q_stage=2),
    "48x3x2qr": T(48, 3, 2, q_in_regs=True), "128x3x1": T(128, 3, 1), "64x6x1qr": T(64, 6, 1, q_in_regs=True), "96x4x1qr": T(96, 4, 1, q_in_regs=True),
    "s80 64x3x2": A(64, 3, 2), "s80 32x5x2": A(32, 5, 2), "s80 64x6x1": A(64, 6, 1),
}
def build(item):
    name, heads = item
    t = VARIANTS[name]
    p = dataclasses.replace(FwdProblem.dense("bf16", 128, 128, "full"), is_split=True).packed(heads)
    compiled(kernel_class(t), t, p, "sm_90a")
def timed(fns, n=20, reps=15):
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
def case(b, s, h, hk, d=128, sq=1):
    byts = 2 * b * s * hk * d * 2
    copies = max(1, min(8, (300 << 20) // byts))
    q = torch.randn(b, sq, h, d, device=dev, dtype=torch.bfloat16)
    kv = [[torch.randn(b, s, hk, d, device=dev, dtype=torch.bfloat16) for _ in range(2)] for _ in range(copies)]
    res, exact = {}, None
    with torch.no_grad():
        for name, t in VARIANTS.items():
            if h // hk > 16 and name in ("48x3x2qr",): continue
            p = dataclasses.replace(FwdProblem.dense("bf16", 128, 128, "full"), is_split=True).packed(h // hk)
            kernel = compiled(kernel_class(t), t, p, "sm_90a")
            launch = SplitLaunch.of(t, 0, 132, dev)
            o = torch.empty_like(q)
            def mk(k, v): return lambda: kernel(q, k, v, o, None, *launch.arguments(), *SCALARS)
            try:
                res[name] = timed([mk(k, v) for k, v in kv])
                mk(*kv[0])(); mine = o.clone()
                if exact is None: exact = F.scaled_dot_product_attention(q.transpose(1, 2), *(x.transpose(1, 2) for x in kv[0]), enable_gqa=True).transpose(1, 2)
                if (mine - exact).abs().max() > 2e-2: name2 = name; res[name + "!WRONG"] = res.pop(name)
            except Exception as e: print(name, repr(e)[:80])
        def mc(k, v):
            a, bb, c = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            def f():
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): return F.scaled_dot_product_attention(a, bb, c, enable_gqa=True)
            return f
        if sq == 1: res["cudnn"] = timed([mc(k, v) for k, v in kv])
    print(f"b{b} s{s} {h}/{hk} q{sq}: " + " ".join(f"{n}={t:.2f}" for n, t in res.items()), flush=True)
def main():
    import concurrent.futures as cf, multiprocessing as mp
    with cf.ProcessPoolExecutor(12, mp_context=mp.get_context("spawn")) as pool:
        list(pool.map(build, [(n, h) for n in VARIANTS for h in (1, 4, 8, 32)]))
    for a in [(1, 8192, 32, 8), (1, 131072, 32, 8), (16, 8192, 32, 8), (64, 4096, 64, 8), (32, 4096, 32, 32), (8, 32768, 32, 1)]: case(*a)
    case(1, 8192, 32, 8, sq=4); case(16, 8192, 32, 8, sq=4)
if __name__ == "__main__": main()
