"""The scene of an sm80 backward row: cp.async, ldmatrix, five mma.sync products, and the sum of dQ in memory."""

from __future__ import annotations

import dataclasses
from typing import Any, Final, NamedTuple

from cuteflash.problem import BwdProblem
from cuteflash.traits.bwd_sm80 import BwdTraitsSm80

from .algebra import Layout, composition, concatenate
from .ampere import ALL, WARPS, AmpereSteps
from .gradient_steps import STEP, GradientSteps
from .key_tiles import LONE, global_tiles
from .read import Frame, Operand, Placed, fragment_order, shared_tile, smem_start
from .scene import Axis, Fragment, Role, Step, Tile, Touch

GROUP = 4  # fp32 elements that a thread adds side by side
FP32 = 4  # bytes
TRANSPOSED = "Transposed on the way: the product's k extent runs over the tile's rows."


class Source(NamedTuple):
    """An operand that comes from shared memory by ldmatrix.

    Attributes:
        tensor: whose tile.
        fragment: its registers on a page.
        operand: A or B.
        turned: the operand's rows are the drawn tile's columns.
        trans: ldmatrix transposes.
    """

    tensor: str
    fragment: str
    operand: Operand
    turned: bool
    trans: bool


# The operands of the products as the kernel's step makes them; keys are the rows of S and dP, and of sP and sdS as they
# lie, which pages draw with queries as rows.
SOURCES = {
    "S": (Source("K", "rK", "A", False, False), Source("Q", "rQ", "B", False, False)),
    "dP": (Source("V", "rV", "A", False, False), Source("dO", "rdO", "B", False, False)),
    "dV": (Source("P", "rP", "A", True, False), Source("dO", "rdOt", "B", True, True)),
    "dK": (Source("dS", "rdS", "A", True, False), Source("Q", "rQt", "B", True, True)),
    "dQ": (Source("dS", "rdSt", "A", False, True), Source("K", "rKt", "B", True, True)),
}
TITLES = {"S": "Sᵀ = K Qᵀ", "dP": "dPᵀ = V dOᵀ", "dV": "dV += Pᵀ dO", "dK": "dK += dSᵀ Q", "dQ": "dQ = dS K"}
SUMS = ("dV", "dK")


class ReaderBwdSm80:
    """Reads one kernel; make and use it inside `layouts.dsl.context`."""

    loop: Final = STEP.removeprefix("every ") + "s"

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.traits: BwdTraitsSm80 = kernel.traits
        self.problem: BwdProblem = kernel.problem
        t = self.traits
        sizes: dict[Axis, int] = {"m": t.tile_m, "n": t.tile_n, "d": t.head_dim, "e": t.head_dim_v}
        self.frame = Frame(sizes, 1, 0, t.num_threads)
        self.smem = kernel.make_tiles(smem_start())
        s, dkv = kernel.tiled_mma_s(), kernel.tiled_mma_dkv()
        self.mma = {"S": s, "dP": s, "dV": dkv, "dK": dkv, "dQ": kernel.tiled_mma_dq()}
        self.acc = {name: self.frame.placed(mma, "C", name, name in ("S", "dP")) for name, mma in self.mma.items()}
        self.draw = AmpereSteps(self.frame, self.problem.operands.qk_dtype, STEP)

    def roles(self) -> tuple[Role, ...]:
        """All warps do the same, but for those that keep the turns of a deterministic call, or only leave registers."""
        traits = self.traits
        does = (
            f"loads, products, pointwise part, additions; {traits.s_warps} along the keys of S and dP, "
            f"{traits.dkv_warps} along those of dK and dV, {traits.dq_warps} along the queries of dQ"
        )
        warps = Role("warps", 0, traits.num_threads, does)
        if not self.kernel.turn_threads:
            return (warps,)
        name, does = "turns", "one warp awaits the turns at dQ, one passes them on; the others give up registers"
        if not self.kernel.turns_apart:
            name, does = "idle", "they give up registers"
        return warps, Role(name, traits.num_threads, self.kernel.turn_threads, does)

    def tiles(self) -> tuple[Tile, ...]:
        """Global tiles, then shared memory."""
        plan = self.traits.smem_plan
        k, v = self._shared("K", "k", self.smem.sK), self._shared("V", "v", self.smem.sV)
        scores = [self._scores("dS", plan["ds"].start, self.smem.sdS)]
        if self.smem.sP is not None:
            scores.insert(0, self._scores("P", plan["p"].start, self.smem.sP))
        if self.smem.sO is not None:
            note = "Of lone tiles: the threads that copy a row of O and dO sum up its delta."
            scores.append(self._shared("O", "o", self.smem.sO, note))
        return (
            *global_tiles(self.frame, self.problem),
            self._sum_of_dq(),
            self._shared("Q", "q", self.smem.sQ, "Each stage comes with its rows' LSE."),
            k,
            v,
            self._shared("dO", "do", self.smem.sdO, "Each stage comes with its rows' delta."),
            *scores,
            dataclasses.replace(v, id="sdV", tensor="dV", note="In the place of V, which has been read."),
            dataclasses.replace(k, id="sdK", tensor="dK", note="In the place of K, which has been read."),
        )

    def _shared(self, tensor: str, region: str, smem: Any, note: str = "") -> Tile:
        return shared_tile(tensor, smem.layout, self.traits.smem_plan[region].start, False, note)

    def _scores(self, tensor: str, base: int, smem: Any) -> Tile:
        """A tile that lies with keys as rows, drawn with queries as rows."""
        tile = shared_tile(tensor, smem.layout, base, False, "Lies with keys as rows, as the products compute it.")
        keys, queries = tile.layout.modes()[:2]
        return dataclasses.replace(tile, shape=(queries.size(), keys.size()), layout=concatenate(queries, keys))

    def _sum_of_dq(self) -> Tile:
        tv = self.frame.fragment("acc_dQ", self.acc["dQ"], self._accumulator("dQ"), "").tv
        shape = self.frame.shape("dQ")
        note = (
            "The sum over all key blocks, fp32, in the order of the threads' registers: each adds 16 bytes beside its "
            "neighbour's. A kernel after this one rounds it to dQ."
        )
        layout = fragment_order(tv, shape, self.traits.num_threads, GROUP)
        return Tile("gdQ", "dQ", "global", shape, layout, note=note, element_bytes=FP32)

    def _accumulator(self, name: str) -> Any:
        """A thread's registers, as the kernel makes them."""
        from cuteflash.kernels.sm80.bwd_products import accumulator

        rows, cols = self.frame.shape(name)
        turned = name in ("S", "dP")
        return accumulator(self.mma[name], 0, *((cols, rows) if turned else (rows, cols)))

    def _operand(self, product: str, source: Source) -> Any:
        """The kernel's operand: registers, and how ldmatrix fills them."""
        from cuteflash.core.views import transposed
        from cuteflash.kernels.sm80.bwd_products import make_operand

        tile = getattr(self.smem, f"s{source.tensor}")
        if len(tile.shape) == 3:  # the first stage
            tile = tile[None, None, 0]
        tile = transposed(tile) if source.trans else tile
        return make_operand(self.mma[product], 0, tile, is_a=source.operand == "A", transpose=source.trans)

    def _placed(self, product: str, source: Source) -> Placed:
        return self.frame.placed(self.mma[product], source.operand, source.tensor, source.turned)

    def _fetched(self, source: Source) -> bool:
        """Whether ldmatrix brings an operand; P and dS may be what a thread computed itself."""
        return not (self.traits.p_in_regs and source.fragment in ("rP", "rdS"))

    def fragments(self) -> tuple[Fragment, ...]:
        """Operands and accumulators of all products; operands of one product take the registers of another's."""
        found: list[Fragment] = []
        for name, sources in SOURCES.items():
            found += [self._operand_fragment(name, source) for source in sources]
            keys = "Held transposed, keys as the product's rows." if name in ("S", "dP") else ""
            note = "Summed up over all query blocks." if name in SUMS else keys
            place = "acc_S" if name == "dQ" else ""
            acc = self._accumulator(name)
            found.append(self.frame.fragment(f"acc_{name}", self.acc[name], acc, note, place))
        return tuple(found)

    def _operand_fragment(self, product: str, source: Source) -> Fragment:
        placed = self._placed(product, source)
        if self._fetched(source):
            operand = self._operand(product, source)
            blocks = placed.values.mode(2).size()
            live = min(1 + self.traits.ahead, blocks)
            note = f"{live} of its {blocks} k-blocks {'are' if live > 1 else 'is'} live at a time."
            place = "" if product == "S" else {"A": "rK", "B": "rQ"}[source.operand]
            made = self.frame.fragment(source.fragment, placed, operand.fragment, note, place)
            return dataclasses.replace(made, live=made.registers * live // blocks)
        from cutlass import cute

        from cuteflash.core.views import acc_as_operand_a

        rounded = cute.make_rmem_tensor_like(self._accumulator("S"), self.kernel.dtype)
        note = "The accumulators, rounded: already in the threads that need them for A of the next product."
        place = "acc_dP" if source.fragment == "rdS" else ""
        return self.frame.fragment(source.fragment, placed, acc_as_operand_a(rounded), note, place)

    def steps(self) -> tuple[Step, ...]:
        """In the order in which data passes through a tile."""
        gradient = GradientSteps(self.frame, self.acc, self.problem, WARPS)
        return (
            self._load("K"),
            self._load("Q"),
            *self._product("S"),
            gradient.exponentials_in_place(),
            *self._hand_over("P", "acc_S", gradient),
            self._load("V"),
            self._load("dO"),
            *self._product("dP"),
            gradient.differentiate_in_place(),
            *self._hand_over("dS", "acc_dP", gradient),
            *self._product("dV"),
            *self._product("dK"),
            *self._product("dQ"),
            self._add_dq(),
            *self._epilogue(),
        )

    def _load(self, tensor: str) -> Step:
        once = tensor in "KV"
        ahead = "One query block ahead of the products. " if self.traits.stages > 1 else "At the start of a step. "
        copy = self.kernel.load_copy(self.frame.shape(tensor)[1])
        return self.draw.load(tensor, copy, "" if once else ahead, once)

    def _product(self, name: str) -> tuple[Step, ...]:
        """The fetches of a product's operands, and the product."""
        fetches = [
            self.draw.fetch(
                source.fragment,
                source.tensor,
                self._operand(name, source).fetches[0].copy,
                (source.turned, source.trans),
                why=TRANSPOSED,
            )
            for source in SOURCES[name]
            if self._fetched(source)
        ]
        operands = [(self._placed(name, source), source.fragment) for source in SOURCES[name]]
        acc = (self.acc[name], f"acc_{name}")
        return (*fetches, self.draw.product(f"mma_{name.lower()}", TITLES[name], *operands, acc))

    def _hand_over(self, tensor: str, acc: str, gradient: GradientSteps) -> tuple[Step, ...]:
        """P or dS to the products that need it: rounded in place, to shared memory, or both."""
        from cuteflash.atoms.sm80 import store_pairs

        found: list[Step] = []
        (source,) = (one for pair in SOURCES.values() for one in pair if one.fragment == f"r{tensor}")
        if not self._fetched(source):
            placed = self._placed({"P": "dV", "dS": "dK"}[tensor], source)
            found.append(gradient.convert(placed, acc))
        if tensor == "dS" or self.smem.sP is not None:
            copy = store_pairs(self.kernel.dtype, self.mma["S"])
            note = "Rounded; every warp reads it after a barrier."
            found.append(self.draw.stage(tensor, copy, acc, note, loop=True, transposed=True))
        return tuple(found)

    def _add_dq(self) -> Step:
        """fp32 additions of fragments to the sum in memory."""
        tv = self.frame.fragment("acc_dQ", self.acc["dQ"], self._accumulator("dQ"), "").tv
        group, rest = composition(tv.mode(1), Layout((GROUP, tv.mode(1).size() // GROUP))).modes()
        split = concatenate(tv.mode(0), group, rest)
        one = "red.relaxed.gpu.global.add"
        vector = self.traits.vector_add
        note = "A thread's four neighbouring registers are 16 bytes of memory, beside those of the next thread."
        if self.problem.is_deterministic:
            note += " Key blocks take turns at a tile, so that the sum has the same bits every time."
        if self.traits.lone_tiles:
            note += f" {LONE}"
        return Step(
            "add_dq",
            "dQ: added to the sum in global memory",
            "red",
            f"{one}.v4.f32" if vector else f"4 x {one}.f32",
            ALL,
            STEP,
            "loop",
            (Touch("acc_dQ", "read", split), Touch("gdQ", "write", split)),
            note,
        )

    def _epilogue(self) -> tuple[Step, ...]:
        """dV and dK to shared memory, then to global memory."""
        from cuteflash.atoms.sm80 import store_pairs

        found: list[Step] = []
        for tensor, note in (
            ("dV", "Rounded, into the place of V."),
            ("dK", "Scaled and rounded, into the place of K."),
        ):
            copy = store_pairs(self.kernel.dtype, self.mma[tensor])
            found.append(self.draw.stage(tensor, copy, f"acc_{tensor}", note))
            found += self.draw.store(tensor, self.kernel.store_copy(self.frame.shape(tensor)[1]))
        return tuple(found)
