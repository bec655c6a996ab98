"""The scene of an sm90 row for few query rows on e4m3 caches: TMA and mma.sync, read from the kernel's own objects.

Each of eight consumer warps attends to some keys of every block. Both products are transposed, so that the keys, and
then the columns of V, are the operand with 16 rows. Operands of 16 bits are made of pairs of bytes; which elements
these are, in which order, is that of `kernels/sm90/few_mma.py`, and is drawn as a permutation of the DSL's partition.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Final, Literal

from cuteflash.problem import DTYPE_BYTES, FwdProblem
from cuteflash.traits.cache_sm90 import CHUNK, FP32_BYTES
from cuteflash.traits.few_sm90 import MMA_KEYS, PADDING, WARPS
from cuteflash.traits.sm90 import WARPGROUP

from .algebra import Layout, concatenate
from .ampere import LDMATRIX, LDMATRIX_TRANS, AmpereSteps
from .banks import WARP
from .bytes_in_registers import CONVERSION, FIT, FITTED, IN_FOURS, IN_PAIRS, NEIGHBOURS, TURNED
from .hopper import CONSUMERS, HopperSteps, Transfer, When, example_tensor
from .parts import IN_PLACE, MERGED, TITLES, part_tile
from .read import WORD, Frame, Placed, byte_tile, global_tile, no_launch, ptx_type, shared_tile, shuffled, smem_start
from .scene import Axis, Fragment, Phase, Role, Step, Tile, Touch
from .softmax_steps import EVERY, EXPONENTIAL

TILE: Final = "once a tile"
LOADER: Final = "one thread of the producer warp"


class ReaderFewSm90:
    """Reads one kernel; make and use it inside `layouts.dsl.context`."""

    loop: Final = "key blocks"

    def __init__(self, kernel: Any) -> None:
        from cuteflash.kernels.sm90.few_mma import make_warp

        self.kernel, self.traits = kernel, kernel.traits
        self.problem: FwdProblem = kernel.problem
        t = self.traits
        sizes: dict[Axis, int] = {"m": t.tile_m, "n": t.tile_n, "d": t.head_dim, "e": t.head_dim_v}
        self.frame = Frame(sizes, WARPS, WARPGROUP, WARP, split="n")
        self.smem = kernel.make_tiles(smem_start())
        block: Any = types.SimpleNamespace(launch=no_launch(1))
        self.warp = make_warp(kernel, block)
        self.of = self._operands()
        operands = self.problem.operands
        self.load = HopperSteps(self.frame, {}, operands.qk_dtype)
        self.draw = AmpereSteps(self.frame, operands.product_dtype, EVERY, CONSUMERS)

    def _operands(self) -> dict[str, Placed]:
        """Those of both products, by tensor."""
        mma, frame = self.kernel.tiled_mma(), self.frame
        found = {
            "Q": frame.placed(mma, "B", "Q"),
            "K": frame.placed(mma, "A", "K"),
            "S": frame.placed(mma, "C", "S", transposed=True),
            "P": frame.placed(mma, "B", "P"),
            "V": frame.placed(mma, "A", "V", transposed=True),
            "O": frame.placed(mma, "C", "O", transposed=True),
        }
        orders = {"Q": IN_FOURS, "K": IN_FOURS, "V": IN_PAIRS, "O": IN_PAIRS}
        return found | {name: shuffled(found[name], frame.shape(name), order) for name, order in orders.items()}

    def roles(self) -> tuple[Role, ...]:
        """The producer warpgroup, then the consumers, whose warps do the same on other keys."""
        does = f"warp by warp {self.traits.warp_keys} keys of every block, for all rows"
        return (
            Role("producer", 0, WARPGROUP, "warp 0 issues every TMA load; the others give up registers"),
            Role("consumers", WARPGROUP, WARPS * WARP, does),
        )

    def tiles(self) -> tuple[Tile, ...]:
        """Global tiles, then shared memory."""
        operands, kernel, plan, frame = self.problem.operands, self.kernel, self.traits.smem_plan, self.frame
        stored = "e4m3, as TMA brings it; the products read it from here."
        k, v = (kernel.smem_layout_loaded(columns) for columns in kernel.loaded_columns)
        return (
            global_tile(frame, "Q", operands.head_dim, "A tile's queries of the heads that share K and V."),
            global_tile(frame, "K", operands.head_dim, "One block of keys.", DTYPE_BYTES[operands.k_dtype]),
            global_tile(frame, "V", operands.head_dim_v, "One block of values.", DTYPE_BYTES[operands.v_dtype]),
            global_tile(frame, "O", operands.head_dim_v, "The tile's output."),
            part_tile(frame),
            shared_tile("Q", kernel.smem_layout_q(), plan["q"].start, True, ""),
            byte_tile("sK", "K", k, plan["k"].start, stored),
            byte_tile("sV", "V", v, plan["v"].start, stored),
            self._found(),
        )

    def _found(self) -> Tile:
        """O of every warp, of its keys."""
        rows, columns = shape = self.frame.shape("O")
        row = columns + PADDING
        return Tile(
            id="sO",
            tensor="O",
            space="shared",
            shape=shape,
            layout=Layout((rows, columns, WARPS), (row, 1, rows * row)),
            base=self.traits.smem_plan["found"].start,
            stages=WARPS,
            note=f"Of each warp a tile, fp32; {PADDING} elements between rows have them in different banks. Maxima and "
            "sums of the rows lie behind.",
            element_bytes=FP32_BYTES,
        )

    def fragments(self) -> tuple[Fragment, ...]:
        """Operands and accumulators of both products."""
        make, warp, rows = self.frame.fragment, self.warp, self.traits.tile_m
        quarters = "fp16, made of e4m3 where it is multiplied. A lane has four neighbouring columns of each 16."
        pairs = "fp16, made of e4m3 where it is multiplied. A lane has two neighbouring columns of each 16."
        one = "Four registers of pairs of bytes come at once, and 16 x 16 elements are made of them at a time."
        live = 2 * MMA_KEYS * MMA_KEYS // 2 // WARP  # four that come, and four that are made of them
        p = make("rP", self.of["P"], self._compact("P"), "Transposed between lanes; 16 of a warp's keys at a time.")
        every = "Every warp has all of it, for its keys; a lane has the columns of Q as it has those of K."
        return (
            make("rQ", self.of["Q"], warp.rQ, every),
            dataclasses.replace(make("rK", self.of["K"], self._compact("K"), f"{quarters} {one}"), live=live),
            make("acc_S", self.of["S"], warp.acc_S, "Held transposed: eight lanes, 4 apart, hold a row together."),
            dataclasses.replace(p, live=rows * MMA_KEYS // 2 // WARP),
            dataclasses.replace(make("rV", self.of["V"], self._compact("V"), f"{pairs} {one}"), live=live),
            make("acc_O", self.of["O"], warp.acc_O, "Of every warp's keys; for the whole tile."),
        )

    def _compact(self, tensor: str) -> Any:
        """Registers with all of an operand of which the kernel has only a part at a time."""
        import cutlass.cute as cute

        return cute.make_rmem_tensor(cute.make_layout(self.of[tensor].values.shape), self.kernel.dtype)

    def steps(self) -> tuple[Step, ...]:
        """In the order of a tile."""
        of = self.of
        fit = (self._fit_q(),) if self.kernel.fits_q else ()
        return (
            *self._loads(),
            self._read_q(),
            *fit,
            self._fetch("K", LDMATRIX, CONVERSION, NEIGHBOURS),
            self.draw.product("mma_qk", "S^T = K Q^T", (of["K"], "rK"), (of["Q"], "rQ"), (of["S"], "acc_S")),
            self._rows(
                "softmax", "Online softmax of S", "softmax", f"max.f32, shfl.sync.bfly.b32, {EXPONENTIAL}", "S",
                "Of the warp's own keys: a row's maximum over a lane's keys, then over the eight lanes with that row. "
                "Warps know nothing of each other until the tile ends.",
            ),
            self._rows(
                "rescale_o", "O: rescaled to the new maxima", "rescale", "mul.f32", "O",
                "Each row is multiplied with exp2(old maximum - new maximum), as its sum is.",
            ),
            self._turn_p(),
            self._fetch("V", LDMATRIX_TRANS, f"prmt.b32, {CONVERSION}", TURNED),
            self.draw.product("mma_pv", "O^T += V^T P^T", (of["V"], "rV"), (of["P"], "rP"), (of["O"], "acc_O")),
            *self._store(),
        )  # fmt: skip

    def _loads(self) -> tuple[Step, ...]:
        """TMA loads of Q, and of K and V as pairs of bytes."""
        kernel, smem, traits = self.kernel, self.smem, self.traits
        columns = self.problem.operands.head_dim, *kernel.loaded_columns
        tma = kernel.make_tma(*(example_tensor(kernel.dtype, count) for count in columns))
        ahead = f"Up to {traits.kv_stage} tiles ahead of the products. Two bytes move as one element."
        often = When("loop", EVERY, LOADER)
        q = Transfer("Q", tma.load_q, tma.gQ, smem.sQ_boxes, traits.tile_m)
        k = Transfer("K", tma.load_k, tma.gK, smem.loaded_k, traits.tile_n, width=WORD)
        v = Transfer("V", tma.load_v, tma.gV, smem.sV, traits.tile_n, width=WORD)
        load = self.load.load
        return load(q, When("prologue", TILE, LOADER), ""), load(k, often, ahead), load(v, often, ahead)

    def _read_q(self) -> Step:
        """Q by 8 bytes a lane, in the order in which K's bytes come."""
        q, first = self.of["Q"], self.frame.first_thread
        read = dataclasses.replace(q.touch_k_blocks("sQ", "read", first), lane_bytes=2 * FP32_BYTES)
        touches = read, q.touch_k_blocks("rQ", "write", first)
        note = "Four neighbouring elements of a row are two registers of the operand."
        return Step(
            "read_q", "Q: shared memory → registers", "ld.shared", "ld.shared.v2.b32", CONSUMERS, TILE, "prologue",
            touches, note,
        )  # fmt: skip

    def _fit_q(self) -> Step:
        """bf16 into fp16, whose range is smaller."""
        first = self.frame.first_thread
        touches = tuple(self.of["Q"].touch_k_blocks("rQ", mode, first) for mode in ("read", "write"))
        return Step("fit_q", "Q: made into fp16", "convert", FIT, CONSUMERS, TILE, "prologue", touches, FITTED)

    def _fetch(self, tensor: Literal["K", "V"], instruction: str, conversion: str, why: str) -> Step:
        """ldmatrix of 16 keys and 32 columns, as pairs of bytes, and what makes two operands of them."""
        keys, columns = self.frame.shape(tensor)
        own = self.traits.warp_keys
        below = Layout(own // MMA_KEYS, MMA_KEYS if own > MMA_KEYS else 0)
        beside = Layout(columns // (2 * MMA_KEYS), 2 * MMA_KEYS * keys if columns > 2 * MMA_KEYS else 0)
        order = concatenate(below, beside) if tensor == "K" else concatenate(beside, below)
        lanes = self.frame.all_groups(Layout((MMA_KEYS, 2), (1, CHUNK * keys)), tensor)
        if tensor == "K":
            held, values = Layout((4, 8), (4 * keys, 1)), Layout((4, 2, 2), (keys, 8, CHUNK * keys))
        else:
            held, values = Layout((4, 8), (2, 2 * keys)), Layout((2, 2, 2, 2), (keys, 1, 8, CHUNK * keys))
        first = self.frame.first_thread
        read = concatenate(lanes, Layout(CHUNK, keys), order)
        write = concatenate(self.frame.all_groups(held, tensor), values, order)
        note = (
            "Lane i gives the address of 16 bytes of a key; a phase is the 8 keys of a matrix of 8 x 8 pairs of bytes. "
            f"{why} Every number of e4m3 is one of fp16; scales are left to the softmax and to the end of a tile."
        )
        return Step(
            f"ldmatrix_{tensor.lower()}", f"{tensor}: e4m3 in shared memory → fp16 in registers", "ldmatrix",
            f"{instruction}, {conversion}", CONSUMERS, EVERY, "loop",
            (Touch(f"s{tensor}", "read", read, first, lane_bytes=CHUNK), Touch(f"r{tensor}", "write", write, first)),
            note,
        )  # fmt: skip

    def _turn_p(self) -> Step:
        """P as the product reads it, from the transposed scores."""
        first = self.frame.first_thread

        def touch(id: str, mode: Literal["read", "write"], tensor: str) -> Touch:
            acc = self.of[tensor]
            atom, *moving = acc.values.modes()
            pair, half = atom.modes()
            keys, rows = moving if tensor == "S" else reversed(moving)
            return Touch(id, mode, concatenate(acc.threads, pair, concatenate(half, rows, keys)), first)

        touches = touch("acc_S", "read", "S"), touch("rP", "write", "P")
        instruction = f"cvt.rn.{ptx_type(self.problem.operands.product_dtype)}x2.f32, "
        instruction += "movmatrix.sync.aligned.m8n8.trans.b16"
        note = "8 x 8 elements at a time: lanes hold pairs of queries, and the product wants pairs of keys."
        return Step(
            "turn_p", "P: rounded and transposed between lanes", "permute", instruction, CONSUMERS, EVERY, "loop",
            touches, note,
        )  # fmt: skip

    def _rows(self, id: str, title: str, kind: Any, instruction: str, tensor: str, note: str) -> Step:
        """A step of every consumer warp on an accumulator, row by row."""
        touches = tuple(self.frame.row_touch(f"acc_{tensor}", mode, self.of[tensor]) for mode in ("read", "write"))
        return Step(id, title, kind, instruction, CONSUMERS, EVERY, "loop", touches, note)

    def _store(self) -> tuple[Step, ...]:
        """What the warps found is merged, and written in full or as a part."""
        first, acc = self.frame.first_thread, self.of["O"]
        atom, m, n = acc.values.modes()
        row, pair = atom.modes()
        tv = concatenate(acc.threads, pair, concatenate(row, m, n))
        handed = Touch("acc_O", "read", tv, first), Touch("sO", "write", tv, first, lane_bytes=2 * FP32_BYTES)
        rows, columns = self.frame.shape("O")
        own = rows // WARPS
        whole = concatenate(Layout((WARP, WARPS), (0, own)), Layout(columns, rows), Layout(own, 1 if own > 1 else 0))
        at_end: Phase = "epilogue"
        lanes = "The lanes of a warp take 4 neighbouring columns each."
        merged = (
            f"Each warp takes {own} row{'s' if own > 1 else ''} of what all have found, and multiplies them by both "
            f"maxima: exp2(a warp's maximum - the largest one). {lanes}"
        )
        return (
            Step(
                "stage_o", "O: registers → shared memory", "st.shared", "st.shared.v2.f32", CONSUMERS, TILE, at_end,
                handed, "Every warp's O of its keys, beside its rows' maxima and sums.",
            ),
            Step(
                "merge_o", "O: of all warps, merged", "ld.shared", "ld.shared.v4.f32, shfl.sync.idx.b32, fma.rn.f32",
                CONSUMERS, TILE, at_end, (Touch("sO", "read", whole, first),), merged,
            ),
            *(
                Step(
                    f"store_{target[1:].lower()}", TITLES[target], "st.global", instruction, CONSUMERS, TILE, at_end,
                    (Touch(target, "write", whole, first),), f"{note} {lanes}".strip(),
                )
                for target, instruction, note in (
                    ("gO", "st.global.v2.b32", "Rounded."),
                    ("gO_part", "st.global.v4.b32", f"{IN_PLACE} {MERGED}"),
                )
            ),
        )  # fmt: skip
