"""The scene of a row that decodes latent attention by cp.async and mma.sync, read from the kernel's own objects.

All warps share the query rows of a tile: in S a warp has 16 of them with some keys, in O all of them with some columns.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Final

from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V, MlaProblem
from cuteflash.traits.mla_mma import STAT_BYTES
from cuteflash.traits.mla_sm80 import STEP
from cuteflash.traits.sm80 import MMA_K, MMA_M, WARP

from .algebra import Layout, composition, concatenate
from .ampere import ONCE, WARPS, AmpereSteps
from .latent import (
    EXPONENTIALS,
    RESCALE,
    ROWS,
    SHARES,
    global_latent,
    out_tiles,
    rescale_note,
    row_move,
    store_out,
)
from .read import Frame, Operand, Placed, fragment_order, shared_tile, smem_start
from .scene import Axis, Fragment, Role, Step, Tile, Touch
from .softmax_steps import EVERY

QUAD: Final = 4  # fp32 elements that a thread gives to another one at once


class ReaderMlaSm80:
    """Reads one kernel; make and use it inside `layouts.dsl.context`."""

    loop: Final = "key blocks"

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.traits = kernel, kernel.traits
        self.problem: MlaProblem = kernel.problem
        t = self.traits
        sizes: dict[Axis, int] = {"m": t.tile_m, "n": t.tile_n, "d": LATENT_DIM, "e": LATENT_DIM_V}
        self.frame = Frame(sizes, 1, 0, t.num_threads)
        # What one of the warps has that share the columns of Q and K, these columns beside each other.
        self.part = dataclasses.replace(self.frame, sizes=sizes | {"d": LATENT_DIM // t.k_parts})
        self.smem = kernel.make_tiles(smem_start())
        self.registers = kernel.make_fragments(types.SimpleNamespace(tiles=self.smem))
        self.of = self._operands()
        self.draw = AmpereSteps(self.frame, self.problem.dtype, EVERY)

    def _operands(self) -> dict[str, Placed]:
        """Those of all products, by tensor; `QK` is what a warp has of S from its columns of Q and K."""
        scores, pv, frame = self.kernel.tiled_mma_s(), self.kernel.tiled_mma_pv(), self.frame
        return {
            "Q": self._placed_part("A", "Q"),
            "K": self._placed_part("B", "K"),
            "QK": self._placed_part("C", "S"),
            "S": frame.placed(scores, "C", "S"),
            "P": frame.placed(pv, "A", "P"),
            "V": frame.placed(pv, "B", "V", transposed=True),
            "O": frame.placed(pv, "C", "O"),
        }

    def _placed_part(self, operand: Operand, tensor: str) -> Placed:
        """An operand of the product with K, by the threads of all parts of the columns."""
        found = self.part.placed(self.kernel.tiled_mma_qk(), operand, tensor)
        return dataclasses.replace(
            found,
            threads=self._all_parts(self._spread(found.threads, tensor), tensor),
            values=self._spread(found.values, tensor),
        )

    def _spread(self, numbers: Layout, tensor: str) -> Layout:
        """Elements of the columns of the first part, numbered as if these were neighbours, as elements of the tile."""
        parts = self.traits.k_parts
        if parts == 1 or tensor == "S":
            return numbers
        step = STEP * self.frame.shape(tensor)[0]
        return composition(Layout((step, LATENT_DIM // STEP // parts), (1, parts * step)), numbers)

    def _all_parts(self, threads: Layout, tensor: str) -> Layout:
        """The thread mode of all warps, from that of those with the first part of the columns.

        Warps count query rows, then parts of the columns, then keys. A warp has every other `STEP` columns.
        """
        parts, together = self.traits.k_parts, self.traits.warps_m * WARP
        if parts == 1:
            return threads
        rows = composition(threads, Layout(together))
        keys = composition(threads, Layout(threads.size() // together, together))
        return concatenate(rows, Layout(parts, 0 if tensor == "S" else STEP * self.frame.shape(tensor)[0]), keys)

    def roles(self) -> tuple[Role, ...]:
        """All warps do the same."""
        t = self.traits
        columns = "" if t.k_parts == 1 else f" and {LATENT_DIM // t.k_parts} columns of Q and K"
        scores = f"S of {MMA_M} query rows and {t.tile_n // t.warps_n} keys{columns}"
        out = f"all rows and {LATENT_DIM_V // t.num_warps} columns of O"
        return (Role("warps", 0, t.num_threads, f"loads, products, softmax, stores; each has {scores}, {out}"),)

    def tiles(self) -> tuple[Tile, ...]:
        """Global tiles, then shared memory."""
        frame, kernel, plan = self.frame, self.kernel, self.traits.smem_plan
        pages, kept = plan["pages"].start, self.traits.q_kept
        loaded_last = "Stage 0 is loaded last."
        over = "What warps keep of Q in registers lies over P and, with it, over keys that are loaded later."
        return (
            global_latent(frame, "Q", LATENT_DIM, ROWS),
            global_latent(frame, "K", LATENT_DIM, "Rows of the cache: one head, which all query heads read."),
            *out_tiles(frame, self.problem),
            shared_tile("Q", self.smem.sQ.layout, plan["q"].start, False, over if kept else ""),
            shared_tile("K", kernel.smem_layout_k(), pages, False, loaded_last if kept else ""),
            shared_tile("V", kernel.smem_layout_v(), pages, False, SHARES),
            *((self._halves(),) if self.traits.k_parts > 1 else ()),
            shared_tile("P", self.smem.sP.layout, plan["p"].start, False, "Every warp reads all of it."),
        )

    def _halves(self) -> Tile:
        """S on its way between the warps that share columns, as threads hold it: 16 bytes beside a neighbour's."""
        shape, acc = self.frame.shape("S"), self.of["S"]
        tv = concatenate(acc.threads, acc.values)
        return Tile(
            id="sS",
            tensor="S",
            space="shared",
            shape=shape,
            layout=fragment_order(tv, shape, self.traits.num_threads, QUAD),
            base=self.traits.smem_plan["halves"].start,
            note="Of the two products of an element, that of the warp which does not get it: fp32, in the order of the "
            "registers of the thread which does.",
            element_bytes=STAT_BYTES,
        )

    def fragments(self) -> tuple[Fragment, ...]:
        """Operands and accumulators of both products."""
        held, make, traits = self.registers, self.frame.fragment, self.traits
        fetched = traits.fetch // MMA_K  # k-blocks at once
        one = "One of its k-blocks is live at a time."
        every = "Every warp has it: each element is in the registers of one thread of every warp."
        parted = " A warp has every other 32 columns." if traits.k_parts > 1 else ""
        kept = traits.q_kept * STEP // MMA_K
        blocks = traits.steps * STEP // MMA_K
        q_note = "Stays for the whole tile."
        if kept < blocks:
            q_note = f"{kept} of its {blocks} k-blocks, the last ones, stay for the whole tile, {fetched} are fetched."
        k_note = f"{fetched} of its k-blocks {'are' if fetched > 1 else 'is'} live at a time."
        chains = traits.chains
        turns = f"There are {chains}, which take k-blocks in turn, and are added." if chains > 1 else ""
        lanes = "Four neighbouring lanes hold a row together."
        q = make("rQ", self.of["Q"], self._compact("Q"), f"{q_note}{parted}")
        k = make("rK", self.of["K"], self._compact("K"), f"{k_note}{parted}")
        return (
            _live(q, min(kept + fetched, blocks), blocks),
            _live(k, fetched, blocks),
            *self._accumulators(turns, lanes),
            _live(make("rP", self.of["P"], held.rP, f"{every} {one}"), 1, traits.tile_n // MMA_K),
            _live(make("rV", self.of["V"], held.rVt, f"A warp has its columns of O. {one}"), 1, traits.tile_n // MMA_K),
            make("acc_O", self.of["O"], held.acc_O, "All rows and some columns, for the whole tile."),
        )

    def _accumulators(self, turns: str, lanes: str) -> tuple[Fragment, ...]:
        """Of the product with K, and where warps share the columns, of what they share out."""
        make, chains = self.frame.fragment, self.traits.chains
        both = "Two warps have these elements, each from its own columns."
        shared = self.traits.k_parts > 1
        note = " ".join(part for part in (lanes, both if shared else "", turns) if part)
        product = make("acc_QK" if shared else "acc_S", self.of["QK"], self.registers.accs_S[0], note)
        product = _live(product, chains, 1)
        if not shared:
            return (product,)
        summed = make(
            "acc_S", self.of["S"], self.registers.acc_S, f"Of half of the keys of `acc_QK`. {lanes}", "acc_QK"
        )
        return product, summed

    def _compact(self, tensor: str) -> Any:
        """Registers of a warp's part of the columns in the order of its k-blocks; the kernel's are for all columns."""
        import cutlass.cute as cute

        return cute.make_rmem_tensor(cute.make_layout(self.of[tensor].values.shape), self.kernel.dtype)

    def steps(self) -> tuple[Step, ...]:
        """In the order of a tile."""
        of, draw, traits = self.of, self.draw, self.traits
        qk = (of["Q"], "rQ"), (of["K"], "rK"), (of["QK"], "acc_QK" if traits.k_parts > 1 else "acc_S")
        pv = (of["P"], "rP"), (of["V"], "rV"), (of["O"], "acc_O")
        every = "A warp has 16 rows and its keys."
        if traits.k_parts > 1:
            every = "A warp has 16 rows, and for twice its keys half of the columns."
        if traits.chains > 1:
            every += f" K-blocks go to {traits.chains} accumulators in turn: an instruction waits for the one before "
            every += "on the same one."
        rounded = "Rounded on the way: every warp needs all keys of its rows, for its columns of O."
        turned = "Transposed on the way: the product's k extent runs over V's rows."
        return (
            self._load("Q"),
            self._load("K"),
            self._fetch_part("Q"),
            self._fetch_part("K"),
            _noted(draw.product("mma_qk", "S = Q K^T", *qk), every),
            *((self._add_parts(),) if traits.k_parts > 1 else ()),
            self._rows(
                "softmax", "Online softmax of S", "softmax",
                f"max.f32, shfl.sync.bfly.b32, bar.sync, {EXPONENTIALS}", "S",
                f"{row_move(traits.headroom)} The {traits.key_groups} warps with the same rows find it together, "
                "through shared memory; each keeps the sums of its own keys, which are added once a tile.",
            ),
            draw.stage("P", self.kernel.store_p(), "acc_S", rounded, loop=True),
            self._rows(
                "rescale_o", "O: rescaled to the new maxima", "rescale", RESCALE, "O",
                f"{rescale_note(traits.headroom)} The factors come by way of shared memory, behind the barrier for P.",
            ),
            draw.fetch("rP", "P", self.kernel.copy_p(), (False, False)),
            draw.fetch("rV", "V", self.kernel.copy_v(), (True, True), why=turned),
            _noted(draw.product("mma_pv", "O += P V", *pv), "A warp has all rows and its columns."),
            *store_out(self.frame, of["O"], self.problem),
        )  # fmt: skip

    def _load(self, tensor: str) -> Step:
        """Rows to shared memory; a tile of few rows by some of the threads."""
        is_q, stages = tensor == "Q", self.traits.kv_stage
        copy = self.kernel.load_copy(*self.frame.shape(tensor))
        ahead = f"{stages - 1} block{'s' if stages > 2 else ''} ahead of the products. "
        step = self.draw.load(tensor, copy, "" if is_q else ahead, is_q)
        threads = step.touches[0].tv.mode(0).size()
        return step if threads == self.traits.num_threads else dataclasses.replace(step, role=f"{threads} threads")

    def _fetch_part(self, tensor: str) -> Step:
        """An operand's fragments of the product with K, a warp's columns of them."""
        copy = self.kernel.copy_q() if tensor == "Q" else self.kernel.copy_k()

        def owned(layout: Any) -> Layout:
            threads, *moved = self.part.copy(layout, copy.tiler_mn, tensor).modes()
            spread = (self._spread(mode, tensor) for mode in moved)
            return concatenate(self._all_parts(self._spread(threads, tensor), tensor), *spread)

        traits = self.traits
        kept_whole = tensor == "Q" and traits.q_kept == traits.steps
        step = self.draw.fetch(f"r{tensor}", tensor, copy, (False, False), kept_whole)
        read, write = step.touches
        tvs = owned(copy.layout_src_tv_tiled), owned(copy.layout_dst_tv_tiled)
        step = dataclasses.replace(
            step, touches=tuple(dataclasses.replace(x, tv=tv) for x, tv in zip((read, write), tvs, strict=True))
        )
        if tensor == "K" or kept_whole or not traits.q_kept:
            return step
        kept = STEP * traits.q_kept
        repeat = f"{EVERY}; the last {kept} columns {ONCE}"
        return _noted(dataclasses.replace(step, repeat=repeat), f"A warp keeps its last {kept} columns in registers.")

    def _add_parts(self) -> Step:
        """S from the products of both parts of the columns."""
        acc = self.of["S"]
        flat = concatenate(*acc.values.modes())
        quads = concatenate(composition(flat, Layout(QUAD)), composition(flat, Layout(flat.size() // QUAD, QUAD)))
        tv = concatenate(acc.threads, *quads.modes())
        touches = Touch("acc_QK", "read", tv), Touch("sS", "read", tv, lane_bytes=16), Touch("acc_S", "write", tv)
        note = (
            "Each of two warps gets half of the keys: it writes its products of the others to where their warp reads "
            "them, 16 bytes a thread, and adds what that one has written for it."
        )
        instruction = "st.shared.v4.b32, bar.sync, ld.shared.v4.b32, add.f32"
        title = "S: products of both parts of the columns added"
        return Step("add_parts", title, "add", instruction, WARPS, EVERY, "loop", touches, note)

    def _rows(self, id: str, title: str, kind: Any, instruction: str, tensor: str, note: str) -> Step:
        """A step of every warp on an accumulator, row by row."""
        touches = tuple(self.frame.row_touch(f"acc_{tensor}", mode, self.of[tensor]) for mode in ("read", "write"))
        return Step(id, title, kind, instruction, WARPS, EVERY, "loop", touches, note)


def _noted(step: Step, note: str) -> Step:
    return dataclasses.replace(step, note=f"{step.note} {note}")


def _live(fragment: Fragment, count: int, of: int) -> Fragment:
    """A fragment of which so many parts are live at a time."""
    return dataclasses.replace(fragment, live=fragment.registers * count // of)
