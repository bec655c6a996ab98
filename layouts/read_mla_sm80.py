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

KEYS: Final = "Rows of the cache: one head, which all query heads read."
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
        self.part = dataclasses.replace(self.frame, sizes=sizes | {"d": LATENT_DIM // t.column_parts})
        self.smem = kernel.make_tiles(smem_start())
        self.registers = kernel.make_fragments(types.SimpleNamespace(tiles=self.smem))
        self.of = self.operands()
        self.draw = AmpereSteps(self.frame, self.product_dtype, EVERY)

    @property
    def product_dtype(self) -> str:
        """Element type of the products' operands."""
        return self.problem.dtype

    @property
    def product_rows(self) -> int:
        """Query rows that a warp has in the product with K."""
        return MMA_M

    @property
    def shared_out(self) -> str:
        """What each of two warps that share columns gets half of."""
        return "keys"

    @property
    def q_blocks(self) -> tuple[int, int, int]:
        """K-blocks of Q that a warp has, how many of them it keeps, and how many are fetched at once."""
        traits = self.traits
        return traits.steps * STEP // MMA_K, traits.q_kept * STEP // MMA_K, traits.fetch // MMA_K

    def operands(self) -> dict[str, Placed]:
        """Those of all products, by tensor; `QK` is what a warp has of S from its columns of Q and K."""
        scores, pv, frame = self.kernel.tiled_mma_s(), self.kernel.tiled_mma_pv(), self.frame
        return {
            "Q": self.placed_part("A", "Q"),
            "K": self.placed_part("B", "K"),
            "QK": self.placed_part("C", "S"),
            "S": frame.placed(scores, "C", "S"),
            "P": frame.placed(pv, "A", "P"),
            "V": frame.placed(pv, "B", "V", transposed=True),
            "O": frame.placed(pv, "C", "O"),
        }

    def placed_part(self, operand: Operand, tensor: str) -> Placed:
        """An operand of the product with K, by the threads of all parts of the columns."""
        found = self.part.placed(self.kernel.tiled_mma_qk(), operand, tensor)
        return dataclasses.replace(
            found,
            threads=self.all_parts(self.spread(found.threads, tensor), tensor),
            values=self.spread(found.values, tensor),
        )

    def spread(self, numbers: Layout, tensor: str) -> Layout:
        """Elements of the columns of the first part, numbered as if these were neighbours, as elements of the tile."""
        parts = self.traits.column_parts
        if parts == 1 or tensor == "S":
            return numbers
        step = STEP * self.frame.shape(tensor)[0]
        return composition(Layout((step, LATENT_DIM // STEP // parts), (1, parts * step)), numbers)

    def all_parts(self, threads: Layout, tensor: str) -> Layout:
        """The thread mode of all warps, from that of those with the first part of the columns.

        Warps count query rows, then parts of the columns, then keys. A warp has every other `STEP` columns.
        """
        parts, together = self.traits.column_parts, self.threads_before_parts
        if parts == 1:
            return threads
        rows = composition(threads, Layout(together))
        keys = composition(threads, Layout(threads.size() // together, together))
        return concatenate(rows, Layout(parts, 0 if tensor == "S" else STEP * self.frame.shape(tensor)[0]), keys)

    @property
    def threads_before_parts(self) -> int:
        """Threads with the same columns of Q and K behind which come those with the other ones."""
        return int(self.traits.warps_m) * WARP

    def roles(self) -> tuple[Role, ...]:
        """All warps do the same."""
        t = self.traits
        columns = "" if t.column_parts == 1 else f" and {LATENT_DIM // t.column_parts} columns of Q and K"
        scores = f"S of {self.product_rows} query rows and {t.tile_n // t.warps_n} keys{columns}"
        out = f"all rows and {LATENT_DIM_V // t.num_warps} columns of O"
        return (Role("warps", 0, t.num_threads, f"loads, products, softmax, stores; each has {scores}, {out}"),)

    def tiles(self) -> tuple[Tile, ...]:
        """Global tiles, then shared memory."""
        frame, plan = self.frame, self.traits.smem_plan
        over = "What warps keep of Q in registers lies over P and, with it, over keys that are loaded later."
        return (
            global_latent(frame, "Q", LATENT_DIM, ROWS),
            self.global_keys(),
            *out_tiles(frame, self.problem),
            shared_tile("Q", self.smem.sQ.layout, plan["q"].start, False, over if self.is_q_covered else ""),
            *self.shared_keys(),
            *((self._halves(),) if self.traits.column_parts > 1 else ()),
            shared_tile("P", self.smem.sP.layout, plan["p"].start, False, "Every warp reads all of it."),
        )

    @property
    def is_q_covered(self) -> bool:
        """Whether Q's place in shared memory is used for other things later."""
        return bool(self.traits.q_kept)

    def global_keys(self) -> Tile:
        """A step's rows of the cache."""
        return global_latent(self.frame, "K", LATENT_DIM, KEYS)

    def shared_keys(self) -> tuple[Tile, Tile]:
        """K and V, which are the same bytes."""
        pages, kernel = self.traits.smem_plan["pages"].start, self.kernel
        loaded_last = "Stage 0 is loaded last." if self.traits.q_kept else ""
        return (
            shared_tile("K", kernel.smem_layout_k(), pages, False, loaded_last),
            shared_tile("V", kernel.smem_layout_v(), pages, False, SHARES),
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
        one = "One of its k-blocks is live at a time."
        every = "Every warp has it: each element is in the registers of one thread of every warp."
        parted = " A warp has every other 32 columns." if traits.column_parts > 1 else ""
        blocks, kept, fetched = self.q_blocks
        q_note = "Stays for the whole tile."
        if kept < blocks:
            q_note = f"{kept} of its {blocks} k-blocks, the last ones, stay for the whole tile; {fetched} at once come."
        k_note = f"{fetched} of its k-blocks {'are' if fetched > 1 else 'is'} live at a time."
        v_note = f"A warp has its columns of O. {one}"
        chains = traits.chains
        turns = f"There are {chains}, which take k-blocks in turn, and are added." if chains > 1 else ""
        lanes = "Four neighbouring lanes hold a row together."
        q = make("rQ", self.of["Q"], self.compact("Q"), f"{q_note}{parted}")
        k = make("rK", self.of["K"], self.compact("K"), f"{k_note}{parted}")
        return (
            _live(q, min(kept + fetched, blocks), blocks),
            _live(k, fetched, blocks),
            *self._accumulators(turns, lanes),
            _live(make("rP", self.of["P"], held.rP, f"{every} {one}"), 1, traits.tile_n // MMA_K),
            _live(make("rV", self.of["V"], self.v_registers, v_note), 1, traits.tile_n // MMA_K),
            make("acc_O", self.of["O"], held.acc_O, "All rows and some columns, for the whole tile."),
        )

    def _accumulators(self, turns: str, lanes: str) -> tuple[Fragment, ...]:
        """Of the product with K, and where warps share the columns, of what they share out."""
        make, chains = self.frame.fragment, self.traits.chains
        both = "Two warps have these elements, each from its own columns."
        shared = self.traits.column_parts > 1
        note = " ".join(part for part in (lanes, both if shared else "", turns) if part)
        product = make("acc_QK" if shared else "acc_S", self.of["QK"], self.registers.accs_S[0], note)
        product = _live(product, chains, 1)
        if not shared:
            return (product,)
        half = f"Of half of the {self.shared_out} of `acc_QK`. {lanes}"
        return product, make("acc_S", self.of["S"], self.registers.acc_S, half, "acc_QK")

    @property
    def v_registers(self) -> Any:
        """Those of V's fragments."""
        return self.registers.rVt

    def compact(self, tensor: str) -> Any:
        """Registers of a warp's part of the columns in the order of its k-blocks; the kernel's are for all columns."""
        import cutlass.cute as cute

        return cute.make_rmem_tensor(cute.make_layout(self.of[tensor].values.shape), self.kernel.dtype)

    def steps(self) -> tuple[Step, ...]:
        """In the order of a tile."""
        of, draw, traits = self.of, self.draw, self.traits
        qk = (of["Q"], "rQ"), (of["K"], "rK"), (of["QK"], "acc_QK" if traits.column_parts > 1 else "acc_S")
        pv = (of["P"], "rP"), (of["V"], "rV"), (of["O"], "acc_O")
        every = f"A warp has {self.product_rows} rows and its keys"
        every += ", and half of the columns." if traits.column_parts > 1 else "."
        if traits.chains > 1:
            every += f" K-blocks go to {traits.chains} accumulators in turn: an instruction waits for the one before "
            every += "on the same one."
        rounded = "Rounded on the way: every warp needs all keys of its rows, for its columns of O."
        return (
            self._load("Q"),
            self._load("K"),
            *self.prepare_q(),
            self.fetch_q(),
            self.fetch_k(),
            noted(draw.product("mma_qk", "S = Q K^T", *qk), every),
            *((self._add_parts(),) if traits.column_parts > 1 else ()),
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
            self.fetch_v(),
            noted(draw.product("mma_pv", "O += P V", *pv), "A warp has all rows and its columns."),
            *self.store(),
        )  # fmt: skip

    def _load(self, tensor: str) -> Step:
        """Rows to shared memory; a tile of few rows by some of the threads."""
        is_q, stages = tensor == "Q", self.traits.kv_stage
        ahead = f"{stages - 1} block{'s' if stages > 2 else ''} ahead of the products. "
        step = self.load_rows(tensor, "" if is_q else ahead)
        threads = step.touches[0].tv.mode(0).size()
        return step if threads == self.traits.num_threads else dataclasses.replace(step, role=f"{threads} threads")

    def load_rows(self, tensor: str, note: str) -> Step:
        """Rows of Q, or of the cache, by cp.async."""
        return self.draw.load(tensor, self.kernel.load_copy(*self.frame.shape(tensor)), note, tensor == "Q")

    def prepare_q(self) -> tuple[Step, ...]:
        """What happens to Q in shared memory."""
        return ()

    def fetch_q(self) -> Step:
        """Q's fragments, a warp's columns of them."""
        return self.kept(self._fetch_part("Q", self.kernel.copy_q()))

    def fetch_k(self) -> Step:
        """K's fragments, a warp's columns of them."""
        return self._fetch_part("K", self.kernel.copy_k())

    def fetch_v(self) -> Step:
        """V's fragments."""
        turned = "Transposed on the way: the product's k extent runs over V's rows."
        return self.draw.fetch("rV", "V", self.kernel.copy_v(), (True, True), why=turned)

    def store(self) -> tuple[Step, ...]:
        """O to memory."""
        return store_out(self.frame, self.of["O"], self.problem)

    def _fetch_part(self, tensor: str, copy: Any) -> Step:
        """ldmatrix by a tiled copy of all columns, of which a warp has a part."""

        def owned(layout: Any) -> Layout:
            threads, *moved = self.part.copy(layout, copy.tiler_mn, tensor).modes()
            spread = (self.spread(mode, tensor) for mode in moved)
            return concatenate(self.all_parts(self.spread(threads, tensor), tensor), *spread)

        step = self.draw.fetch(f"r{tensor}", tensor, copy, (False, False))
        return self.touching(step, owned(copy.layout_src_tv_tiled), owned(copy.layout_dst_tv_tiled))

    @staticmethod
    def touching(step: Step, *tvs: Layout) -> Step:
        """The step with other elements in its touches."""
        touches = (dataclasses.replace(touch, tv=tv) for touch, tv in zip(step.touches, tvs, strict=True))
        return dataclasses.replace(step, touches=tuple(touches))

    def kept(self, step: Step) -> Step:
        """A fetch of Q as often as it happens."""
        blocks, kept, _ = self.q_blocks
        if kept == blocks:
            return dataclasses.replace(step, repeat=ONCE, phase="prologue")
        if not kept:
            return step
        columns = MMA_K * kept
        repeat = f"{EVERY}; the last {columns} columns {ONCE}"
        return noted(dataclasses.replace(step, repeat=repeat), f"A warp keeps its last {columns} columns in registers.")

    def _add_parts(self) -> Step:
        """S from the products of both parts of the columns."""
        acc = self.of["S"]
        flat = concatenate(*acc.values.modes())
        quads = concatenate(composition(flat, Layout(QUAD)), composition(flat, Layout(flat.size() // QUAD, QUAD)))
        tv = concatenate(acc.threads, *quads.modes())
        touches = Touch("acc_QK", "read", tv), Touch("sS", "read", tv, lane_bytes=16), Touch("acc_S", "write", tv)
        note = (
            f"Each of two warps gets half of the {self.shared_out}: it writes its products of the others to where "
            "their warp reads them, 16 bytes a thread, and adds what that one has written for it."
        )
        instruction = "st.shared.v4.b32, bar.sync, ld.shared.v4.b32, add.f32"
        title = "S: products of both parts of the columns added"
        return Step("add_parts", title, "add", instruction, WARPS, EVERY, "loop", touches, note)

    def _rows(self, id: str, title: str, kind: Any, instruction: str, tensor: str, note: str) -> Step:
        """A step of every warp on an accumulator, row by row."""
        touches = tuple(self.frame.row_touch(f"acc_{tensor}", mode, self.of[tensor]) for mode in ("read", "write"))
        return Step(id, title, kind, instruction, WARPS, EVERY, "loop", touches, note)


def noted(step: Step, note: str) -> Step:
    """The step with more words."""
    return dataclasses.replace(step, note=f"{step.note} {note}")


def _live(fragment: Fragment, count: int, of: int) -> Fragment:
    """A fragment of which so many parts are live at a time."""
    return dataclasses.replace(fragment, live=fragment.registers * count // of)
