"""The scene of a row that decodes latent attention: two warpgroups, two pages, read from the kernel's own objects.

Q and K are drawn as two tensors each, as the products take them: the latent columns, which are V's as well, and `Qr`
and `Kr`, the last slab, which the cache has beside them. Both warpgroups do the same on different pages of a pair, so
that one drawing stands for both.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V, MlaProblem
from cuteflash.traits.mla_sm90 import CONSUMERS, ELEMENT_BYTES, SLAB, SLABS_V
from cuteflash.traits.sm90 import WARPGROUP

from .algebra import Layout, concatenate
from .dsl import coordinates
from .hopper import WARPGROUPS, Factor, HopperSteps, When
from .latent import EXPONENTIALS, RESCALE, ROWS, SHARES, global_latent, out_tiles, rescale_note, row_move, store_out
from .read import Frame, Placed, ptx_type, shared_tile, smem_start
from .scene import Axis, Fragment, Role, Step, Tile, Touch

TILE, PAGE, PAIR = "once a tile", "every page", "every page of a warpgroup's own, which is every other one"
TMA_LOAD: Final = "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
EXAMPLE_ROWS, EXAMPLE_PAGES = 128, 4096  # rows of Q, 128 heads of a token; pages of the cache
LOADER = "one thread of the producer warp"


class ReaderMlaSm90:
    """Reads one kernel; make and use it inside `layouts.dsl.context`."""

    loop: Final = "pages"

    def __init__(self, kernel: Any) -> None:
        from cuteflash.kernels.sm90.mla_decode_half import make_half

        self.kernel, self.traits = kernel, kernel.traits
        self.problem: MlaProblem = kernel.problem
        t = self.traits
        sizes: dict[Axis, int] = {"m": t.tile_m, "n": t.tile_n, "d": LATENT_DIM_V, "r": SLAB, "e": LATENT_DIM_V}
        # Of S, P and what they are made of each warpgroup has a whole tile, of V and O half of the columns.
        self.frame = Frame(sizes, CONSUMERS, WARPGROUP, WARPGROUP, split=None)
        self.halves = dataclasses.replace(self.frame, split="e")
        self.smem = kernel.make_tiles(smem_start())
        self.half = make_half(kernel, self.smem, 0)
        self.of = self._operands()
        shared = {tile.id: tile for tile in self._shared()}
        self.draw = HopperSteps(self.frame, shared, self.problem.dtype)

    def _operands(self) -> dict[str, Placed]:
        """Those of all products, by tensor."""
        half, whole = self.half, self.frame
        return {
            "Q": whole.placed(half.mma_qk, "A", "Q"),
            "K": whole.placed(half.mma_qk, "B", "K"),
            "Qr": whole.placed(half.mma_qk_last, "A", "Qr"),
            "Kr": whole.placed(half.mma_qk_last, "B", "Kr"),
            "S": whole.placed(half.mma_qk, "C", "S"),
            "P": whole.placed(half.mma_own, "A", "P"),
            "V": self.halves.placed(half.mma_own, "B", "V", transposed=True),
            "O": self.halves.placed(half.mma_own, "C", "O"),
        }

    def roles(self) -> tuple[Role, ...]:
        """The producer warpgroup, then the two consumers."""
        columns = LATENT_DIM_V // CONSUMERS
        return (
            Role("producer", 0, WARPGROUP, "warp 0 issues every TMA load; the others give up registers"),
            *(
                Role(
                    f"consumer {i}",
                    (1 + i) * WARPGROUP,
                    WARPGROUP,
                    f"scores of the {('first', 'second')[i]} page of a pair; columns {i * columns} to "
                    f"{(i + 1) * columns - 1} of O, over all pages",
                )
                for i in range(CONSUMERS)
            ),
        )

    def tiles(self) -> tuple[Tile, ...]:
        """Global tiles, then shared memory."""
        make = global_latent
        of_page = "A page of the cache: one head, which all query heads read."
        return (
            make(self.frame, "Q", LATENT_DIM, f"The latent columns. {ROWS}"),
            make(self.frame, "Qr", LATENT_DIM, f"The last {SLAB} columns, which carry positions."),
            make(self.frame, "K", LATENT_DIM, f"The latent columns. {of_page}"),
            make(self.frame, "Kr", LATENT_DIM, f"The last {SLAB} columns, which carry positions; they are not V's."),
            *out_tiles(self.frame, self.problem),
            *self._shared(),
        )

    def _shared(self) -> tuple[Tile, ...]:
        plan, rows, kernel = self.traits.smem_plan, self.traits.tile_n, self.kernel
        slab = plan["p0"].nbytes
        q, pages = plan["q"].start, plan["pages"].start
        page_stride = rows * LATENT_DIM
        latent, last = kernel.smem_layout(LATENT_DIM_V), kernel.smem_layout(SLAB)
        order = "Stage 0 is that of warpgroup 1, over Qr, which is in registers by then; stage 1 that of warpgroup 0."
        q_note = f"{SLABS_V} slabs of {SLAB} columns, one after the other."
        of_pages = "A pair of pages: as K, warpgroup 0 reads stage 0 and warpgroup 1 stage 1; as V both read both."
        return (
            shared_tile("Q", latent, q, True, q_note),
            shared_tile("Qr", last, plan["p1"].start, True, "The last slab; P of warpgroup 1 takes its place."),
            _staged(shared_tile("K", latent, pages, True, of_pages), page_stride),
            _staged(shared_tile("Kr", last, pages + SLABS_V * slab, True, ""), page_stride),
            _staged(shared_tile("P", last, plan["p1"].start, True, order), self._p_stride),
            _staged(shared_tile("V", latent, pages, True, SHARES), page_stride),
        )

    @property
    def _p_stride(self) -> int:
        """Elements from P of warpgroup 1 to that of warpgroup 0."""
        plan = self.traits.smem_plan
        return int(plan["p0"].start - plan["p1"].start) // ELEMENT_BYTES

    def fragments(self) -> tuple[Fragment, ...]:
        """What each consumer warpgroup has in registers; drawn once where both have the same of different pages."""
        half, make = self.half, self.frame.fragment
        both = "Each warpgroup has a tile of its own page."
        return (
            make("rQr", self.of["Qr"], half.tSrQ_last, "Read once a tile, so that P may lie in its place."),
            make("acc_S", self.of["S"], half.acc_S, f"{both} Four neighbouring lanes hold a row together."),
            make("rP", self.of["P"], half.tOrP, f"{both} The S accumulators, rounded, for the product with that page."),
            self.halves.fragment("acc_O", self.of["O"], half.acc_O, "Half of the columns each, for the whole tile."),
        )

    def steps(self) -> tuple[Step, ...]:
        """In the order of a tile."""
        own, s = When("loop", PAIR, WARPGROUPS), Factor(self.of["S"], "acc_S")
        q, k, kr = self._descriptors()
        v = Factor(self.of["V"], "sV", self.half.tOrV[None, None, None, 0])
        p = Factor(self.frame.placed(self.half.mma_other, "A", "P"), "sP", self.half.tOrP_other)
        o = Factor(self.of["O"], "acc_O")
        draw = self.draw
        qk_note = "Of the own page, group by group as these arrive."
        last_note = "Q's last slab from registers, since P of warpgroup 1 lies in its place."
        publish = draw.stage("P", self.kernel.copy_p(), "rP", own, "For the other warpgroup, with the rows' maxima.")
        ours = rescale_note(self.traits.headroom)
        return (
            self._load("Q", When("prologue", TILE, LOADER), "Once the last tile's last scores are there."),
            self._load("Qr", When("prologue", TILE, LOADER), "Behind a tile's first page: until then P may lie there."),
            draw.fetch("Qr", self.kernel.copy_q_last(), When("prologue", TILE)),
            self._load("K", When("loop", PAGE, LOADER), self._groups()),
            self._load("Kr", When("loop", PAGE, LOADER), "In the first group; it is not V's."),
            draw.product("wgmma_qk", "S = Q K^T, latent columns", (q, k, s), own, qk_note),
            draw.product("wgmma_qk_last", "S += Qr Kr^T", (Factor(self.of["Qr"], "rQr"), kr, s), own, last_note),
            self._softmax(),
            self._convert(),
            publish,
            self._rows("rescale_o", "O: rescaled to the new maxima", "rescale", RESCALE, "O", ours),
            draw.product(
                "wgmma_pv_own", "O += P V of the own page", (Factor(self.of["P"], "rP"), v, o), own,
                "P from the registers that the scores were in.", frame=self.halves,
            ),
            draw.product(
                "wgmma_pv_other", "O += P V of the other page", (p, v, o), own,
                "P from shared memory, once the other warpgroup has published it. Warpgroup 1 issues it behind its "
                "own scores and before its own softmax, warpgroup 0 last.", frame=self.halves,
            ),
            *store_out(self.halves, self.of["O"], self.problem),
        )  # fmt: skip

    def _descriptors(self) -> tuple[Factor, Factor, Factor]:
        """Q, K and Kr as the products read them, each from its own first byte."""
        import cutlass.cute as cute

        def factor(tensor: str, mma: Any, cols: int) -> Factor:
            name = "A" if tensor == "Q" else "B"
            layout = self.kernel.smem_layout(cols)
            start = cute.recast_ptr(smem_start(), layout.inner, dtype=self.kernel.dtype)
            tile = cute.make_tensor(start, cute.select(layout.outer, mode=[0, 1]))
            own = getattr(mma.get_slice(0), f"partition_{name}")(tile)
            return Factor(self.of[tensor], f"s{tensor}", getattr(mma, f"make_fragment_{name}")(own))

        half = self.half
        return (
            factor("Q", half.mma_qk, LATENT_DIM_V),
            factor("K", half.mma_qk, LATENT_DIM_V),
            factor("Kr", half.mma_qk_last, SLAB),
        )

    def _groups(self) -> str:
        """How the slabs of a page arrive."""
        groups = self.traits.groups
        words = f"Groups of {', '.join(map(str, groups))} slabs have an mbarrier each: products begin with the first."
        return f"{words} Each part of a page, two slabs, is refilled once its readers have released it."

    def _load(self, tensor: str, when: When, note: str) -> Step:
        """Slabs by TMA, a box each."""
        import cutlass.cute as cute

        from cuteflash.atoms.sm90 import tma_partition

        is_q = tensor.startswith("Q")
        rows, cols = self.frame.shape(tensor)
        tma = self._tma()
        atom, coords, smem = (
            (tma.load_q, tma.gQ, self.smem.sQ_slabs) if is_q else (tma.load_k, tma.gK, self.smem.sK_slabs)
        )
        boxes = cute.local_tile(coords[None, None, 0], (rows, SLAB), (0, None))
        _, partition = tma_partition(atom, smem, boxes)
        box, _ = coordinates(partition.layout, (rows, 1, 0)).modes()
        tv = concatenate(Layout(1, 0), box, Layout(cols // SLAB, rows * SLAB if cols > SLAB else 0))
        return Step(
            id=f"load_{tensor.lower()}",
            title=f"{tensor}: global → shared memory",
            kind="tma",
            instruction=TMA_LOAD,
            role=when.role,
            repeat=when.repeat,
            phase=when.phase,
            touches=(Touch(f"g{tensor}", "read", tv), Touch(f"s{tensor}", "write", tv)),
            note=f"An instruction moves one box, a slab; the TMA unit applies the swizzle. {note}",
            box=(rows, SLAB),
        )

    def _tma(self) -> Any:
        """The kernel's TMA atoms over example tensors."""
        import cutlass.cute as cute

        from cuteflash.mla_problem import MlaTensors

        start = cute.make_ptr(self.kernel.dtype, 0, cute.AddressSpace.gmem, assumed_align=16)

        def tensor(count: int, rows: int) -> Any:
            shape = (count, rows, LATENT_DIM)
            return cute.make_tensor(start, cute.make_layout(shape, stride=(rows * LATENT_DIM, LATENT_DIM, 1)))

        tensors = {"q": tensor(1, EXAMPLE_ROWS), "kv_cache": tensor(EXAMPLE_PAGES, self.traits.tile_n)}
        return self.kernel.make_tma(MlaTensors(**{name: tensors.get(name) for name in MlaTensors._fields}))

    def _softmax(self) -> Step:
        return self._rows(
            "softmax", "Online softmax of S", "softmax", f"max.f32, shfl.sync.bfly.b32, {EXPONENTIALS}", "S",
            f"{row_move(self.traits.headroom)} Maxima go from page to page, and so from one warpgroup to "
            "the other through shared memory; each keeps the sums of its own pages, which are added once a tile. "
            "Warpgroup 1 takes its exponentials while its product with the first page's P runs.",
        )  # fmt: skip

    def _rows(self, id: str, title: str, kind: Any, instruction: str, tensor: str, note: str) -> Step:
        """A step of every consumer warp on an accumulator, row by row."""
        frame = self.halves if tensor == "O" else self.frame
        touches = tuple(frame.row_touch(f"acc_{tensor}", mode, self.of[tensor]) for mode in ("read", "write"))
        return Step(id, title, kind, instruction, "every consumer warp", PAIR, "loop", touches, note)

    def _convert(self) -> Step:
        first = self.frame.first_thread
        p = self.of["P"]
        touches = (p.touch_k_blocks("acc_S", "read", first), p.touch_k_blocks("rP", "write", first))
        instruction = f"cvt.rn.{ptx_type(self.problem.dtype)}x2.f32"
        note = "No data moves between threads."
        return Step(
            "convert_p", "P: rounded to the element type", "convert", instruction, "every consumer warp", PAIR, "loop",
            touches, note,
        )  # fmt: skip


def _staged(tile: Tile, stride: int) -> Tile:
    """A tile of one stage with two, `stride` elements apart."""
    layout = concatenate(*tile.layout.modes()[:2], Layout(CONSUMERS, stride))
    return dataclasses.replace(tile, layout=layout, stages=CONSUMERS)
