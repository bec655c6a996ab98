"""The scene of an sm90 forward row on e4m3 caches: what differs from 16 bits, read from the kernel's own objects.

TMA brings tiles of K and V with a byte an element; converting warpgroups make fp16 tiles of them, which the products
read. Of two consumer warpgroups that share 64 rows each has half of the keys of a block.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from cuteflash.traits.cache_sm90 import CHUNK, WARPS, Share
from cuteflash.traits.sm90 import WARPGROUP

from .algebra import Layout, Swizzle, concatenate
from .banks import WARP
from .bytes_in_registers import FIT, FITTED
from .hopper import CONSUMERS, HopperSteps, Transfer, When, example_tensor
from .read import WORD, Frame, byte_tile
from .read_sm90 import BLOCK, TILE, ReaderSm90
from .scene import Fragment, Role, Step, Tile, Touch

CONVERTING: Final = "every converting warp"
HALF: Final = CHUNK // WORD  # elements of fp16 in a store


class ReaderCacheSm90(ReaderSm90):
    """Reads one sm90 kernel of e4m3 caches; make and use it inside `layouts.dsl.context`."""

    def make_frame(self) -> Frame:
        """Warpgroups that share rows divide the keys."""
        frame = super().make_frame()
        shared = self.traits.key_warpgroups
        return frame if shared == 1 else dataclasses.replace(frame, groups=shared, split="n")

    def roles(self) -> tuple[Role, ...]:
        """As of 16 bits, with the converting warpgroups behind the producer."""
        producer, *consumers = super().roles()
        traits = self.traits
        names = ("K and V",) if traits.converting_warpgroups == 1 else ("K", "V")
        converting = [
            Role(f"converter {i}", (1 + i) * WARPGROUP, WARPGROUP, f"tiles of {what}, of e4m3 into fp16")
            for i, what in enumerate(names)
        ]
        if traits.key_warpgroups > 1:
            keys = traits.step_keys
            words = (f"keys {i * keys} to {(i + 1) * keys - 1} of every block" for i in range(traits.key_warpgroups))
            first = traits.first_consumer
            consumers = [Role(f"consumer {i}", first + i * WARPGROUP, WARPGROUP, w) for i, w in enumerate(words)]
        return (producer, *converting, *consumers)

    def tiles_of_k(self) -> tuple[Tile, ...]:
        """K as memory has it, and as the product reads it."""
        return (self._stored("K"), *super().tiles_of_k())

    def tiles_of_v(self) -> tuple[Tile, ...]:
        """V likewise."""
        return (self._stored("V"), *super().tiles_of_v())

    def _stored(self, tensor: str) -> Tile:
        """The tile as TMA brings it."""
        k_words, v_words = self.kernel.loaded_columns
        layout = self.kernel.smem_layout_loaded(k_words if tensor == "K" else v_words)
        start = self.traits.smem_plan[f"stored_{tensor.lower()}"].start
        return byte_tile(f"s{tensor}_stored", tensor, layout, start, "e4m3, as TMA brings it.")

    def fragments(self) -> tuple[Fragment, ...]:
        """As of 16 bits, and what the lanes of the converting warpgroups hold of a tile."""
        return (*super().fragments(), *(self._held(tensor) for tensor in ("K", "V")))

    def _held(self, tensor: str) -> Fragment:
        threads, reads, swizzle = self._lanes(tensor)
        tv = concatenate(threads, concatenate(*reads))
        registers = tv.mode(1).size() // 4
        note = "A lane has 16 bytes of each unit, all loaded before the first is converted."
        first = self._first_thread(tensor)
        shape = self.frame.shape(tensor)
        shared = "rK" if tensor == "V" and self.traits.converting_warpgroups == 1 else ""
        more: dict[str, Any] = {"place_of": shared, "note": note, "tv_swizzle": swizzle}
        return Fragment(f"r{tensor}", tensor, shape, "", "e4m3", first, tv, registers, **more)

    def _first_thread(self, tensor: str) -> int:
        """Of the warpgroup that converts K, or V."""
        return WARPGROUP * (2 if tensor == "V" and self.traits.converting_warpgroups > 1 else 1)

    def _share(self, tensor: str) -> Share:
        share: Share = self.traits.share(self.frame.shape(tensor)[1])
        return share

    def _lanes(self, tensor: str) -> tuple[Layout, tuple[Layout, Layout], Swizzle | None]:
        """(threads, (bytes of a load, loads)) to element, before the swizzle of elements; see `convert.place`.

        Of units of eight rows a lane's row is 4 b + (a xor b): the element's first bit, of the row, takes the third.
        """
        share, rows = self._share(tensor), self.frame.shape(tensor)[0]
        chunk = CHUNK * rows
        if share.chunks == 4:
            lanes, swizzle = Layout((4, 2, 4), (chunk, 4, 1)), Swizzle(1, 0, 2)
        else:
            lanes, swizzle = Layout((2, WARP // 2), (chunk, 1)), None
        threads = concatenate(lanes, Layout(WARPS, share.row_units * share.rows))
        loads = Layout((share.row_units, share.columns), (share.rows, share.chunks * chunk))
        return threads, (Layout(CHUNK, rows), loads), swizzle

    def load_k(self, tma: Any, when: When, ahead: str) -> tuple[Step, ...]:
        """TMA, then the conversion."""
        return self._bring("K", (tma.load_k, tma.gK, self.smem.loaded_k), when)

    def load_v(self, tma: Any, when: When, ahead: str) -> tuple[Step, ...]:
        """TMA, then the conversion."""
        return self._bring("V", (tma.load_v, tma.gV, self.smem.sV), when)

    def _bring(self, tensor: str, moved: tuple[Any, Any, Any], when: When) -> tuple[Step, ...]:
        what = Transfer(tensor, *moved, self.traits.tile_n, target=f"s{tensor}_stored", width=WORD)
        ahead = f"Up to {self.traits.stored_stage} tiles ahead of the conversion. Two bytes move as one element."
        return (self.draw.load(what, when, ahead), *self._convert(tensor))

    def _convert(self, tensor: str) -> tuple[Step, Step]:
        """A stored tile to registers, and from there as fp16 to the tile that the product reads."""
        threads, (chunk, loads), swizzle = self._lanes(tensor)
        share, rows = self._share(tensor), self.frame.shape(tensor)[0]
        half = Layout(HALF, rows)
        stores = Layout((share.row_units, 2, share.columns), (share.rows, HALF * rows, share.chunks * CHUNK * rows))
        read, write = concatenate(threads, chunk, loads), concatenate(threads, half, stores)
        first, id = self._first_thread(tensor), tensor.lower()

        def touch(part: str, mode: Any, tv: Layout, lane_bytes: int | None = None) -> Touch:
            return Touch(part, mode, tv, first, lane_bytes, swizzle)

        exact = "Every number of e4m3 is one of fp16; the scale is left to the softmax and to the end of a tile."
        return (
            Step(
                f"read_{id}", f"{tensor}: e4m3 → registers", "ld.shared", "ld.shared.v4.b32", CONVERTING, BLOCK, "loop",
                (touch(f"s{tensor}_stored", "read", read, CHUNK), touch(f"r{tensor}", "write", read)),
                f"A warp takes units of {share.rows} rows and {share.chunks} chunks of 16 bytes. Eight lanes access "
                "shared memory together: their rows and chunks lie in different banks, of this tile and of the next.",
            ),
            Step(
                f"convert_{id}", f"{tensor}: made into fp16 → shared memory", "st.shared",
                "cvt.rn.f16x2.e4m3x2, st.shared.v4.b32", CONVERTING, BLOCK, "loop",
                (touch(f"r{tensor}", "read", write), touch(f"s{tensor}", "write", write, CHUNK)),
                f"16 bytes of e4m3 are 32 of fp16, which a lane stores in two halves. {exact}",
            ),
        )  # fmt: skip

    def _tma(self) -> Any:
        """The kernel's TMA atoms over example tensors; K and V as pairs of bytes."""
        operands, dtype = self.problem.operands, self.kernel.dtype
        k_words, v_words = (example_tensor(dtype, size // WORD) for size in (operands.head_dim, operands.head_dim_v))
        out = example_tensor(self.kernel.out_dtype, operands.head_dim_v)
        return self.kernel.make_tma(example_tensor(dtype, operands.head_dim), k_words, v_words, out)

    def steps(self) -> tuple[Step, ...]:
        """As of 16 bits, with Q made into fp16 and, of two warpgroups that share rows, O merged by the first."""
        steps = [*super().steps()]
        if self.kernel.fits_q:
            at = next(i for i, step in enumerate(steps) if step.id == "load_k")
            steps.insert(at, self._fit_q())
        if self.traits.key_warpgroups > 1:
            at = next(i for i, step in enumerate(steps) if step.phase == "epilogue")
            steps.insert(at, self._merge())
        return tuple(steps)

    @property
    def finishing(self) -> HopperSteps:
        """The first consumer warpgroup alone writes O."""
        frame = self.frame
        alone = dataclasses.replace(frame, groups=1) if self.traits.key_warpgroups > 1 else frame
        return dataclasses.replace(self.draw, frame=alone)

    def _merge(self) -> Step:
        acc = self.of["O"]
        touches = tuple(self.frame.row_touch("acc_O", mode, acc) for mode in ("read", "write"))
        note = (
            "Each has O of its half of the keys. The second one leaves its registers in shared memory, in O's place, "
            "neighbouring threads' words beside each other; the first one adds them to its own, by both maxima."
        )
        return Step(
            "merge_o", "O: the second warpgroup's half of the keys is added", "add",
            "st.shared.b32, bar.sync, ld.shared.b32, fma.rn.f32", CONSUMERS, TILE, "epilogue", touches, note,
        )  # fmt: skip

    def _fit_q(self) -> Step:
        """bf16 into fp16, whose range is smaller."""
        note = FITTED
        if self.traits.q_in_regs:
            q, first = self.of["Q"], self.frame.first_thread
            touches = tuple(q.touch_k_blocks("rQ", mode, first) for mode in ("read", "write"))
        else:
            rows, columns = self.frame.shape("Q")
            both = Layout((2, rows), (HALF * rows, 1))  # two lanes a row, in whose chunks they take turns
            tv = concatenate(both, Layout(HALF, rows), Layout(columns // CHUNK, CHUNK * rows))
            touches = tuple(Touch("sQ", mode, tv, self.frame.first_thread, CHUNK) for mode in ("read", "write"))
            note += " Two lanes take a row, so that two rows of a phase share their banks."
        return Step("fit_q", "Q: made into fp16", "convert", FIT, CONSUMERS, TILE, "prologue", touches, note)
