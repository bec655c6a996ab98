"""The scene of a row that decodes latent attention from an e4m3 cache: what differs from 16 bits.

ldmatrix brings pairs of bytes, of which operands of fp16 are made in registers. Which elements a lane gets, and where
the kernel looks for them, is that of `kernels/sm80/mla_e4m3_mma.py`: products take the columns in another order.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V
from cuteflash.traits.mla_e4m3 import PAIRS
from cuteflash.traits.sm80 import MMA_K, MMA_M, MMA_N, WARP

from .algebra import Layout, composition, concatenate
from .ampere import LDMATRIX, LDMATRIX_TRANS, ONCE, WARPS
from .bytes_in_registers import ADDRESSED, CONVERSION, IN_FOURS, IN_PAIRS, NEIGHBOURS, TURNED
from .latent import SHARES, global_latent, store_quads
from .read import WORD, Operand, Placed, byte_tile, shuffled
from .read_mla_sm80 import KEYS, ReaderMlaSm80, noted
from .scene import Fragment, Step, Tile, Touch
from .softmax_steps import EVERY

CHUNK: Final = 16  # bytes of a cached row to which a lane gives the address
SLAB_WORDS: Final = 32  # pairs of elements of a slab of Q, one for each lane of a warp


class ReaderMlaE4m3(ReaderMlaSm80):
    """Reads one kernel; make and use it inside `layouts.dsl.context`."""

    @property
    def product_dtype(self) -> str:
        """Element type of the products' operands."""
        return "fp16"

    @property
    def product_rows(self) -> int:
        """Query rows that a warp has in the product with K."""
        return int(self.traits.tile_m // self.traits.product_warps_m)

    @property
    def q_blocks(self) -> tuple[int, int, int]:
        """K-blocks of Q that a warp has, how many of them it keeps, and how many are fetched at once."""
        return self.traits.steps, self.traits.q_kept, 1

    @property
    def threads_before_parts(self) -> int:
        """Threads with the same columns of Q and K behind which come those with the other ones."""
        return WARP if self.traits.trades_rows else super().threads_before_parts

    @property
    def is_q_covered(self) -> bool:
        """Whether Q's place in shared memory is used for other things later."""
        return False

    @property
    def shared_out(self) -> str:
        """What each of two warps that share columns gets half of."""
        return "rows" if self.traits.trades_rows else super().shared_out

    def operands(self) -> dict[str, Placed]:
        """As of 16 bits, with the columns in the products' order."""
        found = super().operands()
        for tensor, of_16 in (("Q", IN_FOURS), ("K", IN_FOURS), ("V", IN_PAIRS), ("O", IN_PAIRS)):
            found[tensor] = shuffled(found[tensor], self.frame.shape(tensor), of_16)
        return found

    def placed_part(self, operand: Operand, tensor: str) -> Placed:
        """Warps that trade rows have two neighbouring groups of 16, where the DSL's partition has distant ones."""
        found = super().placed_part(operand, tensor)
        if not self.traits.trades_rows or tensor == "K":
            return found
        rows, columns = self.frame.shape(tensor)
        groups = self.traits.product_warps_m
        order = Layout((MMA_M, groups, 2, columns), (1, 2 * MMA_M, MMA_M, rows))
        threads, values = (composition(order, numbers) for numbers in (found.threads, found.values))
        return dataclasses.replace(found, threads=threads, values=values)

    def global_keys(self) -> Tile:
        """A step's rows of the cache."""
        return global_latent(self.frame, "K", LATENT_DIM, KEYS, 1)

    def shared_keys(self) -> tuple[Tile, Tile]:
        """K and V, which are the same bytes."""
        start, note = (
            self.traits.smem_plan["pages"].start,
            "e4m3, as memory has it; pairs of bytes move as one element.",
        )
        k = byte_tile("sK", "K", self.smem.sK.layout, start, note, swizzle_bytes=False)
        rows, columns, stages = k.layout.modes()
        layout = concatenate(rows, composition(columns, Layout(LATENT_DIM_V)), stages)
        shape = self.frame.shape("V")
        return k, dataclasses.replace(k, id="sV", tensor="V", shape=shape, layout=layout, note=SHARES)

    def fragments(self) -> tuple[Fragment, ...]:
        """As of 16 bits; K and V are made into fp16 a fragment at a time."""
        words = 2 * CHUNK * MMA_K // 4 // WARP  # that an ldmatrix brings a lane
        made = MMA_N * MMA_K // 2 // WARP
        note = (
            "fp16, made of e4m3 where it is multiplied: an ldmatrix brings four registers, each of which becomes two."
        )
        live = {"live": words + made, "note": note}
        found = super().fragments()
        return tuple(dataclasses.replace(one, **live) if one.id in ("rK", "rV") else one for one in found)  # type: ignore[arg-type]

    @property
    def v_registers(self) -> Any:
        """Those that all of V's fragments would take."""
        return self.compact("V")

    def load_rows(self, tensor: str, note: str) -> Step:
        """Rows of Q, or of the cache as pairs of bytes, by cp.async."""
        if tensor == "Q":
            return super().load_rows(tensor, note)
        return self.draw.load_pairs("K", self.kernel.load_copy(self.frame.shape("K")[0], PAIRS), note)

    def prepare_q(self) -> tuple[Step, ...]:
        """Q made into fp16, in the order in which the bytes of K come."""
        rows, columns = self.frame.shape("Q")
        warps, word = self.traits.num_warps, WORD * rows
        slabs = columns // (WORD * SLAB_WORDS)
        repeats = Layout((slabs, rows // warps), (SLAB_WORDS * word, warps))

        def touch(mode: Any, lanes: Layout) -> Touch:
            return Touch("sQ", mode, concatenate(lanes, Layout(WORD, rows), repeats), lane_bytes=4)

        read = Layout((SLAB_WORDS, warps), (word, 1))
        write = Layout(((2, 4, 4), warps), ((4 * word, word, 8 * word), 1))
        note = (
            "A warp has a row at a time, and multiplies it with a power of two that brings its largest element below "
            "2^15; its scores are scaled back. Of eight words the even ones come first, so that a product's lane, "
            "which reads words t and t + 4, has four neighbouring columns. From here on, columns have that order."
        )
        instruction = "ld.shared.b32, shfl.sync.bfly.b32, mul.f32, cvt.rn.f16x2.f32, st.shared.b32"
        return (
            Step(
                "prepare_q", "Q: made into fp16, its columns sorted", "convert", instruction, WARPS, ONCE, "prologue",
                (touch("read", read), touch("write", write)), note,
            ),
        )  # fmt: skip

    def fetch_q(self) -> Step:
        """Q's fragments from the sorted tile, where those of 16 columns are in the product's order."""
        q, rows = self.of["Q"], self.frame.shape("Q")[0]
        blocks, _, _ = self.q_blocks
        threads = self._lanes("Q", CHUNK // WORD, self.product_rows, 0)
        groups = self.product_rows // MMA_M
        order = self.spread(Layout((groups, blocks), (MMA_M, MMA_K * rows)), "Q")
        read = concatenate(threads, Layout(CHUNK // WORD, rows), order)
        step = self._fetch("Q", LDMATRIX, (read, q.touch_k_blocks("rQ", "write", 0).tv), "")
        return self.kept(step)

    def fetch_k(self) -> Step:
        """16 keys of 32 columns, of a warp's columns."""
        keys, own, blocks = self.frame.shape("K")[0], self.traits.warp_keys, self.traits.steps // 2
        order = self.spread(Layout((own // CHUNK, blocks), (CHUNK, 2 * CHUNK * keys)), "K")
        read = concatenate(self._lanes("K", CHUNK, 0, own), Layout(CHUNK, keys), order)
        atom, n, k = self.of["K"].values.modes()
        near_n, far_n = _halves(n, 2)
        near_k, far_k = _halves(k, 2)
        write = concatenate(self.of["K"].threads, concatenate(atom, near_n, near_k), concatenate(far_n, far_k))
        return self._fetch("K", f"{LDMATRIX}, {CONVERSION}", (read, write), NEIGHBOURS)

    def fetch_v(self) -> Step:
        """16 keys of 32 columns of V, transposed."""
        keys, own = self.frame.shape("V")[0], self.traits.warp_columns
        lanes = Layout(((CHUNK, 2), self.traits.num_warps), ((1, CHUNK * keys), own * keys))
        order = Layout((own // (2 * CHUNK), keys // MMA_K), (2 * CHUNK * keys, MMA_K))
        read = concatenate(lanes, Layout(CHUNK, keys), order)
        atom, n, k = self.of["V"].values.modes()
        near, far = _halves(n, 4)
        write = concatenate(self.of["V"].threads, concatenate(atom, near), concatenate(far, k))
        return self._fetch("V", f"{LDMATRIX_TRANS}, prmt.b32, {CONVERSION}", (read, write), TURNED)

    def _lanes(self, tensor: str, chunk: int, rows: int, keys: int) -> Layout:
        """Who gives ldmatrix which address: 16 rows, two chunks of so many elements, in the product with K.

        Warps have parts of `rows` query rows, or of `keys`, which the tensor has, and parts of the columns.
        """
        traits, step = self.traits, self.frame.shape(tensor)[0]
        groups = Layout((traits.product_warps_m, traits.warps_n), (rows, keys))
        return self.all_parts(concatenate(Layout((MMA_M, 2), (1, chunk * step)), groups), tensor)

    def _fetch(self, tensor: str, instruction: str, tvs: tuple[Layout, Layout], why: str) -> Step:
        read, write = tvs
        touches = Touch(f"s{tensor}", "read", read, lane_bytes=CHUNK), Touch(f"r{tensor}", "write", write)
        title = f"{tensor}: shared memory → registers" + ("" if tensor == "Q" else ", e4m3 → fp16")
        id = f"ldmatrix_{tensor.lower()}"
        return Step(id, title, "ldmatrix", instruction, WARPS, EVERY, "loop", touches, f"{ADDRESSED} {why}".strip())

    def store(self) -> tuple[Step, ...]:
        """O to memory: a thread has four neighbours of each 16 columns."""
        descale = "Times the descale of the sequence."
        return tuple(noted(step, descale) for step in store_quads(self.frame, self.of["O"], self.problem))


def _halves(mode: Layout, count: int) -> tuple[Layout, Layout]:
    """The first `count` of a mode, and how they repeat."""
    return composition(mode, Layout(count)), composition(mode, Layout(mode.size() // count, count))
